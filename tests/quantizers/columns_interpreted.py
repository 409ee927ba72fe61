"""The kernel of GPTQ's columns under the interpreter, beside gptqmodel's loop in PyTorch: prints a
line a case."""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_CACHE_DIR"] = os.devnull

import torch
from columns_loop import CASES, loop, tensors

from qbench.quantizers import gptq_columns

for case in CASES:
    wanted, found = tensors(case), tensors(case)
    loop(*wanted)
    gptq_columns.block_update(*found)
    places = ("work", "quantized", "errors", "losses")
    pairs = zip(places, (wanted[i] for i in (0, 5, 6, 7)), (found[i] for i in (0, 5, 6, 7)))
    wrong = [name for name, a, b in pairs if not torch.equal(a.nan_to_num(7e9), b.nan_to_num(7e9))]
    print(case, " ".join(wrong), sep="\t")
