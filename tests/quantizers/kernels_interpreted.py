"""The Triton kernels of fake quantization and of GPTQ's columns under the interpreter (the mode is
read when Triton is imported), beside their definitions in PyTorch: prints a line a case, name, tab,
what went wrong. Rounding in float32 and float16 alone, since the interpreter cuts bfloat16 off."""

import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ["TRITON_CACHE_DIR"] = os.devnull

import unittest.mock
import warnings

import torch
from test_fake_quant import FORMATS, INF, KV_FORMATS, NAN, draw, equal, of_tensor, ties
from test_gptq import BLOCKS, block_of

from qbench.quantizers import fake_quant, gptq, gptq_columns
from qbench.quantizers import fake_quant_kernels as kernels
from qbench.quantizers.formats import QuantFormat
from qbench.quantizers.kv_fake_quant import KVFakeQuant
from qbench.quantizers.names import KV_CACHES

CACHES = {
    "int4-token": {"keep_first": 2},
    "int3-channel": {"group_size": 4},
    "int2-token": {"symmetric": False, "group_size": 8},
    "fp8-token": {"scale_dtype": "float32"},
}


def odd(columns):
    x = draw(7, columns)
    x[1], x[2, 1], x[3, 2] = 0.0, NAN, INF
    x[4] *= 1e-30
    return x


def activations():
    for name, form in (FORMATS | KV_FORMATS).items():
        for dtype in (torch.float32, torch.float16):
            wrong = 0
            inputs = (odd(100), ties(4, 32).view(-1, 16))
            whole = of_tensor(form)
            for x in inputs if dtype == torch.float32 else inputs[1:]:
                for chosen in filter(None, (form, whole)):
                    ends = map(torch.tensor, (-7.0, 3.0))
                    fixed = fake_quant.scale_of_tensor(*ends, form) if chosen is whole else None
                    of = (x.to(dtype), chosen, fixed)
                    wanted = fake_quant.fake_quantize_definition(*of)
                    wrong += not equal(kernels.fake_quantize_rows(*of), wanted)
            print(f"{name} {dtype}", wrong or "", sep="\t")


def codes():
    for kind in ("int", "float"):
        for strategy in ("token", "tensor"):
            wrong = 0
            for dynamic in (True, False) if strategy == "tensor" else (True,):
                form = QuantFormat(num_bits=8, type=kind, strategy=strategy, dynamic=dynamic)
                for x in (draw(5, 48), draw(33, 20), draw(1, 16), odd(100)):
                    fixed = None
                    if strategy == "tensor":
                        ends = torch.aminmax(x) if dynamic else map(torch.tensor, (-2.0, 3.0))
                        fixed = fake_quant.scale_of_tensor(*ends, form)
                    wanted = fake_quant.encode_definition(x, form, fixed)
                    found = kernels.encode(x, form, fixed)
                    wrong += not equal(found[0].float(), wanted[0].float())
                    wrong += not equal(found[1], wanted[1])
            print(f"codes {kind} {strategy}", wrong or "", sep="\t")


def keys():
    """[B, H, T, D] laid out as [B, T, H, D], as transformers has it."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, 11, 3, 24, generator=generator).transpose(1, 2)
    x = x * torch.logspace(-3, 2, 24)
    x[0, 1, 2], x[1, 0, 4, 3] = 0, NAN
    return x


def caches():
    positions = torch.stack([torch.arange(11), torch.arange(-3, 8)]).int()
    for name, options in CACHES.items():
        cache = KVFakeQuant(KV_CACHES.parse(name, options))
        both = []
        for chosen in (True, False):
            how = kernels.fake_quantize_rows if chosen else fake_quant.fake_quantize_definition
            with unittest.mock.patch.object(fake_quant, "fake_quantize_rows", how):
                both.append(cache.rounded(keys(), keys() * 2, positions))
        wrong = sum(not equal(a, b) for a, b in zip(*both, strict=True))
        print(f"cache {name}", wrong or "", sep="\t")


def columns():
    for case in BLOCKS:
        work, *rest = block_of(case)
        wanted, found = gptq._block(work, *rest), gptq_columns.block(work, *rest)
        both = zip(wanted, found, strict=True)
        wrong = sum(not torch.equal(a.nan_to_num(7e9), b.nan_to_num(7e9)) for a, b in both)
        print(f"columns {case}", wrong or "", sep="\t")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    activations()
    codes()
    caches()
    columns()
