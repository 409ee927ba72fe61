"""What an analysis of one cell's model on a text gave, as it is written to disk. Imports no torch.

Formulas and their sources stand with the code that computes them, in ``qbench.analysis``. A share
is a number from 0 to 1. Every mean over texts weighs them alike: all have the same length.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from qbench.record.damage import Ratio
from qbench.record.precision import Precision
from qbench.record.record import SCHEMA_VERSION, Environment, Stage
from qbench.record.written import Digest, Line, Name, Written


class AnalyzedText(Written):
    """What the model read: ``samples`` texts of ``length`` tokens each, BOS counted."""

    source: str  # the file, or the task whose documents they are
    digest: str  # of the file's bytes, or of the planned task
    tokens: Digest  # SHA-256 of the token ids
    samples: int
    left_out: int  # texts before the last one taken that were too short
    length: int
    bos: bool


class Sinks(Written):
    """Attention on one key position of one head, or the mean of that over heads.

    ``attention``: mean weight on it. ``rates``: by threshold ε, the share of texts (and heads)
    whose mean weight on it exceeds ε. Both by two definitions: over all queries, and over the
    first ``GU_LENGTH`` tokens.
    """

    position: int  # of the key, from 0
    attention: float
    rates: dict[str, float]
    attention_gu: float
    rates_gu: dict[str, float]


class Delimiters(Written):
    """Attention on tokens that part sentences or lines, the first token left out.

    ``attention``: mean weight on all of them together. ``rates``: by threshold ε, the share of
    texts (and heads) that weigh one of them more than ε, in the mean over the queries that see it.
    """

    attention: float
    rates: dict[str, float]


class Head(Written):
    """One query head."""

    sinks: tuple[Sinks, ...]  # of the first positions, in order
    zeros: float  # share of weights that are exactly 0, of the pairs that attention allows
    mass: float  # mean over queries of Σ weights
    silent: float  # share of queries without any weight
    entropy: float | None  # nats, mean over queries with any weight; None where there is none
    output: float  # mean norm of its output, as a ratio to the mean of its layer's heads
    dormant: float  # share of texts on which that ratio is below DORMANT
    largest: float | None = None  # mean over queries of their largest weight
    delimiters: Delimiters | None = None


class Hidden(Written):
    """Hidden states after one decoder layer, or after all of them."""

    kurtosis: float  # of all values at once (the softpick paper)
    kurtosis_sequence: float  # Bondarenko et al. 2023
    kurtosis_token: float  # excess, OSP 2025
    minimum: float
    maximum: float
    median: float  # of |x|: the median over texts of each text's
    largest_to_median: float  # the largest over texts of max |x| / median |x|
    massive: int  # how many values are massive activations
    quantiles: dict[str, float] = Field(default_factory=dict)  # by level, of all values at once


class Layer(Written):
    """One decoder layer; ``heads`` is empty where it has no attention."""

    heads: tuple[Head, ...]
    hidden: Hidden


class MassiveActivation(Written):
    """One value of the hidden states that is far larger than the others (Sun et al. 2024)."""

    layer: int  # after which it stands, from 0
    sample: int
    position: int
    token: int  # id
    text: str  # what that token stands for
    channel: int
    value: float
    to_median: float  # |value| / median |x| of that layer's hidden states of that text


class LinearInput(Written):
    """What one linear layer receives. Errors are ‖Q(x) − x‖ / ‖x‖ over all tokens, by bits."""

    name: str
    largest: float  # |x|
    rms: float
    error_token: dict[str, float]  # one scale a token
    error_text: dict[str, float]  # one scale a text

    @property
    def largest_to_rms(self) -> float | None:
        return self.largest / self.rms if self.rms else None


class Stretch(Written):
    """A stretch of a text's positions, BOS being 0; means over texts, heads and queries there.

    ``loss`` is that of predicting the tokens at these positions, in nats, with its standard error
    over texts; None where there is none to predict, or one text only.
    """

    first: int
    last: int
    loss: float | None
    loss_stderr: float | None
    mass: float  # Σ weights
    largest: float  # a query's largest weight
    entropy: float | None  # nats


class AttentionMap(Written):
    """Weights of one head on one short text: ``rows[q][k]`` for keys k ≤ q, four digits each."""

    text: str  # what kind: prose, code, few-shot
    layer: int
    head: int
    tokens: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]


class Measured(Written):
    """All measurements of one pass over the text."""

    perplexity: float  # of tokens, each text by itself, BOS not predicted
    sinks: tuple[Sinks, ...]  # means over all heads of the model
    zeros: float
    mass: float
    entropy: float | None  # over heads that have one
    silent_heads: float  # share of (text, head) without any weight at all
    dormant_heads: float  # share of (text, head)
    hidden: Hidden  # all layers' hidden states together
    layers: tuple[Layer, ...]
    massive: tuple[MassiveActivation, ...]  # the largest first, at most MASSIVE_KEPT
    inputs: tuple[LinearInput, ...]
    inputs_left_out: tuple[str, ...] = ()  # linear layers that did not see every token once
    delimiters: Delimiters | None = None  # means over all heads of the model
    delimiter_tokens: float | None = None  # share of the tokens after the first that are such
    stretches: tuple[Stretch, ...] = ()
    maps: tuple[AttentionMap, ...] = ()


class Analysis(Written):
    """What one cell's analysis gave. ``key_parts`` is exactly what ``key`` is the hash of."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["analysis"] = "analysis"
    key: Digest
    key_parts: dict[str, Any]
    checkpoint: Name
    quantizer: Name
    method: Line
    title: Line
    precision: Precision
    normalizer: Line
    attention: Line
    status: Literal["ok", "failed"]
    error: str | None = None
    text: AnalyzedText | None = None  # None where it failed before the text was read
    measured: Measured | None = None
    stages: tuple[Stage, ...] = ()
    environment: Environment
    started: datetime
    finished: datetime

    @property
    def cell(self) -> str:
        """``<checkpoint>/<quantizer label>``."""
        return f"{self.checkpoint}/{self.quantizer}"


