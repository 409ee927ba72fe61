"""Settings of a cell's scoring, with nothing left "auto". Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic.dataclasses
from pydantic import ConfigDict, Field

from qbench.records import DifferenceFromExact

if TYPE_CHECKING:
    from qbench.records import SampleDifference, ScoringReport


# Fast scores pass if their bias lies within the bound with this certainty. A sample is doubled
# until it tells, up to all documents, whose bias has no error: no task fails by chance. With six
# looks a bias beyond the bound passes in at most 3 of 100 tasks.
CERTAINTY = 0.995
# The noise of batches adds so many times ``mean`` at most: else large errors allow themselves.
MOST_NOISE = 2
Bound = Annotated[float, Field(strict=True, gt=0, le=100, allow_inf_nan=False)]  # nats


@pydantic.dataclasses.dataclass(
    frozen=True, kw_only=True, slots=True, config=ConfigDict(extra="forbid")
)
class Tolerance:
    """Bounds on the differences between fast and exact scores of the same sample of a task.

    ``mean`` and ``largest`` bound the absolute difference of log-likelihoods in nats per scored
    token, over the sample and for a single request. bfloat16 logits of ±16 step by 0.125, so single
    tokens differ by that much through rounding alone. ``changed`` bounds the share of sampled
    documents with another answer; a single one never fails. ``bias`` bounds the mean difference
    with its sign: half of the smallest difference that the README's headline rests on, 0.041.

    If activations or the KV cache are quantized, rounding moves values by whole steps, and two
    correct computations differ by about as much as quantization costs. Such cells are judged by the
    mean difference with its sign alone, which ``mean`` then bounds, beyond ``batch_noise``.
    """

    mean: Bound = 0.05
    largest: Bound = 0.5
    bias: Bound = 0.02
    changed: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.1


def sample_violation(tolerance: Tolerance, sample: SampleDifference) -> str | None:
    """Return why fast scores may differ from exact ones by more than ``tolerance``, judged by the
    sample, as a line that names the first bound exceeded; None if they do not."""
    reasons = {} if sample.by_bias else {
        "mean": (
            sample.mean_per_token,
            f"the sample's mean difference is {sample.mean_per_token:.4g} nats per token",
        ),
        "largest": (
            sample.largest_per_token,
            f"one request of the sample differs by {sample.largest_per_token:.4g} nats per token",
        ),
        "changed": (
            sample.changed_answers / sample.documents if sample.changed_answers > 1 else 0.0,
            f"{sample.changed_answers} of {sample.documents} answers changed",
        ),
    }  # fmt: skip
    bias, margin = sample.bias_per_token, bias_margin(sample)
    if bias is not None:
        reasons["mean" if sample.by_bias else "bias"] = (
            abs(bias) + margin,
            f"its bias on the sample is {bias:+.4g} ± {margin:.2g} nats per token",
        )
    noise = batch_noise(tolerance, sample)
    for bound, (value, what) in reasons.items():
        most = getattr(tolerance, bound)
        if not value <= most + noise:  # NaN is not within it
            return (
                f"{sample.task}: fast scoring differs from exact: {what}, more than "
                f"evaluation.tolerance.{bound} {most:g}"
                + (f" plus {noise:.2g} for the noise of batches" if noise else "")
            )
    return None


def bias_margin(sample: SampleDifference) -> float:
    """Return how far the bias over all documents may lie from the sample's, in nats per token: the
    quantile of Student's t at ``CERTAINTY`` times the standard error, less for a sample of much of
    the population; 0 if all were sampled, infinite for a single one."""
    share = sampled_share(sample)
    if share >= 1:
        return 0.0
    if sample.bias_stderr is None:
        return math.inf
    from scipy import special  # slow to import

    quantile = float(special.stdtrit(sample.documents - 1, CERTAINTY))
    return quantile * sample.bias_stderr * math.sqrt(1 - share)


def batch_noise(tolerance: Tolerance, sample: SampleDifference) -> float:
    """Return the bias in nats per token that fast and exact scores of all documents do not exceed
    by chance, at ``CERTAINTY``, though both are correct: other batches round otherwise, and
    documents then differ as much as the sample's do. At most ``MOST_NOISE`` times the bound
    ``mean``; 0 if rounding is not amplified."""
    if not sample.by_bias or sample.bias_stderr is None:
        return 0.0
    quantile = NormalDist().inv_cdf(CERTAINTY)
    noise = quantile * sample.bias_stderr * math.sqrt(sampled_share(sample))
    return min(noise, MOST_NOISE * tolerance.mean)


def sampled_share(sample: SampleDifference) -> float:
    """Return the share of the task's documents that were sampled; 0 if their number is unknown."""
    return min(1.0, sample.documents / sample.population) if sample.population else 0.0


def undecided(tolerance: Tolerance, sample: SampleDifference) -> bool:
    """Return whether more documents may show that the bias is within its bound: this sample does
    not, but chance could explain that."""
    bound = tolerance.mean if sample.by_bias else tolerance.bias
    bound += batch_noise(tolerance, sample)
    bias, margin = abs(sample.bias_per_token or 0.0), bias_margin(sample)
    return margin > 0 and bias - 2 * margin <= bound < bias + margin


def tolerance_violation(tolerance: Tolerance, report: ScoringReport | None) -> str | None:
    """Return why a record's scores violate ``tolerance``, which may be tighter than when they were
    made; None if they do not, if nothing was scored fast, or if there is no ``report``."""
    if report is None or report.difference_from_exact is None:
        return None
    samples = report.difference_from_exact.samples
    reasons = (sample_violation(tolerance, sample) for sample in samples)
    return next((reason for reason in reasons if reason), None)


