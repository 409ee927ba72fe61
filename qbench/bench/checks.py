"""The kernels against the float64 reference, on this GPU: what must hold before they are timed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import BrokenExecutor, Executor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qbench.attention import kernels, reference
from qbench.attention.kernels import supported
from qbench.attention.normalizers import NORMALIZERS
from qbench.bench.timing import given
from qbench.errors import EvaluationError

LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # ‖error‖ / ‖truth‖


OF_PARAMETERS = 5  # times the limit: sums of both signs over all rows
SIGNS = 2  # draws that say how large such a sum usually is
LONG = 2048  # queries
NEAR_ZERO = 1e-6  # of scores of standard deviation 1, in float32
ATTEMPTS = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """``scores``: factor on the queries. ``mask``: share of keys each query sees, or None.
    ``every``: for every normalizer, not only for those that others derive from."""

    shape: tuple[int, int, int, int, int, int]  # batch, heads, key heads, queries, keys, width
    causal: bool = True
    window: int | None = None
    scores: float = 1.0
    mask: float | None = None
    sloped: bool = False
    softcap: float | None = None
    every: bool = False

    def fits(self, dtype: torch.dtype, normalizer: str) -> bool:
        """Queries of 1e-5 are below fp16's normal numbers: their gradients have few bits there.
        The long cases are there for the kernels that only bf16 has. Slopes bring scores to 0,
        where rounding decides on the sign."""
        if not self.every and normalizer not in BASES:
            return False
        if self.sloped and NORMALIZERS.get(normalizer).sparse and dtype == torch.float32:
            return False
        if self.shape[3] > LONG:
            return dtype == torch.bfloat16
        return dtype != torch.float16 or self.scores >= 1e-3

    def __str__(self) -> str:
        words = ["x".join(map(str, self.shape)), "causal" if self.causal else "full"]
        words += [f"window {self.window}"] if self.window else []
        words += [f"scores × {self.scores:g}"] if self.scores != 1 else []
        words += ["mask"] if self.mask else []
        words += ["ALiBi"] if self.sloped else []
        words += [f"soft cap {self.softcap:g}"] if self.softcap else []
        return ", ".join(words)


BASES = ("softmax", "softpick", "rectified", "sigmoid")
CASES = (
    *(
        Case(shape=(2, 4, 2, 333, 333, width), every=width in (64, 80))
        for width in (16, 32, 64, 80, 96, 128, 256)
    ),
    Case(shape=(1, 2, 2, 200, 129, 64), causal=False),
    Case(shape=(1, 4, 1, 130, 517, 64)),
    Case(shape=(1, 2, 2, 700, 700, 64), window=100, every=True),
    Case(shape=(2, 2, 1, 257, 257, 64), mask=0.5, causal=False, every=True),
    Case(shape=(3, 8, 2, 1, 1000, 64), every=True),
    Case(shape=(2, 4, 4, 3, 4097, 128)),
    Case(shape=(1, 2, 2, 1, 1, 64)),
    # The heads of what is timed: compiled here, many at a time.
    *(Case(shape=(1, 16, 16, 130, 130, width), every=True) for width in (64, 128)),
    Case(shape=(2, 16, 16, 1, 600, 64)),
    # Long enough for the backward kernels of Hopper, see hopper.MIN_WORK.
    Case(shape=(1, 16, 8, 3200, 3200, 64), every=True),
    Case(shape=(1, 16, 16, 2304, 2304, 128), every=True),
    Case(shape=(1, 2, 2, 333, 333, 64), scores=1e-3),
    Case(shape=(1, 2, 2, 333, 333, 64), scores=1e-5),
    Case(shape=(1, 2, 2, 333, 333, 64), scores=30.0),
    # What published models combine.
    Case(shape=(1, 16, 16, 3200, 3200, 64), sloped=True),
    Case(shape=(1, 16, 16, 3200, 3200, 64), softcap=20.0),
    Case(shape=(1, 2, 2, 333, 333, 64), softcap=20.0, scores=10.0),  # many near the cap
    Case(shape=(2, 4, 2, 333, 333, 128), sloped=True, softcap=5.0),
    Case(shape=(2, 4, 2, 333, 333, 64), sloped=True, softcap=5.0, window=50, every=True),
    Case(shape=(2, 4, 2, 3, 999, 64), sloped=True, softcap=5.0, window=500, every=True),
)
QUICK = tuple(CASES[i] for i in (2, 9, 11, 26))


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` in a worker process: on one core, and its memory given back to the
    neighbours on the GPU."""
    torch.set_num_threads(1)
    found = function(*arguments)
    torch.cuda.empty_cache()
    return found


