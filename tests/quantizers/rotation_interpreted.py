"""The kernel of the online rotation, run by Triton's interpreter in a process of its own (the mode
is read when Triton is imported). Prints one line a case: shape, tab, relative error."""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_CACHE_DIR"] = os.devnull

import torch

from qbench.quantizers import hadamard_kernel
from qbench.quantizers.rotation import hadamard_transform

for shape in [(1, 16), (3, 5, 64), (9, 80), (2, 48), (4, 352), (1, 2816), (17, 128)]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    wanted = hadamard_transform(x.double())
    found = hadamard_kernel.hadamard_transform(x)
    print(shape, float((found - wanted).norm() / wanted.norm()), sep="\t")