def merge_differences(differences: Sequence[DifferenceFromExact]) -> DifferenceFromExact:
    """Join the differences between fast and exact scores of several tasks: counts are added, means
    are weighted by requests, ``samples`` holds the sample of each task."""

    def total(name: str) -> int:
        return sum(getattr(difference, name) for difference in differences)

    def mean(name: str) -> float:
        parts = (getattr(difference, name) * difference.requests for difference in differences)
        return sum(parts) / max(1, total("requests"))

    return DifferenceFromExact(
        documents=total("documents"),
        requests=total("requests"),
        largest=max((difference.largest for difference in differences), default=0.0),
        mean=mean("mean"),
        largest_per_token=max((each.largest_per_token for each in differences), default=0.0),
        mean_per_token=mean("mean_per_token"),
        changed_answers=total("changed_answers"),
        samples=tuple(sample for difference in differences for sample in difference.samples),
    )


Mode = Literal["fast", "exact", "lm-eval"]  # the fastest first
SoftmaxDtype = Literal["float32", "model"]

FEWSHOT_SEED = 1234  # lm-eval's own

# Scores move with the size of a batch, so "auto" is a constant and not a measurement.
BATCH_SIZE = {"cuda": 64, "cpu": 8}
WINDOW_BATCH_SIZE = {"cuda": 8, "cpu": 1}
BATCH_TOKENS = {"cuda": 65_536, "cpu": 2_048}
SAMPLE = {"cuda": 32, "cpu": 8}
# Tokens × hidden size of a pack on a GPU. A layer's activations grow with it: 1.7 GiB on top of
# the weights at 340M parameters. Logits are computed in parts of a fixed size.
PACK_ELEMENTS = 65_536 * 1_024
LEAST_BATCH_TOKENS = 1_024
UNKNOWN_HIDDEN_SIZE = 8_192  # of a configuration that states none


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """How prompts become a conversation, in lm-eval's words."""

    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True
    system_instruction: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerSettings:
    """How the models answer the prompts of a recipe's ``answers``. ``samples`` per prompt are drawn
    at ``temperature``; at 0 the answer is greedy. ``from_task``: prompts are a task's requests."""

    max_new_tokens: int
    samples: int
    temperature: float
    from_task: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringSettings:
    """Settings of one cell's scorer: part of its key, but for those that ``key_parts`` leaves out.

    ``batch_size`` counts padded requests (in fast mode those of the sample if scores depend on the
    batch), ``window_batch_size`` rolling windows of up to ``max_length`` tokens, ``batch_tokens``
    the tokens of a pack without padding (fast mode only, else None). ``packed``: fast batches are
    such packs; else each text has a row of its own, and ``batch_tokens`` counts padding too
    (measured when the model is loaded, so no part of the key). ``sample`` counts the documents of
    each task on which fast scoring is compared with exact, within ``tolerance``. ``seed`` draws
    that sample and, counted from lm-eval's defaults, what a task leaves to chance; ``fewshot_seed``
    draws few-shot examples.
    ``amplifies_rounding``: the quantizer's, which changes how fast scores are judged and no score.
    ``shares_scales``: the quantizer's, too: scores depend on the batch, and fast ones are compared
    with those of exact scoring's own batches, not of batches with less padding. ``fallback``: a
    task whose fast scores leave the tolerance is scored exactly; else it fails.
    """

    mode: Mode
    max_length: int
    batch_size: int
    window_batch_size: int
    batch_tokens: int | None = None
    packed: bool = True
    add_bos: bool | None = False  # None: as the tokenizer does
    softmax_dtype: SoftmaxDtype = "float32"
    sample: int = 0
    tolerance: Tolerance = field(default_factory=Tolerance)
    limit: int | None = None
    seed: int = 0
    fewshot_seed: int = FEWSHOT_SEED
    amplifies_rounding: bool = False
    shares_scales: bool = False
    fallback: bool = False
    chat: Chat | None = None  # None: prompts are the task's texts

    def __post_init__(self) -> None:
        assert (self.mode == "fast") == (self.batch_tokens is not None)

    def key_parts(self) -> dict[str, Any]:
        """Return the settings for a cell's key. ``tolerance`` and the fields that say how fast
        scores are batched or judged are left out, since they change no score (``tolerance`` is
        compared when a record is read, by ``tolerance_violation``); so is ``chat`` if it is None.
        """
        left_out = {"tolerance", "amplifies_rounding", "fallback", "packed", "shares_scales"}
        left_out |= set() if self.chat else {"chat"}
        return {k: v for k, v in asdict(self).items() if k not in left_out}


def batch_tokens(device: str, config: Mapping[str, Any], *, shares_scales: bool = False) -> int:
    """Return the most tokens of a pack: half as many if a quantizer's scales are those of a whole
    batch (``shares_scales``). They depend only on that, on ``device``, "cuda" or "cpu", and the
    model's shape (``config``, transformers' as a dict): packs are the same wherever the model runs,
    however much memory is free there."""
    most = BATCH_TOKENS[device]
    if device == "cpu":
        return most
    halves = 2 if shares_scales else 1
    most, fits = most // halves, PACK_ELEMENTS // halves // hidden_size(config)
    return min(most, max(LEAST_BATCH_TOKENS, fits - fits % LEAST_BATCH_TOKENS))


def hidden_size(config: Mapping[str, Any]) -> int:
    """Return the width of the hidden states of ``config``, by any of transformers' names for it;
    ``UNKNOWN_HIDDEN_SIZE`` if it states none."""
    inner = config.get("text_config")
    levels = (config, inner) if isinstance(inner, Mapping) else (config,)
    widths = (level.get(n) for level in levels for n in ("hidden_size", "n_embd", "d_model"))
    return next((n for n in widths if isinstance(n, int) and n > 0), UNKNOWN_HIDDEN_SIZE)
