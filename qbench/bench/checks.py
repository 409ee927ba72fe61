"""Check the attention kernels against the float64 reference on this GPU, before they are timed.

The cases are those that are timed, shorter. ``pytest -m gpu`` has many more, in other dtypes too.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import BrokenExecutor, Executor

import torch
from torch import Tensor

from qbench.attention import kernels, reference
from qbench.attention.kernels import supported
from qbench.bench import Row
from qbench.bench.timing import VARIANTS, Shape
from qbench.errors import EvaluationError

LIMIT = 1e-2  # ‖error‖ / ‖truth‖ in bfloat16
BASES = ("softmax", "softpick", "rectified", "sigmoid")  # the others derive from these
# Long enough for the backward kernels of Hopper, see hopper.MIN_WORK.
LONG = (
    Shape(1, 3200, 16, 16, 64, tuple(VARIANTS)),
    Shape(1, 2304, 16, 16, 128, tuple(VARIANTS)),
)
DECODING = Shape(3, 1000, 8, 8, 64, queries=1)
GROUPED = Shape(1, 1664, 32, 8, 128)
ODD = Shape(2, 333, 4, 2, 80)  # fills no tile


def check_kernels(pool: Executor, quick: bool = False, only: Collection[str] = ()) -> list[Row]:
    """Return rows with the relative error of the output and of the inputs' gradients in every case,
    each with its limit.

    ``only``: check these attention functions instead of all. ``pool`` runs the cases in processes,
    since compiling kernels takes most of the time. Raises EvaluationError that names each case
    above its limit or not finite, or the case whose process died.
    """
    calls = [
        (f"{normalizer}, {shape}, {variant}", pool.submit(errors, shape, variant, normalizer))
        for shape, variant, normalizer in cases(quick, only)
    ]
    results, red = [], []
    for name, call in calls:
        try:
            case_errors = call.result()
        except BrokenExecutor as died:
            raise EvaluationError(
                f"bench attention: {name}: its process died, nothing timed"
            ) from died
        for what, error in case_errors.items():
            results.append({"case": name, "what": what, "error": error, "limit": LIMIT})
            if not error <= LIMIT:
                red.append(f"{name}: {what} {error:.1e} > {LIMIT:.0e}")
    if red:
        raise EvaluationError("bench attention: wrong results, nothing timed: " + "; ".join(red))
    return results


def cases(quick: bool, only: Collection[str]) -> list[tuple[Shape, str, str]]:
    """Return arguments of :func:`errors`: plain causal attention of every attention function, and
    the other shapes and variants of ``BASES``."""
    every = [(shape, "causal") for shape in ((LONG[0], DECODING) if quick else (*LONG, DECODING))]
    of_bases = [(shape, variant) for shape in LONG for variant in shape.variants[1:]]
    of_bases += [(GROUPED, "causal"), (ODD, "causal")]
    arguments = [(*case, name) for case in every for name in only or supported()]
    if not quick:
        arguments += [
            (*case, name) for case in of_bases for name in BASES if name in (only or BASES)
        ]
    return arguments


def errors(shape: Shape, variant: str, normalizer: str) -> dict[str, float]:
    """Return ‖result − truth‖ / ‖truth‖ of the output and of the gradients of query, key and value.
    Runs on one core, since other cases run beside it."""
    torch.set_num_threads(1)
    torch.cuda.empty_cache()  # of the case before
    torch.manual_seed(0)
    settings = shape.settings(normalizer, variant)
    if normalizer == "sigmoid" and variant != "causal":
        settings["parameters"]["bias"] = torch.linspace(-6, -4, shape.heads, device="cuda")
    inputs = shape.tensors()
    output = kernels.attention(*inputs, **settings)
    gradient = torch.randn_like(output)
    got = (output, *torch.autograd.grad(output, inputs, gradient))
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    settings["parameters"] = {
        name: tensor.double() for name, tensor in settings["parameters"].items()
    }
    truth = reference.attention(*wide, **settings)
    truths = (truth, *torch.autograd.grad(truth, wide, gradient.double()))
    names = ("output", "query gradient", "key gradient", "value gradient")
    return {name: relative_error(a, b) for name, a, b in zip(names, got, truths, strict=True)}


def relative_error(got: Tensor, truth: Tensor) -> float:
    """Return ‖got − truth‖ / ‖truth‖; infinity if anything is not finite."""
    if not got.isfinite().all():
        return float("inf")
    norm = truth.double().norm().clamp(min=1e-30)
    return ((got.double() - truth.double()).norm() / norm).item()
