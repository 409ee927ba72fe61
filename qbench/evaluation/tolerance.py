"""How far fast scoring may lie from exact scoring before a cell fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import ConfigDict, Field

if TYPE_CHECKING:
    from qbench.record import SampleDifference, ScoringReport

# A bias fails that lies farther beyond the bound than chance takes 1 sample in 10,000: a grid makes
# hundreds of these comparisons (30 cells of 5 tasks: 150), and at 5 % each some would always fail.
FALSE_ALARMS = 1e-4
# Of the t quantile. Two documents have one degree of freedom, whose quantile (6,366) is beyond all.
LEAST_DEGREES = 9
Bound = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]  # nats


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Bounds on the sample of each task's documents that is scored both ways.

    ``mean`` and ``largest`` bound the absolute difference of log-likelihoods in nats per scored
    token, over the sample and for a single request: bfloat16 logits of ±16 step by 0.125, so
    single tokens differ by that much for no other reason than rounding. ``changed`` bounds the
    share of sampled documents with another answer; a single one never fails.

    Where activations or the KV cache are quantized, rounding moves values by whole steps, and two
    equally right computations differ by about as much as quantization costs. Of such cells the
    mean difference with its sign is judged, alone: it fails where it is more standard errors beyond
    ``mean`` than chance gives 1 sample in 10,000 by Student's t (``standard_errors``).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    mean: Bound = 0.05
    largest: Bound = 0.5
    changed: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.1


def beyond(tolerance: Tolerance, sample: SampleDifference) -> str | None:
    """Why a sample's differences are more than ``tolerance`` allows; None where they are not."""
    if sample.by_bias:
        return _biased(tolerance, sample)
    changed, count = sample.changed_answers, sample.documents
    values = {
        "mean": (
            sample.mean_per_token,
            f"the mean of the sample is {sample.mean_per_token:.4g} nats a token off",
        ),
        "largest": (
            sample.largest_per_token,
            f"one request of the sample is {sample.largest_per_token:.4g} nats a token off",
        ),
        "changed": (
            changed / count if changed > 1 else 0.0,
            f"{changed} of {count} answers changed",
        ),
    }
    for bound, (value, what) in values.items():
        most = getattr(tolerance, bound)
        if not value <= most:  # NaN is not within it
            return (
                f"{sample.task}: fast scoring differs from exact: {what}, more than "
                f"evaluation.tolerance.{bound} {most:g}"
            )
    return None


def standard_errors(documents: int) -> float:
    """How many of them a sample's mean may lie beyond the bound: the two-sided t quantile at
    FALSE_ALARMS with ``documents`` − 1 degrees of freedom, of few documents with LEAST_DEGREES.
    4.5 of 32 documents, 6.6 of ten and fewer."""
    from scipy import special  # slow to import, and most cells are judged without

    return float(special.stdtrit(max(documents - 1, LEAST_DEGREES), 1 - FALSE_ALARMS / 2))


def _biased(tolerance: Tolerance, sample: SampleDifference) -> str | None:
    bias, error = sample.bias_per_token, sample.bias_stderr or 0.0
    assert bias is not None, "measured wherever it is judged"
    most = standard_errors(sample.documents)
    if abs(bias) - most * error <= tolerance.mean:
        return None
    return (
        f"{sample.task}: fast scoring differs from exact: its mean difference on the sample is "
        f"{bias:+.4g} ± {error:.2g} nats a token, more than {most:.2g} standard errors beyond "
        f"evaluation.tolerance.mean {tolerance.mean:g}"
    )


def exceeded(tolerance: Tolerance, report: ScoringReport | None) -> str | None:
    """Why a record does not pass ``tolerance``, which may be tighter than when it was made; None
    where it does, and where nothing was scored fast."""
    if report is None or report.mode != "fast":
        return None
    difference = report.difference_from_exact
    if difference is None or (difference.requests and not difference.samples):
        return "fast scoring's difference from exact is not known by task"
    reasons = (beyond(tolerance, sample) for sample in difference.samples)
    return next((reason for reason in reasons if reason), None)
