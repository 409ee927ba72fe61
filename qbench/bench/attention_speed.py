"""Time the attention kernels beside the libraries that a user would take instead (``qbench bench
attention``). Each of ours is first compared with the float64 reference, on a shorter text.

TFLOP/s count 4 · B · H · D for each pair of a query and a key that it sees in a forward pass, and
2.5 times that in a backward pass, whatever a kernel computes. Every time is the median of
CUDA-event timings after a warm-up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch._functorch import config as functorch
from torch._inductor import config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from triton.testing import do_bench

from qbench import bench
from qbench.attention import kernels, reference
from qbench.attention.kernels import require, supported
from qbench.attention.normalizers import NORMALIZERS, SLOPES
from qbench.bench import Row
from qbench.errors import EvaluationError, UnavailableError, first_line
from qbench.files import write_page

CAP, WINDOW = 20.0, 1024
VARIANTS = {"causal": {}, "ALiBi": {}, "soft cap": {"softcap": CAP}, "window": {"window": WINDOW}}


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of causal attention. ``variants``: those that are timed with it."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    variants: tuple[str, ...] = ("causal",)

    def __str__(self) -> str:
        shared = f"/{self.kv_heads}" if self.kv_heads != self.heads else ""
        return f"B{self.batch} T{self.length} H{self.heads}{shared} D{self.head_dim}"

    def tensors(self) -> list[Tensor]:
        """Return random query [B, H, T, D], key and value [B, KV heads, T, D]: bf16, grad on."""
        return [
            random_tensor(self.batch, self.length, heads, self.head_dim).requires_grad_()
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        ]

    def settings(self, normalizer: str, variant: str) -> dict[str, Any]:
        """Return the keyword arguments of an attention function for ``normalizer`` and ``variant``,
        such as causal, window and softcap."""
        parameters = given(normalizer, self.heads, sloped=variant == "ALiBi")
        settings = {"normalizer": normalizer, "parameters": parameters, "causal": True}
        return settings | VARIANTS[variant]

    def flop(self, variant: str) -> float:
        """Return the FLOP of a forward pass of ``variant``, a key of VARIANTS."""
        seen = min(WINDOW, self.length) if variant == "window" else self.length
        pairs = seen * (seen + 1) / 2 + (self.length - seen) * seen
        return 4 * self.batch * self.heads * self.head_dim * pairs


def random_tensor(batch: int, length: int, heads: int, head_dim: int) -> Tensor:
    """Return a random bf16 tensor [B, H, T, D] on the GPU, laid out as [B, T, H, D]."""
    shape = (batch, length, heads, head_dim)
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)


def given(normalizer: str, heads: int, *, sloped: bool = False) -> dict[str, Tensor]:
    """Return the parameters of ``normalizer`` on the GPU, [heads] each, another value per head;
    with ``sloped`` also ALiBi's slopes as in its paper. Optional parameters are left out."""
    parameters = {}
    for parameter in NORMALIZERS[normalizer].parameters:
        if parameter is SLOPES and sloped:
            parameters[parameter.name] = torch.tensor(parameter.start(heads), device="cuda")
        elif parameter.required:
            spread = torch.linspace(0.8, 1.2, heads, device="cuda") * (parameter.initial or 1)
            parameters[parameter.name] = spread.requires_grad_(parameter.trainable)
    return parameters


