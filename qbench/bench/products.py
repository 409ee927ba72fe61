"""``qbench bench products``: real int8 and fp8 products against bf16, once they are right.

Timed are the seven linear layers of a Llama block, activations encoded on the way. Every time is
the median of CUDA-event timings after a warm-up, in one run on one GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qbench import bench
from qbench.bench import Row
from qbench.bench.checks import relative_error
from qbench.bench.timing import milliseconds
from qbench.errors import EvaluationError, UnavailableError
from qbench.quantizers import scaled_mm
from qbench.quantizers.activation_inputs import multiply_codes
from qbench.quantizers.fake_quant import (
    FakeQuant,
    decode,
    encode,
    encode_definition,
    scale_of_tensor,
)
from qbench.quantizers.formats import QuantFormat

WIDTHS = {"340M": (1024, 2816), "1.8B": (2048, 5632)}  # hidden and intermediate size
TOKENS = (2048, 16384, 65536)
GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))  # layers with one input
FORMATS = {
    "int8 a token": QuantFormat(num_bits=8),
    "fp8 a token": QuantFormat(num_bits=8, type="float"),
    "fp8 a tensor": QuantFormat(num_bits=8, type="float", strategy="tensor"),
}
# Relative to the product in float64 of what the codes stand for: bfloat16's own rounding gives
# 1.7e-3, and fp8 tensor cores add up 14 bits of a sum before it goes to float32.
LIMIT = {"int": 2.5e-3, "float": 4e-3}

Block = dict[str, nn.Module]


def bench_products(quick: bool) -> dict[str, Any]:
    """Checks the products, then times them. ``quick``: the 340M shape and few repeats.

    Raises UnavailableError without a GPU that multiplies fp8, EvaluationError where a product is
    wrong: then nothing is timed.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        raise UnavailableError("bench products: fp8 products need a GPU of compute capability 8.9")
    models = ("340M",) if quick else tuple(WIDTHS)
    return {
        "hardware": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__},
        "checks": [row for model in models for row in _check(model)],
        "blocks": [
            row
            for model in models
            for tokens in TOKENS
            for row in _blocks(model, tokens, repeat_ms=20 if quick else 100)
        ],
    }


def table(results: dict[str, Any]) -> str:
    """What :func:`bench_products` measured, in Markdown."""
    worst = max(check["error"] / check["limit"] for check in results["checks"])
    columns = {
        "model": ("model", ""), "tokens": ("tokens", "d"), "arithmetic": ("arithmetic", ""),
        "ms": ("ms", ".3f"), "times bf16's speed": ("speed", ".2f"),
    }  # fmt: skip
    page = [
        f"# Real low-precision products on one {results['hardware']}",
        f"torch {results['versions']['torch']}. The linear layers of a block, activations encoded "
        "on the way; speed relative to bf16.",
        bench.table(results["blocks"], columns),
        f"{len(results['checks'])} products passed against float64 before timing; the worst used "
        f"{worst:.0%} of its tolerance.",
    ]
    return "\n\n".join(page) + "\n"


def _block(model: str) -> Block:
    """The linear layers of a block, bf16."""
    hidden, inner = WIDTHS[model]
    sizes = dict.fromkeys(("q", "k", "v", "o"), (hidden, hidden))
    sizes |= {"gate": (hidden, inner), "up": (hidden, inner), "down": (inner, hidden)}
    torch.manual_seed(0)
    return {
        name: nn.Linear(*size, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(
            False
        )
        for name, size in sizes.items()
    }


def _real(block: Block, form: QuantFormat) -> Block:
    """Weights in the format of activations."""
    found, inputs = {}, FakeQuant(form, dict.fromkeys(block))
    for name, layer in block.items():
        codes, scale = encode(layer.weight, form)
        found[name] = scaled_mm.ScaledLinear(layer, {"codes": codes, "scale": scale})
        multiply_codes(name, found[name], inputs)
    return found


def _inputs(block: Block, tokens: int) -> list[Tensor]:
    """One for each group, with outlier channels as models have them."""
    found = []
    for group in GROUPS:
        width = block[group[0]].in_features
        x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        x[:, :4] *= 20
        found.append(x)
    return found


def _run(block: Block, inputs: list[Tensor]) -> None:
    for group, x in zip(GROUPS, inputs, strict=True):
        for name in group:
            block[name](x)


def _check(model: str) -> list[Row]:
    """Every layer in every format, on odd numbers of tokens."""
    rows, block = [], _block(model)
    for tokens in (1, 19, 1000):
        for arithmetic, form in FORMATS.items():
            real_block = _real(block, form)
            for group, x in zip(GROUPS, _inputs(block, tokens), strict=True):
                for name in group:
                    layer = real_block[name]
                    whole = form.strategy == "tensor"
                    fixed = scale_of_tensor(*torch.aminmax(x), form) if whole else None
                    wanted = decode(*encode_definition(x, form, fixed)).double()
                    wanted = wanted @ decode(layer.codes, layer.scale).double().T
                    off = relative_error(layer(x), wanted)
                    rows.append({"case": f"{model} {arithmetic} {name} {tokens}", "error": off,
                                 "limit": LIMIT[form.type]})  # fmt: skip
                    if not off <= LIMIT[form.type]:
                        raise EvaluationError(
                            f"{rows[-1]['case']}: {off:.2g} off the product in float64, at most "
                            f"{LIMIT[form.type]:g} is right"
                        )
    return rows


def _blocks(model: str, tokens: int, repeat_ms: int) -> Iterator[Row]:
    block = _block(model)
    inputs = _inputs(block, tokens)
    usual = None
    for arithmetic, form in {"bf16": None, **FORMATS}.items():
        layers = _real(block, form) if form else block
        ms = milliseconds(partial(_run, layers, inputs), repeat_ms)
        usual = usual or ms
        yield {"model": model, "tokens": tokens, "arithmetic": arithmetic, "ms": ms,
               "speed": usual / ms}  # fmt: skip
