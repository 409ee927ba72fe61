"""Random tensors on the GPU."""

import torch


def draw(*shape, dtype=torch.bfloat16, seed=0):
    """[B, H, T, D] in the memory of [B, T, H, D], as models have it."""
    generator = torch.Generator("cuda").manual_seed(seed)
    batch, heads, length, width = shape
    tensor = torch.randn(batch, length, heads, width, device="cuda", generator=generator)
    return tensor.to(dtype).transpose(1, 2)
