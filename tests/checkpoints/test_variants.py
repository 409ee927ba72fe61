"""flash-linear-attention's settings of attention: read as the class that computes the same.

The logits are compared with a forward that is written out here from that library's definition.
"""

import pytest
import torch
from checkpoints.folders import CONFIG, random_tensors, write
from loading import load_model
from torch.nn import functional

from qbench.attention.normalizers import NORMALIZERS
from qbench.checkpoints import find
from qbench.checkpoints.fla import logarithms

VARIANTS = {
    "plain": {},
    "grouped": {"num_kv_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "scaled": {"attn_impl": "parallel_scaled_attn"},
    "scaled softpick": {"attn_impl": "naive_scaled_softpick_attn", "num_kv_heads": 1},
    "naive": {"attn_impl": "naive_rectified_attn", "num_kv_heads": 1},
}


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x, theta):
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * theta ** (-torch.arange(half) / half)
    first, second = x.chunk(2, -1)
    sin, cos = angles.sin(), angles.cos()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def logits(ids, config, tensors, normalizer):
    """[T, vocabulary] of one sequence, float32, by the names of flash-linear-attention."""
    heads, eps = config["num_heads"], config["norm_eps"]
    shared, time = config["num_kv_heads"] or heads, len(ids)
    x = tensors["model.embeddings.weight"][ids]
    layer = {k.removeprefix("model.layers.0."): v for k, v in tensors.items()}
    h = rms(x, layer["attn_norm.weight"], eps)

    def projected(name, count):
        out = functional.linear(h, layer[f"attn.{name}_proj.weight"])
        out = out.view(time, count, -1).transpose(0, 1)
        return rotated(out, config["rope_theta"]) if name != "v" else out

    q, k, v = projected("q", heads), projected("k", shared), projected("v", shared)
    k, v = (each.repeat_interleave(heads // shared, 0) for each in (k, v))
    allowed = torch.ones(time, time, dtype=torch.bool).tril()
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    if "attn.s" in layer:  # their table begins at log 2
        scores = scores * layer["attn.s"][:, :, None] * torch.arange(2, time + 2).log()[:, None]
    base = "softpick" if "softpick" in normalizer else normalizer.removeprefix("scalable-")
    weights = NORMALIZERS.get(base.removesuffix("-next")).weights(
        scores, allowed=allowed, parameters={}
    )
    x = x + (weights @ v).transpose(0, 1).reshape(time, -1) @ layer["attn.o_proj.weight"].T
    h = rms(x, layer["mlp_norm.weight"], eps)
    inner = functional.silu(h @ layer["mlp.gate_proj.weight"].T) * (
        h @ layer["mlp.up_proj.weight"].T
    )
    x = rms(x + inner @ layer["mlp.down_proj.weight"].T, tensors["model.norm.weight"], eps)
    return x @ tensors.get("lm_head.weight", tensors["model.embeddings.weight"]).T


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_gives_the_logits_of_its_definition(tmp_path, name):
    config = {**CONFIG, **VARIANTS[name]}
    tensors = random_tensors(config)
    if "scaled" in name:
        tensors["model.layers.0.attn.s"] = torch.tensor([[0.3], [1.5]])
        tensors |= logarithms(1, config["max_position_embeddings"])
    folder = write(tmp_path / "c", config, tensors)
    found = find(str(folder))
    model = load_model(found, dtype=torch.float32, device="cpu")
    assert type(model).__name__ == "LlamaForCausalLM"
    ids = torch.randint(0, 32, (23,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = model(ids[None], use_cache=False).logits[0]
    expected = logits(ids, config, tensors, found.normalizer)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
