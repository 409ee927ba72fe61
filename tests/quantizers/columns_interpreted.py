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
    places = {"work": 0, "quantized": 5, "errors": 6, "losses": 7}
    pairs = {
        name: (wanted[at].nan_to_num(7e9), found[at].nan_to_num(7e9)) for name, at in places.items()
    }
    wrong = [name for name, pair in pairs.items() if not torch.equal(*pair)]
    print(case, " ".join(wrong), sep="\t")