def check_kernels(
    pool: Executor, quick: bool = False, only: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Relative errors of the output and every gradient, each with its limit; of the normalizers
    ``only``, or of all. Computed by ``pool``, in processes, since most of the time goes into
    compiling kernels. Raises EvaluationError that names each case over its limit, or not finite,
    or the case whose process died."""
    results = list(_results(pool, QUICK if quick else CASES, only))
    red = [r for r in results if not r["error"] <= r["limit"]]
    if red:
        lines = (f"{r['case']}: {r['what']} {r['error']:.1e} > {r['limit']:.0e}" for r in red)
        raise EvaluationError("bench attention: wrong results, nothing timed: " + "; ".join(lines))
    return results


def _results(
    pool: Executor, cases: tuple[Case, ...], only: Collection[str]
) -> Iterator[dict[str, Any]]:
    """In the order of the cases, whichever ends first."""
    calls = [
        (f"{name}, {str(dtype).removeprefix('torch.')}, {case}", dtype, call)
        for case, name, dtype, seed in checks(cases, only)
        for call in [pool.submit(alone, errors, case, name, dtype, seed)]
    ]
    for name, dtype, call in calls:
        try:
            found = call.result()
        except BrokenExecutor as died:
            raise EvaluationError(
                f"bench attention: {name}: its process died, nothing timed"
            ) from died
        for what, error in found.items():
            yield {"case": name, "what": what, "error": error, "limit": limit(what, dtype)}


def checks(
    cases: tuple[Case, ...], only: Collection[str]
) -> list[tuple[Case, str, torch.dtype, int]]:
    """Arguments of :func:`errors`."""
    return [
        (case, normalizer, dtype, seed)
        for seed, case in enumerate(cases)
        for normalizer in only or supported()
        for dtype in LIMITS
        if case.fits(dtype, normalizer)
    ]


def limit(what: str, dtype: torch.dtype) -> float:
    """The largest error that passes."""
    return LIMITS[dtype] * (OF_PARAMETERS if what.startswith("gradient of") else 1)


def errors(case: Case, normalizer: str, dtype: torch.dtype, seed: int) -> dict[str, float]:
    """‖got − truth‖ / ‖truth‖ of the output and the gradients of inputs and parameters."""
    batch, heads, _, queries, keys, width = case.shape
    settings = {"normalizer": normalizer, "causal": case.causal, "window": case.window}
    settings["softcap"] = case.softcap
    parameters = given(normalizer, heads, sloped=case.sloped, trained=True)
    if normalizer == "sigmoid" and seed % 2:
        parameters["bias"] = torch.linspace(-6, -4, heads, device="cuda").requires_grad_()
    learned = [name for name, tensor in parameters.items() if tensor.requires_grad]
    for attempt in range(ATTEMPTS):
        generator = torch.Generator("cuda").manual_seed(seed + 1000 * attempt)
        inputs = _draw(case, dtype, generator)
        if dtype != torch.float32 or _clear_of_zero(*inputs[:2], case):
            break
    if case.mask is not None:
        shape = (batch, 1, queries, keys)
        settings["mask"] = torch.rand(shape, device="cuda", generator=generator) < case.mask
    gradient = torch.randn(batch, heads, queries, width, device="cuda", generator=generator)
    gradient = gradient.to(dtype)
    output = kernels.attention(*inputs, parameters=parameters, **settings)
    sources = [*inputs, *(parameters[name] for name in learned)]
    got = (output, *torch.autograd.grad(output, sources, gradient))
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    parameters = {
        name: tensor.detach().double().requires_grad_(name in learned)
        for name, tensor in parameters.items()
    }
    truth = reference.attention(*wide, parameters=parameters, **settings)
    sources = [*wide, *(parameters[name] for name in learned)]
    truths = (truth, *torch.autograd.grad(truth, sources, gradient.double(), retain_graph=True))
    least = [0.0] * 4 + usual_sizes(truth, sources[3:], gradient.double(), generator)
    names = ("output", "query gradient", "key gradient", "value gradient")
    names += tuple(f"gradient of {name}" for name in learned)
    if keys == 1:  # the weight of a single key does not depend on its score: only rounding is left
        got, truths, names, least = got[::3], truths[::3], names[::3], least[::3]
    found = zip(names, got, truths, least, strict=True)
    return {name: relative_error(a, b, least=size) for name, a, b, size in found}


def usual_sizes(
    output: Tensor, parameters: list[Tensor], gradient: Tensor, generator: torch.Generator
) -> list[float]:
    """How large the gradients of ``parameters`` usually are (the root of the mean of ‖·‖²) when
    every row of ``gradient`` [B, H, T, D] gets a sign of its own by ``generator``. A sum over rows
    that happens to be next to nothing has the rounding of one that is not."""
    squares = [0.0] * len(parameters)
    for _ in range(SIGNS if parameters else 0):
        rows = torch.rand(gradient.shape[:3], device=gradient.device, generator=generator)
        signs = torch.where(rows < 0.5, -1.0, 1.0)[..., None]
        found = torch.autograd.grad(output, parameters, gradient * signs, retain_graph=True)
        for i, one in enumerate(found):
            squares[i] += one.double().norm().item() ** 2
    return [(total / SIGNS) ** 0.5 for total in squares]


def _draw(case: Case, dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
    batch, heads, kv_heads, queries, keys, width = case.shape

    def draw(length: int, count: int, factor: float = 1.0) -> Tensor:
        shape = (batch, length, count, width)
        tensor = torch.randn(shape, device="cuda", generator=generator) * factor
        return tensor.to(dtype).transpose(1, 2).requires_grad_()

    return [draw(queries, heads, case.scores), draw(keys, kv_heads), draw(keys, kv_heads)]


def _clear_of_zero(query: Tensor, key: Tensor, case: Case) -> bool:
    """Whether no score is so near 0 that rounding could change its sign. There the rectified
    weights and softpick's gradients jump, so that two right results may differ."""
    shared = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query.detach().double() @ shared.detach().double().transpose(2, 3)
    return bool(scores.abs().min() * query.shape[3] ** -0.5 > NEAR_ZERO * case.scores)


def relative_error(got: Tensor, truth: Tensor, *, least: float = 0.0) -> float:
    """‖got − truth‖ / ‖truth‖, or of ``least`` where that is more; infinite where anything is not
    finite."""
    if not got.isfinite().all():
        return float("inf")
    norm = truth.double().norm().clamp(min=max(least, 1e-30))
    return ((got.double() - truth.double()).norm() / norm).item()
