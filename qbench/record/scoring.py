"""How a cell's scores were made."""

from __future__ import annotations

from typing import Literal

from qbench.record.written import Written


class SampleDifference(Written):
    """Fast scores against exact ones on one task's sample, in nats per scored token: what a
    tolerance bounds. ``bias_per_token`` is the mean over documents with its sign, and
    ``bias_stderr`` its standard error (None of a single document)."""

    task: str
    documents: int
    requests: int
    mean_per_token: float
    largest_per_token: float
    changed_answers: int
    bias_per_token: float | None = None
    bias_stderr: float | None = None
    by_bias: bool = False  # judged by it: the quantizer amplifies rounding


class DifferenceFromExact(Written):
    """Fast scores against exact ones on all samples: nats of whole requests and per scored
    token."""

    documents: int
    requests: int
    largest: float
    mean: float
    largest_per_token: float
    mean_per_token: float
    changed_answers: int
    samples: tuple[SampleDifference, ...] = ()


class ScoringReport(Written):
    """``batch_size`` and ``window_batch_size`` count padded requests and rolling windows,
    ``batch_tokens`` the tokens of a pack without padding: one or the other is there."""

    mode: Literal["exact", "fast", "lm-eval"]
    softmax_dtype: str
    batching: str
    batch_size: int | None = None
    window_batch_size: int | None = None
    batch_tokens: int | None = None
    shuffle: int | None = None  # seed of an order other than longest first
    requests: int | None = None  # None where lm-eval counted nothing
    batches: int | None = None
    tokens: int | None = None  # computed, padding included
    truncated: int | None = None  # requests longer than the context
    halvings: int | None = None  # batches that did not fit and were halved
    fused_steps: bool | None = None
    peak_memory_gib: float
    difference_from_exact: DifferenceFromExact | None = None
