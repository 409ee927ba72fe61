"""The kernels of real products, run by Triton's interpreter in a process of their own (the mode is
read when Triton is imported). Prints one line a case: name, tab, what went wrong."""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_CACHE_DIR"] = os.devnull

import math

import torch

from qbench.quantizers.products import codes, kernels

SHAPES = [(1, 16), (5, 48), (33, 20), (7, 100)]


def rows(shape, dtype=torch.float32, scale=1.0):
    draw = torch.Generator().manual_seed(math.prod(shape))
    x = torch.randn(shape, generator=draw) * scale
    x[0] *= 1e-3
    return x.to(dtype)


def encoded(x, kind, per, fixed=None):
    wanted, found = codes.encode(x, kind, per, fixed), kernels.encode(x, kind, per, fixed)
    same = torch.equal(wanted[0].float(), found[0].float())
    scales = torch.equal(wanted[1].nan_to_num(-1), found[1].nan_to_num(-1))
    return "" if same and scales else f"codes {same}, scales {scales}"


def product(shape, bias, dtype):
    (count, depth), columns = shape, 37
    draw = torch.Generator().manual_seed(count)
    a, b = (torch.randint(-127, 128, (n, depth), generator=draw) for n in (count, columns))
    scales = [torch.rand(n, 1, generator=draw) + 0.1 for n in (count, columns)]
    offset = torch.randn(columns, generator=draw).to(dtype) if bias else None
    wanted = (a @ b.T).float() * scales[0] * scales[1].T
    wanted = (wanted if offset is None else wanted + offset.float()).to(dtype)
    found = torch.full((count, columns), math.nan)
    found = kernels.int8_product(
        a.to(torch.int8),
        scales[0],
        b.to(torch.int8),
        scales[1],
        offset,
        dtype,
        tile=(16, 32, 32, 4, 1),
    )
    # the interpreter cuts bfloat16 off where hardware rounds
    off = ((found - wanted).abs() / wanted.abs().clamp(min=1e-3)).max()
    return "" if off <= (0 if dtype == torch.float32 else 2**-7) else f"off by {off}"


for shape in SHAPES:
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ("int8", "e4m3"):
            for per in ("row", "tensor"):
                print(
                    f"{kind} {per} {shape} {dtype}",
                    encoded(rows(shape, dtype), kind, per),
                    sep="\t",
                )
        for bias in (False, True):
            print(f"product {shape} {dtype} {bias}", product(shape, bias, dtype), sep="\t")
for kind in ("int8", "e4m3"):
    fixed = torch.tensor([[0.01]])
    print(f"fixed {kind}", encoded(rows((6, 32)), kind, "tensor", fixed), sep="\t")
    x = rows((4, 32))
    x[0], x[1, 3], x[2, 5] = 0, math.nan, math.inf
    print(f"broken {kind}", encoded(x, kind, "row"), sep="\t")
    print(f"broken fixed {kind}", encoded(x, kind, "tensor", fixed), sep="\t")
