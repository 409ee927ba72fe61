"""How a cell is scored, everything decided: what a recipe asks for, without "auto". No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic.dataclasses
from pydantic import ConfigDict, Field

from qbench.checkpoints.classes import Mode

if TYPE_CHECKING:
    from qbench.records import SampleDifference, ScoringReport


# A bias fails that lies farther beyond the bound than chance takes 1 sample in 10,000: a grid makes
# hundreds of these comparisons (30 cells of 5 tasks: 150), and at 5 % each some would always fail.
FALSE_ALARMS = 1e-4
# Of the t quantile. Two documents have one degree of freedom, whose quantile (6,366) is beyond all.
LEAST_DEGREES = 9
Bound = Annotated[float, Field(strict=True, gt=0, le=100, allow_inf_nan=False)]  # nats


@pydantic.dataclasses.dataclass(
    frozen=True, kw_only=True, slots=True, config=ConfigDict(extra="forbid")
)
class Tolerance:
    """Bounds on the sample of each task's documents that is scored both ways.

    ``mean`` and ``largest`` bound the absolute difference of log-likelihoods in nats per scored
    token, over the sample and for a single request. bfloat16 logits of ±16 step by 0.125, so single
    tokens differ by that much through rounding alone. ``changed`` bounds the share of sampled
    documents with another answer; a single one never fails.

    Where activations or the KV cache are quantized, rounding moves values by whole steps. Two
    correct computations then differ by about as much as quantization costs. Such cells are judged
    by the mean difference with its sign alone. It fails where it is more standard errors beyond
    ``mean`` than chance gives 1 sample in 10,000, by Student's t (``standard_errors``).
    """

    mean: Bound = 0.05
    largest: Bound = 0.5
    changed: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.1


def sample_violation(tolerance: Tolerance, sample: SampleDifference) -> str | None:
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
    """How many standard errors a sample's mean may lie beyond the bound: the two-sided t quantile
    at FALSE_ALARMS. Degrees of freedom are ``documents`` − 1, at least LEAST_DEGREES. It is 4.5 for
    32 documents, 6.6 for ten and fewer."""
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


def tolerance_violation(tolerance: Tolerance, report: ScoringReport | None) -> str | None:
    """Why a record does not pass ``tolerance``, which may be tighter than when it was made; None
    where it does, and where nothing was scored fast."""
    if report is None or report.difference_from_exact is None:
        return None
    samples = report.difference_from_exact.samples
    reasons = (sample_violation(tolerance, sample) for sample in samples)
    return next((reason for reason in reasons if reason), None)


MODES: tuple[Mode, ...] = ("fast", "exact", "lm-eval")  # the fastest first
SoftmaxDtype = Literal["float32", "model"]

FEWSHOT_SEED = 1234  # lm-eval's own

# Scores move with the size of a batch, so "auto" is a constant and not a measurement.
BATCH_SIZE = {"cuda": 64, "cpu": 8}
WINDOW_BATCH_SIZE = {"cuda": 8, "cpu": 1}
BATCH_TOKENS = {"cuda": 32_768, "cpu": 2_048}
SAMPLE = {"cuda": 32, "cpu": 8}
# Tokens × hidden size of a pack on a GPU. A layer's activations grow with it: 1.1 GiB on top of
# the weights at 340M parameters. Logits are computed in parts of a fixed size.
PACK_ELEMENTS = 32_768 * 1_024
LEAST_BATCH_TOKENS = 1_024
UNKNOWN_HIDDEN_SIZE = 8_192  # of a configuration that states none


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """How prompts become a conversation, in lm-eval's words."""

    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True
    system_instruction: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringSettings:
    """Settings of one cell's scorer; all but ``tolerance`` are part of the cell's key.

    ``batch_size`` counts padded requests (in fast mode those of the sample),
    ``window_batch_size`` rolling windows of up to ``max_length`` tokens, ``batch_tokens`` the
    tokens of a pack without padding (fast mode only, else None). ``sample`` counts the documents
    of each task on which fast scoring is compared with exact, within ``tolerance``.
    ``seed`` draws that sample and, counted from lm-eval's defaults, what a task leaves to chance;
    ``fewshot_seed`` draws few-shot examples. ``amplifies_rounding``: the quantizer's, which
    changes how fast scores are judged and no score. ``fallback``: a task whose fast scores leave
    the tolerance is scored exactly; else it fails.
    """

    mode: Mode
    max_length: int
    batch_size: int
    window_batch_size: int
    batch_tokens: int | None = None
    add_bos: bool | None = False  # None: as the tokenizer does
    softmax_dtype: SoftmaxDtype = "float32"
    sample: int = 0
    tolerance: Tolerance = field(default_factory=Tolerance)
    limit: int | None = None
    seed: int = 0
    fewshot_seed: int = FEWSHOT_SEED
    amplifies_rounding: bool = False
    fallback: bool = False
    chat: Chat | None = None  # None: prompts are the task's texts

    def __post_init__(self) -> None:
        assert (self.mode == "fast") == (self.batch_tokens is not None)

    def key_parts(self) -> dict[str, Any]:
        """What belongs into a cell's key. ``tolerance`` changes no score: a record is held
        against it when it is read (``tolerance_violation``)."""
        judged = ("tolerance", "amplifies_rounding", "fallback")
        left_out = judged if self.chat else (*judged, "chat")
        return {k: v for k, v in asdict(self).items() if k not in left_out}


def batch_tokens(device: str, config: Mapping[str, Any]) -> int:
    """Tokens of a pack, from the device type and the model's shape alone: the same packs wherever
    the model runs, however much memory is free there."""
    most = BATCH_TOKENS[device]
    if device == "cpu":
        return most
    fits = PACK_ELEMENTS // hidden_size(config)
    return min(most, max(LEAST_BATCH_TOKENS, fits - fits % LEAST_BATCH_TOKENS))


def hidden_size(config: Mapping[str, Any]) -> int:
    """A configuration's width, under the names that transformers' models have for it."""
    inner = config.get("text_config")
    levels = (config, inner) if isinstance(inner, Mapping) else (config,)
    found = (level.get(n) for level in levels for n in ("hidden_size", "n_embd", "d_model"))
    return next((n for n in found if isinstance(n, int) and n > 0), UNKNOWN_HIDDEN_SIZE)
