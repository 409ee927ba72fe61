"""What quantization changed, against the unquantized cell of the same checkpoint."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qbench.record.written import Written


class Ratio(Written):
    """Σ values / Σ weights over documents, with its standard error; None without documents."""

    value: float | None
    stderr: float | None
    documents: int


class Divergence(Written):
    """KL divergence of next-token distributions over the whole vocabulary, in nats a token."""

    mean: float
    median: float
    p90: float
    p99: float
    p99_9: float
    largest: float


class Distributions(Written):
    """Over every scored token. ``target_change``: of the scored token's log-probability."""

    tokens: int
    kl: Divergence
    top1_agreement: float
    target_change: Ratio


class Flips(Written):
    """Documents whose answer quantization changed, of one 0/1 metric."""

    documents: int
    right_to_wrong: int
    wrong_to_right: int


class TaskDamage(Written):
    """One task. ``correct_answer``: change of the right answer's log-likelihood, in nats."""

    distributions: Distributions | None = None
    flips: dict[str, Flips] = Field(default_factory=dict)
    correct_answer: Ratio | None = None
    ln_perplexity_ratio: dict[str, Ratio] = Field(default_factory=dict)


class Damage(Written):
    """By task."""

    status: Literal["measured"] = "measured"
    tasks: dict[str, TaskDamage]


class Unavailable(Written):
    """Damage was asked for and could not be had. ``retry``: a later run may have it, since what
    is missing is only the unquantized cell's distributions."""

    status: Literal["unavailable"] = "unavailable"
    reason: str
    retry: bool = False