def milliseconds(run: Callable[[], Any], repeat_ms: int) -> float:
    """Return the median time of ``run`` by CUDA events over ``repeat_ms`` ms, after a warm-up."""
    return do_bench(run, warmup=repeat_ms // 2, rep=repeat_ms, return_mode="median")


LIMIT = 1e-2  # ‖error‖ / ‖truth‖ in bfloat16
CHECKED = {64: 3200, 128: 2304}  # tokens by head width, see hopper.MIN_WORK


@functools.cache
def require_right(shape: Shape, variant: str, normalizer: str) -> None:
    """Compare our kernel of ``normalizer`` and ``variant`` with the float64 reference on one batch
    row of ``shape``, cut to CHECKED tokens: the output and the gradients of query, key and value.
    Seeds torch's generators. Raises EvaluationError if one is wrong. Cached."""
    length = min(shape.length, CHECKED[shape.head_dim])
    shape = replace(shape, batch=1, length=length, variants=())
    torch.manual_seed(0)
    settings, inputs = shape.settings(normalizer, variant), shape.tensors()
    output = kernels.attention(*inputs, **settings)
    gradient = torch.randn_like(output)
    actual = (output, *torch.autograd.grad(output, inputs, gradient))
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    settings["parameters"] = {n: value.double() for n, value in settings["parameters"].items()}
    truth = reference.attention(*wide, **settings)
    truths = (truth, *torch.autograd.grad(truth, wide, gradient.double()))
    for what, a, b in zip(("output", "dq", "dk", "dv"), actual, truths, strict=True):
        require_close(f"{normalizer}, {shape}, {variant}: {what}", a, b)


def require_close(what: str, actual: Tensor, truth: Tensor) -> None:
    """Raise EvaluationError that names ``what`` if ‖actual − truth‖ / ‖truth‖ of two tensors of
    any one shape is above LIMIT or not a number."""
    error = float((actual.double() - truth).norm() / truth.norm().clamp(min=1e-30))
    if not error <= LIMIT:
        raise EvaluationError(
            f"bench attention: {what} is wrong: relative error {error:.1e}, allowed {LIMIT:.0e}; "
            "report it"
        )


PEERS = CUDNN, FLASH, FLEX = "cuDNN", "FlashAttention 2", "FlexAttention"  # torch's
OF_VARIANTS = ("softmax", "softpick", "sigmoid")
SHAPES = (
    Shape(4, 4096, 16, 16, 64, tuple(VARIANTS)),
    Shape(4, 4096, 16, 16, 128, tuple(VARIANTS)),
    Shape(2, 8192, 32, 8, 128),  # Llama 3's heads
    Shape(1, 32768, 16, 16, 128),
)
DECODE = Shape(64, 4096, 16, 16, 64)

Run = Callable[[Tensor, Tensor, Tensor], Tensor]


def bench_attention(
    out: Path | None, quick: bool, only: Collection[str], *, log: Callable[[str], None]
) -> dict[str, Any]:
    """Check the kernels, time them, and return what was measured. It is written to ``out`` as JSON,
    with the table beside it, after every row, so that a stopped run leaves its rows. ``quick``
    leaves out most shapes and repeats. ``only``: time these attention functions of ours, and the
    peers. ``log`` is called with a line per part and row. Raises RecipeError for an unknown
    attention function, UnavailableError for one without kernels or if there is no CUDA device,
    EvaluationError if a kernel is wrong."""
    if not torch.cuda.is_available():
        raise UnavailableError(
            "bench attention: the kernels need a CUDA GPU, and none is here; run it on a machine "
            "that has one"
        )
    for name in only:
        require(name)
    repeat_ms = 20 if quick else 100
    timed = contenders((Shape(4, 4096, 16, 16, 64),) if quick else SHAPES, only)
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = milliseconds(partial(torch.matmul, left, right), repeat_ms)
    source = torch.randn(1 << 30, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    copied = milliseconds(partial(target.copy_, source), repeat_ms)
    ceilings = {
        "matmul_tflops": 2 * 8192**3 / product / 1e9,
        "copy_tb_per_s": 2 * source.nbytes / copied / 1e9,
    }
    del left, right, source, target
    results: dict[str, Any] = {
        "hardware": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "units": "TFLOP/s of passes; TB/s and share of the copy's of decoding",
        "ceilings": ceilings,
        "passes": [],
        "decode": [],
    }
    parts: dict[str, Iterator[Row]] = {
        "passes": (passes(*case, repeat_ms) for case in timed),
        "decode": decode(
            replace(DECODE, batch=8) if quick else DECODE,
            repeat_ms,
            only,
            ceilings["copy_tb_per_s"],
        ),
    }
    for part, rows in parts.items():
        for row in rows:
            which = " ".join(row[key] for key in ("shape", "variant", "kernel") if key in row)
            log(f"{part}: {which}: {row.get('error', 'timed')}")
            results[part].append(row)
            if out is not None:
                write_page(out, results, table(results))
    return results


# Who runs.


def contenders(shapes: Collection[Shape], only: Collection[str]) -> list[tuple[Shape, str, str]]:
    """Return the (shape, variant, implementation) triples to measure. ``only`` replaces our default
    kernels: all for causal attention of at most 4,096 tokens, else those of ``OF_VARIANTS``. Always
    added: FlexAttention, and for causal attention cuDNN and FlashAttention."""
    return [
        (shape, variant, name)
        for shape in shapes
        for variant in shape.variants
        for name in (
            *(only or (OF_VARIANTS if variant != "causal" or shape.length > 4096 else supported())),
            *(PEERS if variant == "causal" else (FLEX,)),  # the others have no variants
        )
    ]


def contender(name: str, shape: Shape, variant: str) -> Run:
    """Return the function of query, key and value that ``name``, one of ``PEERS`` or of our
    normalizers, runs; cuDNN and FlashAttention ignore ``variant``. For FlexAttention, torch._dynamo
    is reset, and two settings of torch change for the whole process."""
    if name == FLASH:
        return _torchs(SDPBackend.FLASH_ATTENTION, shape)
    if name == CUDNN:
        return _torchs(SDPBackend.CUDNN_ATTENTION, shape)
    if name == FLEX:
        slopes = torch.tensor(SLOPES.start(shape.heads), device="cuda")

        def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score + slopes[h] * (k - q)

        def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return CAP * torch.tanh(score / CAP)

        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q - k < WINDOW) if variant == "window" else q >= k

        functorch.donated_buffer = False  # a backward pass is timed many times
        config.compile_threads = 1  # else processes of torch's stay beside what is timed
        mask = create_block_mask(seen, None, None, shape.length, shape.length, device="cuda")
        torch._dynamo.reset()  # else later shapes get slower kernels of dynamic shape, or none
        return partial(
            torch.compile(flex_attention, dynamic=False), block_mask=mask,
            score_mod={"ALiBi": alibi, "soft cap": softcap}.get(variant),
            enable_gqa=shape.kv_heads != shape.heads,
        )  # fmt: skip
    return partial(kernels.attention, **shape.settings(name, variant))


def _torchs(backend: Any, shape: Shape) -> Run:
    """Return a function of (q, k, v): torch's causal attention with the SDPA ``backend``."""
    grouped = shape.kv_heads != shape.heads

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    return run


# What is measured.


def passes(shape: Shape, variant: str, name: str, repeat_ms: int) -> Row:
    """Return a row with the TFLOP/s of ``forward`` and ``backward`` of ``name``, each timed for
    ``repeat_ms`` ms; ``error`` says why a kernel did not run. Raises EvaluationError if ours is
    wrong."""
    row: Row = {"shape": str(shape), "variant": variant, "kernel": name}
    if name not in PEERS:
        require_right(shape, variant, name)
    inputs, flop = shape.tensors(), shape.flop(variant)
    gradient = torch.randn_like(inputs[0])
    try:
        run = contender(name, shape, variant)
        output = run(*inputs)
        with torch.no_grad():
            row["forward"] = flop / milliseconds(partial(run, *inputs), repeat_ms) / 1e9
        backward = partial(torch.autograd.grad, output, inputs, gradient, retain_graph=True)
        row["backward"] = 2.5 * flop / milliseconds(backward, repeat_ms) / 1e9
    except RuntimeError as error:  # a library's kernel that does not run here is said so
        row["error"] = first_line(error)
    return row


def decode(shape: Shape, repeat_ms: int, only: Collection[str], copied: float) -> Iterator[Row]:
    """Yield rows with the milliseconds of one query per sequence of ``shape``, each timed for
    ``repeat_ms`` ms, and the TB/s of reading keys and values, also as a share of ``copied``, the
    TB/s of a copy: of our kernels in ``only`` (all if it is empty) and torch's. Raises
    EvaluationError if one of ours is wrong."""
    batch, length, heads, head_dim = shape.batch, shape.length, shape.heads, shape.head_dim
    key, value = (random_tensor(batch, length, heads, head_dim).contiguous() for _ in range(2))
    query = random_tensor(batch, 1, heads, head_dim)
    # Signs are changed so that one score in a hundred is positive
    scores = (query.float() * key.float()).sum(-1, keepdim=True)
    sparse = torch.where((scores > 0) == (torch.rand_like(scores) < 0.01), key, -key)
    runs: dict[str, Callable[[], Tensor]] = {}
    for name in only or supported():
        parameters = given(name, heads)
        settings = {"normalizer": name, "parameters": parameters}
        first = [x[:1].double() for x in (query, key, value)]
        wide = {which: x.double() for which, x in parameters.items()}
        require_close(
            f"{name}, decode", kernels.attention(query, key, value, **settings)[:1],
            reference.attention(*first, normalizer=name, parameters=wide),
        )  # fmt: skip
        runs[f"{name}, random keys"] = partial(kernels.attention, query, key, value, **settings)
        if NORMALIZERS[name].sparse:
            runs[f"{name}, 99 % of scores negative"] = partial(
                kernels.attention, query, sparse, value, **settings
            )
    runs["torch's softmax"] = partial(F.scaled_dot_product_attention, query, key, value)
    with torch.no_grad():
        for name, run in runs.items():
            ms = milliseconds(run, repeat_ms)
            rate = (key.nbytes + value.nbytes) / ms / 1e9
            yield {"shape": str(shape), "kernel": name, "ms": ms, "tb_per_s": rate,
                   "share_of_copy": rate / copied}  # fmt: skip


# Tables.

PASSES = {f"{way} TFLOP/s": (way, ".0f") for way in ("forward", "backward")}


def table(results: dict[str, Any]) -> str:
    """Return the result of :func:`bench_attention` as a Markdown page."""
    ceilings, lines = results["ceilings"], []
    for row in results["passes"]:  # each is compared with the best peer of its shape and variant
        place, line = (row["shape"], row["variant"]), dict(row)
        peers = [r for r in results["passes"] if (r["shape"], r["variant"]) == place]
        for way, _ in PASSES.values():
            rates = [peer[way] for peer in peers if peer["kernel"] in PEERS and way in peer]
            if rates and way in row:
                line[f"× {way}"] = row[way] / max(rates)
        lines.append(line)
    columns = {name: (name, "") for name in ("shape", "variant", "kernel")}
    for head, (way, form) in PASSES.items():
        columns |= {head: (way, form), f"{way} × best peer": (f"× {way}", ".2f")}
    page = [
        f"# Attention on one {results['hardware']}",
        f"torch {results['versions']['torch']}, triton {results['versions']['triton']}, bf16, "
        f"causal. bf16 matrix product {ceilings['matmul_tflops']:.0f} TFLOP/s, device-to-device "
        f"copy {ceilings['copy_tb_per_s']:.2f} TB/s, in the same run. Of a row the best peer is "
        "the fastest of torch's cuDNN, FlashAttention 2 and compiled FlexAttention that computes "
        "the same shape and variant with softmax.",
        bench.table(lines, columns),
    ]
    if results["decode"]:
        columns = {
            "shape": ("shape", ""), "kernel": ("kernel", ""), "ms": ("ms", ".3f"),
            "TB/s": ("tb_per_s", ".2f"), "of the copy": ("share_of_copy", ".0%"),
        }  # fmt: skip
        page += [
            "Decode, one query per sequence. Bytes count all keys and values, read or skipped.",
            bench.table(results["decode"], columns),
        ]
    page.append(
        "Each of our kernels was compared with the float64 reference before it was timed, within "
        f"{LIMIT:g} of its norm."
    )
    return "\n\n".join(page) + "\n"
