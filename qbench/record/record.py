"""What a cell gave, as it is written to disk. Imports no torch.

Beside each record lie two Parquet files, one row a fact, which every statistic is built on; the
record states their SHA-256, and its own file carries one of the record (see ``sealed``):

``outcomes``   task, document, metric, value, weight
    What lm-eval aggregates into a score. ``value`` is 0/1 for accuracies, the log-likelihood in
    nats for perplexities; ``weight`` is 1, or the words or bytes of the page where the
    aggregation divides by them (see ``Score.aggregation``).
``responses``  task, document, request, log_likelihood, greedy, answer, filter, cut
    Every scored continuation: ``request`` is its index among the document's requests,
    ``greedy`` whether it was the most likely one token by token. Of tasks that generate, every
    text: ``answer`` is what the model wrote, or, where ``filter`` names one of lm-eval's filters,
    what that took from it (no row where it took all); ``log_likelihood`` is NaN there. Of each
    text the first ``ANSWER_CHARACTERS`` are kept, and ``cut`` says how many more it had.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from qbench.record.audit import Audit
from qbench.record.damage import Damage, Unavailable
from qbench.record.environment import Environment
from qbench.record.precision import Precision
from qbench.record.scoring import ScoringReport
from qbench.record.training import Trained
from qbench.record.written import Digest, Line, Name, TaskName, Written

SCHEMA_VERSION = 2

OUTCOME_COLUMNS = ("task", "document", "metric", "value", "weight")
RESPONSE_COLUMNS = (
    "task", "document", "request", "log_likelihood", "greedy", "answer", "filter", "cut",
)  # fmt: skip
# of columns that records of earlier versions of qbench lack
RESPONSE_DEFAULTS = {"answer": None, "filter": None, "cut": 0}
ANSWER_CHARACTERS = 4096


class Score(Written):
    """One metric of one task.

    ``aggregation`` is lm-eval's name for how documents become the value: ``mean``,
    ``perplexity`` exp(−mean value), ``weighted_perplexity`` exp(−Σ value / Σ weight),
    ``bits_per_byte`` −Σ value / (Σ weight · ln 2), or another name, which statistics leave alone.
    """

    task: TaskName  # as the recipe calls it; the name in the Parquet files
    label: Line  # as tables show it, e.g. "sciq [validation]"
    metric: TaskName  # "acc", "acc_norm", "perplexity", "word_perplexity", …
    value: float
    stderr: float | None  # lm-eval's, in the units of value; None where it has none
    higher_is_better: bool
    aggregation: Line
    documents: int


class Stage(Written):
    """One step of a cell: what it cost."""

    name: Literal["load", "quantize", "audit", "evaluate", "analyze", "sensitivity"]
    seconds: float
    peak_memory_gib: float  # CUDA: of that device's allocator; CPU: resident set of the process
    detail: str = ""  # e.g. "artifact reused"


class StoredTable(Written):
    """A Parquet file beside a record, as it was written."""

    sha256: Digest
    bytes: int


class Record(Written):
    """What one cell gave. ``key_parts`` is exactly what ``key`` is the hash of.

    ``files`` is filled when the record is written (``Store.put``).
    """

    schema_version: int = SCHEMA_VERSION
    key: Digest
    key_parts: dict[str, Any]
    checkpoint: Name
    quantizer: Name  # label, unique in its recipe
    method: Line  # of quantization, e.g. "gptq"; "none" for unquantized cells
    title: Line  # the method as tables write it, e.g. "GPTQ"
    precision: Precision
    normalizer: Line
    training: Trained | None = None  # None where the checkpoint does not say
    attention: Line  # what ran, e.g. "softpick/triton" or "softpick/reference"
    status: Literal["ok", "failed"]
    error: str | None = None
    scores: tuple[Score, ...] = ()
    # by task: SHA-256 over the definition and the documents that were scored, the same whether
    # they came from the hub or from files, so that results of both can be compared
    documents: dict[TaskName, str] = Field(default_factory=dict)
    audit: Audit | None = None
    scoring: ScoringReport | None = None  # None where scoring did not begin
    damage: Annotated[Damage | Unavailable, Field(discriminator="status")] | None = None
    files: dict[Literal["outcomes", "responses"], StoredTable] = Field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    environment: Environment
    started: datetime
    finished: datetime

    @property
    def cell(self) -> str:
        """``<checkpoint>/<quantizer label>``."""
        return f"{self.checkpoint}/{self.quantizer}"

    @property
    def quantized(self) -> bool:
        return self.precision.quantized


class GridCell(Written):
    """One cell of the last run: its place in the grid and the record that it asks for."""

    checkpoint: Name
    quantizer: Name
    method: Line
    title: Line
    precision: Precision
    key: Digest

    @property
    def cell(self) -> str:
        return f"{self.checkpoint}/{self.quantizer}"

    @property
    def quantized(self) -> bool:
        return self.precision.quantized

    @property
    def bits(self) -> float | None:
        """Of a stored weight, nominal; None where weights are not quantized."""
        return self.precision.weights.bits if self.precision.weights else None


class Grid(Written):
    """What a results folder is of: ``grid.json``, written at the start of each run.

    ``checkpoints`` and ``quantizers`` are in the recipe's order; the first checkpoint is the
    baseline of Δ. A cell without a record is missing, and is shown as such.
    """

    schema_version: int = SCHEMA_VERSION
    name: Line
    checkpoints: Annotated[tuple[Name, ...], Field(min_length=1)]
    quantizers: Annotated[tuple[Name, ...], Field(min_length=1)]
    tasks: Annotated[tuple[TaskName, ...], Field(min_length=1)]
    skipped: tuple[TaskName, ...] = ()  # tasks of the recipe whose data were missing
    limit: int | None = None  # documents of each task that were asked for; None: all
    cells: Annotated[tuple[GridCell, ...], Field(min_length=1)]
    # several trainings of one kind: a group's name → its checkpoints
    replicates: dict[Name, tuple[Name, ...]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _cells_are_of_the_grid(self) -> Self:
        names = [cell.cell for cell in self.cells]
        for cell in self.cells:
            if cell.checkpoint not in self.checkpoints or cell.quantizer not in self.quantizers:
                raise ValueError(f"cell {cell.cell} is not of these checkpoints and quantizers")
            if names.count(cell.cell) > 1:
                raise ValueError(f"cell {cell.cell} stands there twice")
        members = [member for group in self.replicates.values() for member in group]
        if not set(members) <= set(self.checkpoints) or len(set(members)) < len(members):
            raise ValueError("replicates: each is one of the grid's checkpoints, in one group")
        return self
