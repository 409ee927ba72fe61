"""Prefill in ``qbench bench attention``: every normalizer, its variants, and what else runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qbench import text
from qbench.attention import kernels
from qbench.attention.kernels import supported
from qbench.attention.normalizers import NORMALIZERS
from qbench.bench.attention_timing import (
    Clock,
    captured,
    given,
    milliseconds,
    random_tensor,
)

SHAPES = ((8, 1024, 16, 64), (4, 4096, 16, 64), (4, 4096, 32, 64), (4, 4096, 16, 128))
WANTED = (SHAPES[1], SHAPES[3])  # most: whoever is stopped has them
STEP = (8, 1024, 16, 64)  # a short step, where launches take their share of the time
CUDNN, FLASH = "cuDNN softmax", "torch flash softmax"
FLEX, PLAIN_SOFTPICK = "FlexAttention softmax", "plain PyTorch softpick"
SLOW = (FLEX, PLAIN_SOFTPICK)  # to compile, or to run
CAP = 50.0  # Gemma 2's
FLASH_SIGMOID = 1.17  # × FlashAttention-2 on an H100, forward (Ramapuram et al. 2024, abstract)

# What a normalizer with parameters is measured beside: the kernel without.
PLAIN = {
    "sigmoid": "softmax", "softmax1": "softmax", "softmax-sink": "softmax",
    "scalable-softmax": "softmax", "scalable-softpick": "softpick",
    "scalable-softmax-next": "softmax", "scalable-softpick-next": "softpick",
}  # fmt: skip
VARIANTS = ("ALiBi", "trained ALiBi", "soft cap")
OF_VARIANTS = ("softmax", "softpick", "sigmoid")

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(normalizer: str, heads: int, variant: str | None = None, *, trained: bool = True) -> Run:
    """Our kernel, with parameters that need gradients where it has any; slopes only if trained."""
    sloped = variant in ("ALiBi", "trained ALiBi")
    parameters = given(normalizer, heads, sloped=sloped, trained=trained)
    if variant == "ALiBi":
        parameters["slopes"].requires_grad_(False)
    softcap = CAP if variant == "soft cap" else None
    return lambda q, k, v: kernels.attention(
        q, k, v, normalizer=normalizer, parameters=parameters, softcap=softcap, causal=True
    )


def contenders(only: Collection[str]) -> list[str]:
    """What is measured, by the names of the tables' rows; with ``only`` these normalizers, what
    they are measured beside, and torch's fastest."""
    names = [n for n in supported() if not only or n in only]
    beside = [PLAIN[n] for n in names if PLAIN.get(n, n) not in names]
    found = [f"qbench {name}" for name in dict.fromkeys([*names, *beside])]
    found += [f"qbench {name}, {v}" for name in names if name in OF_VARIANTS for v in VARIANTS]
    return [*found, FLASH, CUDNN] + ([] if only else [*SLOW])


def contender(name: str, length: int, heads: int) -> Run:
    """What the row ``name`` calls."""
    from torch.nn.attention import SDPBackend

    if name == FLASH:
        return _torchs(SDPBackend.FLASH_ATTENTION)
    if name == CUDNN:
        return _torchs(SDPBackend.CUDNN_ATTENTION)
    if name == FLEX:
        return _flex(length)
    if name == PLAIN_SOFTPICK:
        return _plain_softpick
    normalizer, _, variant = name.removeprefix("qbench ").partition(", ")
    return ours(normalizer, heads, variant or None)


Row = tuple[tuple[int, ...], str]  # shape and name of a contender


def every_row(shapes: Sequence[tuple[int, ...]], only: Collection[str]) -> list[Row]:
    """In the table's order."""
    return [(shape, name) for shape in shapes for name in contenders(only)]


def wanted_first(rows: Sequence[Row]) -> list[Row]:
    """In the order in which they are measured: the shapes that are asked for most, there every
    normalizer beside torch's fastest, then their variants; what is slow comes last."""

    def late(row: Row) -> tuple[bool, ...]:
        shape, name = row
        return name in SLOW, shape not in WANTED, ", " in name

    return sorted(rows, key=late)


def prefill(rows: Sequence[Row], clock: Clock) -> Iterator[dict[str, Any]]:
    """Forward and backward pass of each, in TFLOP/s."""
    made = None
    for shape, name in rows:
        batch, length, heads, width = shape
        work = 4 * batch * heads * length * length * width / 2
        if shape != made:
            inputs = [random_tensor(batch, length, heads, width).requires_grad_() for _ in range(3)]
            gradient = torch.randn_like(inputs[0])
            made = shape
        try:
            function = contender(name, length, heads)
            plain = name == PLAIN_SOFTPICK  # its gradients' intermediates would not fit
            with torch.set_grad_enabled(not plain):
                output = function(*inputs)
            with torch.no_grad():
                forward = clock(lambda f=function, i=inputs: f(*i))
            backward = None
            if not plain:
                backward = clock(
                    lambda o=output, i=inputs, g=gradient: torch.autograd.grad(
                        o, i, g, retain_graph=True
                    )
                )
        except RuntimeError as error:  # a library's kernel that does not run here is said so
            yield {"shape": shape, "kernel": name, "forward": None, "backward": None,
                   "error": str(error).splitlines()[0]}  # fmt: skip
            continue
        yield {
            "shape": shape,
            "kernel": name,
            "forward": work / forward / 1e9,
            "backward": None if backward is None else 2.5 * work / backward / 1e9,
        }


