"""GPTQ's columns of one block as gptqmodel goes through them in PyTorch, and blocks to try."""

import torch
from gptqmodel.quantization.quantizer import quantize

WIDTH = 128
# rows, bits, groups, what is odd
CASES = [
    (6, 4, 1, ""),
    (9, 2, 1, ""),
    (4, 3, 4, ""),
    (7, 8, 8, ""),
    (4, 4, 1, "asymmetric"),
    (4, 2, 2, "asymmetric"),
    (4, 4, 1, "large"),  # far outside the grid
    (7, 4, 1, "NaN"),
    (5, 4, 1, "zeros"),
    (4, 4, 1, "ties"),
]


def tensors(case, device="cpu"):
    """The arguments of a block update; what is written lies in wider tensors, as the library's."""
    rows, bits, groups, odd = case
    draw = torch.Generator().manual_seed(rows + bits)
    work = torch.randn(rows, WIDTH, generator=draw) * 0.02
    columns = torch.randn(512, WIDTH, generator=draw)
    hessian = columns.T @ columns / 512
    inverse = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    largest = 2**bits - 1
    scale = (torch.rand(groups, rows, generator=draw) + 0.5) * 0.08 / largest
    zero = torch.full_like(scale, 2 ** (bits - 1))
    if odd == "asymmetric":
        zero = torch.randint(0, largest + 1, scale.shape, generator=draw).float()
    if odd == "large":
        work *= 1e9
    if odd == "NaN":
        work[3, 5], work[4, 127], work[5, 9] = torch.nan, torch.nan, torch.inf
    if odd == "zeros":
        work[2:5] = 0.0
        work[:, 10:20] = -0.0
    if odd == "ties":
        scale[:] = 2**-7
        work = torch.randint(-40, 40, work.shape, generator=draw) * 2**-8
        inverse = torch.eye(WIDTH)
    wide = [torch.full((rows, 3 * WIDTH), torch.nan, device=device) for _ in range(2)]
    group = torch.arange(WIDTH) // (WIDTH // groups)
    return (
        work.to(device), inverse.to(device), scale.to(device), zero.to(device),
        group.to(device, torch.int32), wide[0][:, WIDTH : 2 * WIDTH],
        torch.zeros(rows, WIDTH, device=device), wide[1][:, WIDTH : 2 * WIDTH], largest,
    )  # fmt: skip


def loop(work, inverse, scale, zero, group, quantized, errors, losses, largest):
    """gptqmodel 7.6, ``GPTQ.quantize``: its loop over the columns of a block."""
    largest = torch.tensor(largest, device=work.device)
    for i in range(WIDTH):
        w, d = work[:, i], inverse[i, i]
        own = int(group[i])
        q = quantize(w[:, None], scale[own][:, None], zero[own][:, None], largest, False).flatten()
        quantized[:, i] = q
        delta = errors[:, i]
        torch.sub(w, q, out=delta)
        losses[:, i] = delta.square() / d.square()
        delta.div_(d)
        work[:, i:] -= delta.unsqueeze(1) * inverse[i, i:]
