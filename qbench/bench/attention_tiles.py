"""``qbench bench attention --tiles``: which tile, and which arithmetic, is the fastest.

For whoever changes a constant of :mod:`qbench.attention.kernels`. Every candidate is compiled and
checked against the float64 reference on a small input, many at a time in processes of their own,
and then timed by itself, what the host takes to launch left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from qbench.attention import reference
from qbench.attention.kernels import gluon_backward, launch
from qbench.attention.kernels.settings import Parameters, Settings
from qbench.attention.kernels.tiles import Tile
from qbench.bench.attention_prefill import steps
from qbench.bench.attention_tiles_table import CURRENT, FORWARD
from qbench.bench.attention_timing import captured, given, milliseconds, random_tensor
from qbench.bench.attention_variants import VARIANTS, Variant
from qbench.bench.kept import Keep, gathered

LIMIT = 1e-2  # ‖error‖ / ‖truth‖ in bf16
SMALL = (1, 512, 16)  # batch, length, heads of the check
BACKWARD = ((4, 4096, 16), (8, 1024, 16))
REPEAT_MS = 25
KINDS = {"Gluon": 0, "Triton": 1 << 60}  # values of gluon_backward.ENOUGH that ask for each


def _tile(block_q: int, block_k: int, warps: int, stages: int, **rest: Any) -> Tile:
    return Tile(
        block_q=block_q, block_k=block_k, warps=warps, stages=stages, tma=True, free=True, **rest
    )


TILES = {  # by head dimension
    64: (_tile(64, 64, 4, 3), _tile(128, 64, 4, 3), _tile(64, 128, 4, 2, registers=168)),
    128: (_tile(64, 64, 4, 3),),
}
GLUON = {64: (_tile(64, 64, 4, 4, gluon=True),), 128: (_tile(64, 64, 4, 3, gluon=True),)}
PATIENCE_S = 90
COMPILE_S = 600.0
LATE = "not compiled in time"


def bench_tiles(
    widths: tuple[int, ...], only: Collection[str], seconds: float, keep: Keep
) -> dict[str, Any]:
    """Forward tiles, of each kernel the fastest first, and backward kernels by head dimension, in
    TFLOP/s; and short steps as they are; each kept by ``keep``. ``only``: of these normalizers,
    beside softmax. What is not compiled and checked after ``seconds`` is not timed."""
    variants = [v for v in VARIANTS if not only or v.normalizer in only or v == VARIANTS[0]]
    tiled = [
        (variant, width, tile) for width in widths for tile in TILES[width] for variant in variants
    ]
    # Those in use first: their backward kernels too are compared.
    jobs = [(variant, width, None) for width in widths for variant in variants] + tiled
    others = [
        (variant, width, tile)
        for width in widths
        for tile in GLUON[width]
        for variant in variants
        if variant.normalizer == "sigmoid"
    ]
    workers = max(1, min(30, (os.cpu_count() or 2) - 1))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        end = time.monotonic() + seconds
        found = {job: pool.submit(_error, job) for job in jobs}
        first = {job[1]: job for job in reversed(others)}
        ended = {width: _ends(job, seconds) for width, job in first.items()}
        found |= {job: pool.submit(_error, job) for job in others if ended[job[1]]}
        checks = {job: _until(end, future) for job, future in found.items()}
        pool.shutdown(cancel_futures=True)
    parts = [
        ("forward", _forward(checks)),
        ("backward", _backward(checks, widths)),
        ("steps", steps(REPEAT_MS, ("softmax", "softpick", "sigmoid"))),
    ]
    return gathered({}, parts, keep)


def _until(end: float, found: Future[str]) -> str:
    """What is found by then."""
    try:
        return found.result(timeout=max(0.0, end - time.monotonic()))
    except TimeoutError:
        return LATE


def _named(tile: Tile | None) -> str:
    if tile is None:
        return CURRENT
    words = f"{tile.block_q}×{tile.block_k}, {tile.warps} warps, {tile.stages} stages"
    words += f", {tile.registers} registers" if tile.registers else ""
    return words + (", Gluon" if tile.gluon else "")


def _ends(job: tuple[Variant, int, Tile | None], seconds: float) -> bool:
    """Whether this candidate comes to an end: one that waits for a barrier for ever would hold all
    others up."""
    process = get_context("spawn").Process(target=_pass, args=(job,))
    process.start()
    process.join(min(PATIENCE_S, seconds))
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode == 0


def _pass(job: tuple[Variant, int, Tile | None]) -> None:
    error = _error(job)
    if not _passed(error):
        raise SystemExit(f"{job[0]}, {_named(job[2])}: {error}")


def _error(job: tuple[Variant, int, Tile | None]) -> str:
    """The relative error of the output, for the tile that is used of every gradient too, the
    largest; or what went wrong. In a process of its own: what it compiles stays on disk."""
    variant, width, tile = job
    batch, length, heads = SMALL
    torch.manual_seed(0)
    inputs = [random_tensor(batch, length, heads, width).requires_grad_() for _ in range(3)]
    parameters = given(variant.normalizer, heads, sloped=variant.sloped)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    truth = reference.attention(
        *wide, normalizer=variant.normalizer, causal=True, softcap=variant.softcap or None,
        parameters={name: tensor.double() for name, tensor in parameters.items()},
    )  # fmt: skip
    gradient = torch.randn_like(inputs[0])
    truths = (truth.detach(), *torch.autograd.grad(truth, wide, gradient.double()))
    worst = 0.0
    try:
        with torch.no_grad(), variant.chosen():
            run = _launches(variant, inputs, tile)
            got = [run()[0]]
            if tile is None:
                for enough in KINDS.values():
                    with _from(enough):
                        got = [got[0], *_gradients(variant, inputs, gradient)()[:3]]
                    worst = max(worst, *map(_relative, got, truths))
    except Exception as problem:  # a candidate that does not compile is a finding
        return f"{type(problem).__name__}: {problem}".splitlines()[0][:60]
    return f"{max(worst, _relative(got[0], truths[0])):.1e}"


def _relative(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())


def _settings(variant: Variant, query: Tensor) -> Settings:
    length, width = query.shape[2:]
    return Settings(variant.normalizer, width**-0.5, variant.softcap, True, 0, length, length)


def _launches(
    variant: Variant, inputs: list[Tensor], tile: Tile | None
) -> Callable[[], tuple[Tensor, ...]]:
    parameters = Parameters.of(given(variant.normalizer, inputs[0].shape[1], sloped=variant.sloped))
    asked = _settings(variant, inputs[0])
    return lambda: launch.forward(*inputs, None, None, parameters, asked, tile)


def _gradients(
    variant: Variant, inputs: list[Tensor], gradient: Tensor
) -> Callable[[], tuple[Any, ...]]:
    parameters = Parameters.of(given(variant.normalizer, inputs[0].shape[1], sloped=variant.sloped))
    asked = _settings(variant, inputs[0])
    output, lse, imprecise = launch.forward(*inputs, None, None, parameters, asked)
    return lambda: launch.backward(
        gradient, *inputs, output, lse, imprecise, None, None, parameters, asked
    )


def _passed(error: str) -> bool:
    return error[0].isdigit() and float(error) <= LIMIT


def _variants(checks: dict[tuple[Variant, int, Tile | None], str]) -> list[Variant]:
    tried = {variant for variant, _, _ in checks}
    return [variant for variant in VARIANTS if variant in tried]


def _forward(checks: dict[tuple[Variant, int, Tile | None], str]) -> Iterator[dict[str, Any]]:
    batch, length, heads = FORWARD
    plain: dict[int, float] = {}
    for width in sorted({width for _, width, _ in checks}):
        inputs = [random_tensor(batch, length, heads, width) for _ in range(3)]
        work = 4 * batch * heads * length * length * width / 2
        for variant in _variants(checks):
            rows = []
            for (other, at, tile), error in checks.items():
                if other != variant or at != width:
                    continue
                rate = None
                if _passed(error):
                    with variant.chosen():
                        ms = milliseconds(_launches(variant, inputs, tile), REPEAT_MS)
                    rate = work / ms / 1e9
                rows.append({"width": width, "kernel": str(variant), "tile": _named(tile),
                             "rate": rate, "error": error})  # fmt: skip
                if tile is None and variant.normalizer == "softmax" and str(variant) == "softmax":
                    plain[width] = rate or float("nan")
            for row in sorted(rows, key=lambda row: -(row["rate"] or 0)):
                yield {**row, "beside": row["rate"] and row["rate"] / plain[width]}


def _backward(
    checks: dict[tuple[Variant, int, Tile | None], str], widths: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    for batch, length, heads in BACKWARD:
        for width in widths:
            inputs = [random_tensor(batch, length, heads, width) for _ in range(3)]
            gradient = torch.randn_like(inputs[0])
            work = 2.5 * 4 * batch * heads * length * length * width / 2
            plain = None
            for variant in _variants(checks):
                error = checks[variant, width, None]
                row = {"shape": (batch, length, heads, width), "kernel": str(variant),
                       "error": error, "Gluon": None, "Triton": None, "beside": None}  # fmt: skip
                for by, enough in KINDS.items():
                    if _passed(error):
                        make = partial(_gradients, variant, inputs, gradient)
                        with variant.chosen(), _from(enough):
                            row[by] = work / milliseconds(captured(make), REPEAT_MS) / 1e9
                plain = plain or row["Gluon"]
                yield {**row, "beside": plain and row["Gluon"] and row["Gluon"] / plain}


@contextmanager
def _from(enough: int) -> Iterator[None]:
    kept = gluon_backward.ENOUGH
    gluon_backward.ENOUGH = enough
    try:
        yield
    finally:
        gluon_backward.ENOUGH = kept
