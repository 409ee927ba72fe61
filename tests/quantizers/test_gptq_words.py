"""Packing of our own against gptqmodel's, bit for bit."""

import pytest
import torch
from torch import nn

from qbench.quantizers.gptq_words import packed, unpacked, words


def rounded(bits, rows, columns, size, symmetric, dtype):
    """A weight on its grid, in the model's dtype as GPTQ leaves it; scales, zeros, groups."""
    draw = torch.Generator().manual_seed(bits + rows)
    groups = columns // size
    scale = torch.rand(rows, groups, generator=draw) * 0.02 + 1e-4
    scale[0, 0] = 3e-8  # no normal number in float16
    zero = torch.full_like(scale, 2 ** (bits - 1))
    if not symmetric:
        zero = torch.randint(0, 2**bits, scale.shape, generator=draw).float()
    group = (torch.arange(columns) // size).to(torch.int32)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=draw)
    codes[1], codes[2] = 0, 2**bits - 1
    weight = scale[:, group] * (codes - zero[:, group])
    weight[3] *= 40  # beyond the grid: codes are those at its ends
    return weight.to(dtype), scale, zero, group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("rows", "columns", "size"), [(64, 128, 32), (96, 64, 16)])
def test_words_are_those_of_the_library(bits, rows, columns, size, symmetric, dtype):
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    weight, scale, zero, group = rounded(bits, rows, columns, size, symmetric, dtype)
    if columns == 64 and not symmetric:
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(0))
        group = group[order]  # as desc_act leaves it
    layer = nn.Linear(columns, rows, bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    theirs = TorchLinear(
        bits=bits, group_size=size, sym=symmetric, desc_act=False, in_features=columns,
        out_features=rows,
    )  # fmt: skip
    theirs.pack(layer, scale, zero, group)
    for part, ours in packed(weight, scale, zero, group, bits).items():
        assert ours.dtype == getattr(theirs, part).dtype, part
        assert torch.equal(ours, getattr(theirs, part)), part
        assert ours.is_contiguous(), part


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_what_is_packed_is_unpacked(bits):
    codes = torch.randint(0, 2**bits, (96, 5), generator=torch.Generator().manual_seed(bits))
    assert torch.equal(unpacked(words(codes.to(torch.int32), bits), bits), codes.float())
