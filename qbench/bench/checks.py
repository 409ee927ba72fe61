"""The kernels against the float64 reference, on this GPU: what must hold before they are timed.

The cases are those of the table, shorter. ``pytest -m gpu`` has many more, in other dtypes too.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import BrokenExecutor, Executor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qbench.attention import kernels, reference
from qbench.attention.kernels import supported
from qbench.bench.timing import given
from qbench.errors import EvaluationError

LIMIT = 1e-2  # ‖error‖ / ‖truth‖ in bfloat16
BASES = ("softmax", "softpick", "rectified", "sigmoid")  # the others derive from these


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Causal attention in bfloat16. ``every``: for every normalizer, not only for ``BASES``."""

    shape: tuple[int, int, int, int, int, int]  # batch, heads, key heads, queries, keys, width
    window: int | None = None
    sloped: bool = False
    softcap: float | None = None
    every: bool = False

    def __str__(self) -> str:
        words = ["x".join(map(str, self.shape))]
        words += [f"window {self.window}"] if self.window else []
        words += ["ALiBi"] if self.sloped else []
        words += [f"soft cap {self.softcap:g}"] if self.softcap else []
        return ", ".join(words)


# Long enough for the backward kernels of Hopper, see hopper.MIN_WORK.
LONG = ((1, 16, 16, 3200, 3200, 64), (1, 16, 16, 2304, 2304, 128))
CASES = (
    *(Case(shape=shape, every=True) for shape in LONG),
    *(Case(shape=shape, sloped=True) for shape in LONG),
    *(Case(shape=shape, softcap=20.0) for shape in LONG),
    *(Case(shape=shape, window=1024) for shape in LONG),
    Case(shape=(1, 32, 8, 1664, 1664, 128)),  # grouped heads
    Case(shape=(2, 4, 2, 333, 333, 80)),  # lengths and heads that fill no tile
    Case(shape=(3, 8, 8, 1, 1000, 64), every=True),  # decoding
)
QUICK = (CASES[0], CASES[-1])


def check_kernels(
    pool: Executor, quick: bool = False, only: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Relative errors of the output and the inputs' gradients, each with its limit; of the
    normalizers ``only``, or of all. Computed by ``pool``, in processes, since most of the time goes
    into compiling kernels. Raises EvaluationError that names each case over its limit, or not
    finite, or the case whose process died."""
    calls = [
        (f"{name}, {case}", pool.submit(errors, case, name, seed))
        for case, name, seed in checks(QUICK if quick else CASES, only)
    ]
    results, red = [], []
    for name, call in calls:
        try:
            found = call.result()
        except BrokenExecutor as died:
            raise EvaluationError(
                f"bench attention: {name}: its process died, nothing timed"
            ) from died
        for what, error in found.items():
            results.append({"case": name, "what": what, "error": error, "limit": LIMIT})
            if not error <= LIMIT:
                red.append(f"{name}: {what} {error:.1e} > {LIMIT:.0e}")
    if red:
        raise EvaluationError("bench attention: wrong results, nothing timed: " + "; ".join(red))
    return results


def checks(cases: tuple[Case, ...], only: Collection[str]) -> list[tuple[Case, str, int]]:
    """Arguments of :func:`errors`."""
    return [
        (case, normalizer, seed)
        for seed, case in enumerate(cases)
        for normalizer in only or supported()
        if case.every or normalizer in BASES
    ]


def errors(case: Case, normalizer: str, seed: int) -> dict[str, float]:
    """‖got − truth‖ / ‖truth‖ of the output and the gradients of query, key and value, computed on
    one core, in a process that has neighbours on the GPU."""
    torch.set_num_threads(1)
    torch.cuda.empty_cache()  # of the case before
    batch, heads, kv_heads, queries, keys, width = case.shape
    settings = {"normalizer": normalizer, "causal": True, "window": case.window}
    settings["softcap"] = case.softcap
    parameters = given(normalizer, heads, sloped=case.sloped)
    if normalizer == "sigmoid" and seed % 2:
        parameters["bias"] = torch.linspace(-6, -4, heads, device="cuda")
    generator = torch.Generator("cuda").manual_seed(seed)
    inputs = [
        torch.randn(batch, length, count, width, device="cuda", generator=generator)
        .to(torch.bfloat16)
        .transpose(1, 2)
        .requires_grad_()
        for length, count in ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    ]
    gradient = torch.randn(batch, heads, queries, width, device="cuda", generator=generator)
    gradient = gradient.to(torch.bfloat16)
    output = kernels.attention(*inputs, parameters=parameters, **settings)
    got = (output, *torch.autograd.grad(output, inputs, gradient))
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    parameters = {name: tensor.double() for name, tensor in parameters.items()}
    truth = reference.attention(*wide, parameters=parameters, **settings)
    truths = (truth, *torch.autograd.grad(truth, wide, gradient.double()))
    names = ("output", "query gradient", "key gradient", "value gradient")
    return {name: relative_error(a, b) for name, a, b in zip(names, got, truths, strict=True)}


def relative_error(got: Tensor, truth: Tensor) -> float:
    """‖got − truth‖ / ‖truth‖; infinite where anything is not finite."""
    if not got.isfinite().all():
        return float("inf")
    norm = truth.double().norm().clamp(min=1e-30)
    return ((got.double() - truth.double()).norm() / norm).item()
