"""The kernel of GPTQ's columns under Triton's interpreter, beside the loop in PyTorch: a line a
case, with what differs."""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_CACHE_DIR"] = os.devnull

import torch
from test_gptq import BLOCKS, block_of

from qbench.quantizers import gptq, gptq_columns

for case in BLOCKS:
    work, *rest = block_of(case)
    wanted, found = gptq._block(work, *rest), gptq_columns.block(work, *rest)
    pairs = zip(("codes", "errors"), wanted, found, strict=True)
    wrong = [name for name, a, b in pairs if not torch.equal(a.nan_to_num(7e9), b.nan_to_num(7e9))]
    print(case, " ".join(wrong), sep="\t")