def steps(repeat_ms: int, only: Collection[str]) -> Iterator[dict[str, Any]]:
    """Forward and backward pass of a short step: launched from the host each time, and captured
    once as a CUDA graph and replayed, so that only the GPU's time is left."""
    batch, length, heads, width = STEP

    def make(function: Run) -> Callable[[], Any]:
        inputs = [random_tensor(batch, length, heads, width).requires_grad_() for _ in range(3)]
        gradient = torch.randn_like(inputs[0])
        return lambda: torch.autograd.grad(function(*inputs), inputs, gradient)

    for name in contenders(only or supported()):
        if ", " in name:  # a variant's launches are its kernel's
            continue
        row = {"shape": STEP, "kernel": name, "ms": None, "captured_ms": None}
        try:
            function = contender(name, length, heads)
            row["ms"] = milliseconds(make(function), repeat_ms)
            replay = captured(partial(make, function))
            row["captured_ms"] = milliseconds(replay, repeat_ms)
        except RuntimeError as error:
            row["error"] = str(error).splitlines()[0]
        yield row


def prefill_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown, each rate beside cuDNN's and beside the kernel without parameters."""
    by_name = {(tuple(row["shape"]), row["kernel"]): row for row in rows}
    head = ("B, T, H, D", "kernel")
    for direction in ("forward", "backward"):
        head += (f"{direction} TFLOP/s", "× cuDNN", "× plain")
    lines = []
    for row in rows:
        shape = tuple(row["shape"])
        cells = [", ".join(map(str, shape)), row["kernel"]]
        for direction in ("forward", "backward"):
            rate = row[direction]
            cells.append("–" if rate is None else f"{rate:.0f}")
            for other in (CUDNN, _plain_name(row["kernel"])):
                best = by_name.get((shape, other), {}).get(direction)
                cells.append("–" if rate is None or best is None else f"{rate / best:.2f}")
        lines.append(cells)
    return text.table(head, lines, align="ll" + "r" * 6)


def step_table(rows: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown."""
    best = {tuple(row["shape"]): row for row in rows if row["kernel"] == CUDNN}
    cells = []
    for row in rows:
        line = [", ".join(map(str, row["shape"])), row["kernel"]]
        for way in ("ms", "captured_ms"):
            ms, other = row.get(way), best.get(tuple(row["shape"]), {}).get(way)
            line.append("–" if ms is None else f"{ms:.3f}")
            line.append("–" if ms is None or other is None else f"{other / ms:.2f}")
        cells.append(line)
    head = ("B, T, H, D", "kernel", "launched ms", "× cuDNN", "captured ms", "× cuDNN")
    return [
        "",
        "A short step: forward and backward pass together; launched from the host each time, and "
        "captured as a CUDA graph and replayed.",
        "",
        text.table(head, cells, align="llrrrr"),
    ]


def flash_sigmoid_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Our sigmoid beside torch's FlashAttention-2, as Apple's paper puts theirs."""
    rates = {(tuple(row["shape"]), row["kernel"]): row["forward"] for row in rows}
    cells = []
    for (shape, kernel), rate in rates.items():
        other = rates.get((shape, FLASH))
        if kernel == "qbench sigmoid" and rate and other:
            cells.append([", ".join(map(str, shape)), f"{rate / other:.2f}"])
    if not cells:
        return []
    return [
        "",
        f"Sigmoid's forward pass, × torch's FlashAttention-2 in the same run. Apple's FlashSigmoid "
        f"claims {FLASH_SIGMOID:.2f} on an H100.",
        "",
        text.table(("B, T, H, D", "× FlashAttention-2"), cells, align="lr"),
    ]


def _plain_name(kernel: str) -> str:
    """Of a row with parameters, a slope or a cap: the row without."""
    name, _, variant = kernel.removeprefix("qbench ").partition(", ")
    return f"qbench {name if variant else PLAIN.get(name, '')}"


def _torchs(backend: Any) -> Run:
    from torch.nn.attention import sdpa_kernel

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return run


def _flex(length: int) -> Run:
    from torch._inductor import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    config.compile_threads = 1  # else processes of torch's stay beside what is timed
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device="cuda")
    torch._dynamo.reset()  # else later shapes get slower kernels of dynamic shape
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def _plain_softpick(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What a user writes today: all scores at once."""
    scores = (query @ key.transpose(2, 3)).float() * query.shape[3] ** -0.5
    seen = torch.ones_like(scores[0, 0], dtype=torch.bool).tril()
    weights = NORMALIZERS.get("softpick").weights(scores, allowed=seen)
    return weights.to(value.dtype) @ value
