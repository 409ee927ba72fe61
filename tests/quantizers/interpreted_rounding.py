"""The Triton kernel of activations under the interpreter, beside the definitions: prints a line a
case. In float32 and float16 alone, since the interpreter cuts bfloat16 off."""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_CACHE_DIR"] = os.devnull

import warnings

import torch
from test_rounding import GRIDS, INF, NAN, draw, ties

from qbench.quantizers.activations import kernel, rounding
from qbench.quantizers.activations.quantize import fixed_by


def odd(columns):
    x = draw(7, columns)
    x[1], x[2, 1], x[3, 2] = 0.0, NAN, INF
    x[4] *= 1e-30
    return x


def same(x, grid, fixed):
    given = (fixed.scale, fixed.zero) if fixed else (None, None)
    pair = [one.rounded(x, grid, *given) for one in (rounding, kernel)]
    if not torch.equal(pair[0].isnan(), pair[1].isnan()):
        return "NaN elsewhere"
    return "equal" if torch.equal(*(t.nan_to_num(0.0) for t in pair)) else "different"


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name, grid in GRIDS.items():
        for dtype in (torch.float32, torch.float16):
            for columns in (16, 100):
                own = grid.scale_format == "e8m0"  # no other scale than each block's own
                found = set()
                for x in (odd(columns).to(dtype), ties(4, 32).to(dtype).view(-1, 16)):
                    for ends in ((-2.0, 3.0), (-7.0, 7.0)):
                        fixed = fixed_by(*map(torch.tensor, ends), grid)
                        found |= {same(x, grid, one) for one in ([None] if own else [None, fixed])}
                print(f"{name} {dtype} {columns}: {' and '.join(sorted(found))}")