class UnitSensitivity(Written):
    """What quantizing one linear layer, or all of one decoder layer, does to the model.

    ``kl``: divergence of the unquantized from the changed model's next-token distribution, over
    the whole vocabulary, nats a token; ``ln_perplexity_ratio``: changed over unquantized. Both
    means over texts with their standard errors.
    """

    name: str
    layer: int | None  # decoder layer that it is in, from 0
    kl: Ratio
    ln_perplexity_ratio: Ratio


class Sensitivity(Written):
    """One checkpoint × one quantizer, a unit at a time. ``units`` grows while it is made: it is
    whole when ``status`` is ok. ``together``: all of them quantized at once."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["sensitivity"] = "sensitivity"
    key: Digest
    key_parts: dict[str, Any]
    checkpoint: Name
    quantizer: Name
    method: Line
    title: Line
    precision: Precision
    normalizer: Line
    unit: Literal["linear", "block"]
    status: Literal["ok", "unfinished", "failed"]
    error: str | None = None
    text: AnalyzedText | None = None
    perplexity: float | None = None  # of the unquantized model
    together: UnitSensitivity | None = None
    units: tuple[UnitSensitivity, ...] = ()
    stages: tuple[Stage, ...] = ()
    environment: Environment
    started: datetime
    finished: datetime

    @property
    def cell(self) -> str:
        """``<checkpoint>/<quantizer label>``."""
        return f"{self.checkpoint}/{self.quantizer}"


class AnalysisGridCell(Written):
    """Where an analysis belongs and which one is meant."""

    checkpoint: Name
    quantizer: Name
    key: Digest

    @property
    def cell(self) -> str:
        return f"{self.checkpoint}/{self.quantizer}"


class AnalysisGrid(Written):
    """The analyses that a results folder's last ``qbench analyze`` asks for, of all cells of the
    recipe, in its order; those that were never made have no record."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["analysis grid"] = "analysis grid"
    name: Line
    cells: tuple[AnalysisGridCell, ...] = Field(min_length=1)
    # Checkpoints that are trainings of one kind, as of a run's grid.
    replicates: dict[Name, tuple[Name, ...]] = Field(default_factory=dict)
