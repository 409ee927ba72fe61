"""Define the records that qbench writes, and read and write them as JSON with a checksum.
docs/records.md explains them. Imports no torch.

A results folder may come from another person: names that become paths, and texts that are shown in
one line, are checked against patterns when they are read. Beside each record lie Parquet files:
``outcomes``, from which every statistic is computed, ``responses`` and ``divergences``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from qbench.errors import DamagedError, NewerSchemaError, validation_line
from qbench.files import NAME, content_key, write_atomically

Name = Annotated[str, Field(pattern=f"^{NAME}$")]
DIGEST = "^[0-9a-f]{64}$"
Digest = Annotated[str, Field(pattern=DIGEST)]  # SHA-256
_CONTROL = r"\x00-\x1f\x7f-\x9f\u2028\u2029"
LINE, TASK = f"^[^{_CONTROL}]*$", rf"^[^{_CONTROL}/\\]+$"
Line = Annotated[str, Field(pattern=LINE, max_length=1000)]  # without line breaks
TaskName = Annotated[str, Field(pattern=TASK, max_length=200)]


class RecordModel(BaseModel):
    """Base of all records: immutable; infinite numbers can be written. Unknown fields, which
    earlier versions wrote, are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


SCHEMA_VERSION = 2


class Environment(RecordModel):
    """The machine and the versions that made a record."""

    python: str
    platform: str
    device: str  # "cpu" or "cuda"
    hardware: str  # name of the processor or GPU
    versions: dict[str, str]  # distribution name → version
    git_revision: str | None
    qbench: str
    # files with their SHA-256, packages with their version
    plugins: dict[str, str] = Field(default_factory=dict)


# What of a model is quantized, and to how many bits.

UNQUANTIZED_BITS = 16


class Part(RecordModel):
    """The format of weights, activations or KV cache.

    ``bits`` per code, without scales and zeros; ``scheme`` describes the rest, such as ``int4 in
    groups of 128`` or ``int8 per token``. ``simulated``: values are rounded to the format and
    computed with in a wider one; None if it is not known.
    """

    bits: float = Field(gt=0, le=32)
    scheme: str
    simulated: bool | None = None


class Precision(RecordModel):
    """The precision of a cell by part; None: not quantized."""

    weights: Part | None = None
    activations: Part | None = None
    kv_cache: Part | None = None

    @property
    def quantized(self) -> bool:
        """Return whether weights, activations or the KV cache are quantized."""
        return not (self.weights is self.activations is self.kv_cache is None)

    @property
    def in_parts(self) -> bool:
        """Return whether activations or the KV cache have a format of their own. LLM.int8's
        activations belong to its weights."""
        activations = self.activations is not None and self.activations.simulated is not None
        return activations or self.kv_cache is not None

    @property
    def words(self) -> str:
        """Return the name, and whether products with quantized activations were simulated: ``W4A8,
        simulated`` or ``W8A8, real``; the name alone if that is not known."""
        simulated = self.activations.simulated if self.activations else None
        return self.name + {None: "", True: ", simulated", False: ", real"}[simulated]

    @property
    def name(self) -> str:
        """Return the short name, such as ``W4A8KV4``; ``W16A16`` if nothing is quantized."""
        weights, activations = (
            f"{part.bits if part else UNQUANTIZED_BITS:g}"
            for part in (self.weights, self.activations)
        )
        kv_cache = f"KV{self.kv_cache.bits:g}" if self.kv_cache else ""
        return f"W{weights}A{activations}{kv_cache}"


# --- audit: proof that a cell was quantized as it says


class ModuleAudit(RecordModel):
    """One quantized module, measured on the weights that scoring used."""

    name: str
    kind: str  # class of the module that ran, e.g. "Linear4bit"
    parameters: int  # weights of the original module, bias left out
    bits_per_weight: float  # stored, scales and zeros counted
    weight_error: float  # ‖W' − W‖ / ‖W‖ against the unquantized weights, Frobenius
    gain: float | None = None  # ⟨W', W⟩ / ⟨W, W⟩: about 1; 1.03 if all scales are 3 % too large
    levels: int  # most distinct values in one group of one row
    dead_inputs: int = 0  # columns of zeros: GPTQ zeroes inputs that calibration never uses
    digest: str = ""  # SHA-256 of its stored tensors; "" if it is not known


class _InputsAudit(RecordModel):
    levels: int  # most distinct values under one scale
    clipped: float  # share of values beyond the largest that their scale allows
    error: float  # ‖x' − x‖ / ‖x‖, Frobenius; infinite if not finite


class InputAudit(_InputsAudit):
    """The quantized input of one module, measured on a probe text."""

    name: str


class ActivationAudit(_InputsAudit):
    """The quantized inputs of all modules together."""

    bits: float
    left_out: tuple[str, ...] = ()  # layers whose inputs stay unquantized
    unmeasured: tuple[str, ...] = ()  # modules that the probe text never reached
    modules: tuple[InputAudit, ...] = ()


class BatchDependence(RecordModel):
    """The largest change of a logit by later tokens or by other rows of the batch. ``declared``:
    the settings say that they may change it."""

    moved: float  # largest |difference| of a logit
    tolerance: float  # what rounding may move: from the unquantized model and from a repetition
    declared: bool


class _KVErrors(RecordModel):
    levels: int  # most distinct values that share a scale
    key_error: float  # ‖K' − K‖ / ‖K‖ over the quantized tokens of the probe, Frobenius
    value_error: float
    clipped: float  # share of values farther than half a step from their rounded value
    bits_per_value: float  # of a quantized token, its share of scales and lowest values counted


class KVModuleAudit(_KVErrors):
    """The KV cache of one attention module, measured on the keys and values that attention read."""

    name: str


class KVAudit(_KVErrors):
    """The KV cache of all modules together. Memory is that of one sequence of ``tokens`` tokens;
    tokens that stay unquantized are counted with 16 bits per value."""

    tokens: int  # the context that the checkpoint states
    bytes_per_token: float
    unquantized_bytes_per_token: float
    modules: tuple[KVModuleAudit, ...] = ()


GIB = 8 * 2**30  # bits


class StoredSize(RecordModel):
    """The stored size of a cell's weights, by one convention for all formats. ``bits_per_weight``
    is over all matrices outside embeddings and LM head, with scales, zeros and codebooks;
    ``head_bits_per_weight`` is None if the head is tied; ``gib`` is of all weights."""

    bits_per_weight: float
    head_bits_per_weight: float | None
    gib: float


class Audit(RecordModel):
    """The measurements of a cell's quantized model; ``problems`` says why it did not pass."""

    passed: bool
    bits: float | None  # nominal; None for unquantized cells
    coverage: float  # quantized weights / weights of all matrices but embeddings and LM head
    bits_per_weight: float  # mean over quantized modules, weighted by parameters
    weight_error: float  # ‖W' − W‖ / ‖W‖ over all quantized modules; infinite if not finite
    levels: int  # most distinct values in one group, over all modules
    logits_moved: float  # largest |difference| from the unquantized model on a probe text
    left_out: tuple[str, ...] = ()  # weight matrices that were not quantized
    left_out_because: dict[str, str] = {}
    problems: tuple[str, ...] = ()  # one line each
    modules: tuple[ModuleAudit, ...] = ()
    activations: ActivationAudit | None = None  # None if they are not quantized
    causality: BatchDependence | None = None  # the last token was changed, earlier logits watched
    batch_mates: BatchDependence | None = None  # the rest of a batch was changed
    digest: str = ""  # SHA-256 over the names and digests of all modules; "" if unquantized
    # Relative change of the unquantized model's logits by the transform, which should be rounding
    treatment_error: float | None = None
    kv_cache: KVAudit | None = None  # None if it is not quantized
    size: StoredSize | None = None  # None in records of earlier versions
    # layers whose weights are the original's up to a factor per row and column (AWQ, SmoothQuant)
    rescaled: int = 0


# --- how a cell's scores were made


class SampleDifference(RecordModel):
    """Fast minus exact scores on one task's sample, in nats per scored token.

    ``bias_per_token`` is the signed mean over documents, ``bias_stderr`` its standard error (None
    for a single document). ``population`` is the number of documents that the sample was drawn from
    (None in earlier records).
    """

    task: str
    documents: int
    population: int | None = None
    requests: int
    mean_per_token: float
    largest_per_token: float
    changed_answers: int
    bias_per_token: float | None = None
    bias_stderr: float | None = None
    by_bias: bool = False  # judged by it: the quantizer amplifies rounding


class DifferenceFromExact(RecordModel):
    """Fast minus exact scores on all samples, in nats per request and per scored token."""

    documents: int
    requests: int
    largest: float
    mean: float
    largest_per_token: float
    mean_per_token: float
    changed_answers: int
    samples: tuple[SampleDifference, ...] = ()


class ScoringReport(RecordModel):
    """How a cell was scored. Padded batches have ``batch_size`` and ``window_batch_size`` (requests
    and rolling windows), packs without padding ``batch_tokens``."""

    mode: Literal["exact", "fast", "lm-eval"]
    softmax_dtype: str
    batching: str
    batch_size: int | None = None
    window_batch_size: int | None = None
    batch_tokens: int | None = None
    requests: int | None = None  # None if lm-eval counted nothing
    batches: int | None = None
    tokens: int | None = None  # of the batches, padding included
    truncated: int | None = None  # requests longer than the context
    truncated_shares: dict[str, float] = Field(default_factory=dict)  # of a task's requests, if any
    graph_error: str | None = None  # why a step of decoding was not captured as a CUDA graph
    bos: bool | None = None  # whether texts began with BOS; None in earlier records
    doubled_bos: tuple[str, ...] = ()  # rolling tasks whose texts began with two, as in lm-eval
    halvings: int | None = None  # batches that did not fit and were halved
    peak_memory_gib: float
    difference_from_exact: DifferenceFromExact | None = None
    # tasks that were scored exactly all the same, and why not fast
    exact_tasks: dict[str, str] = Field(default_factory=dict)
    # tasks whose answers transformers' generate gave, through lm-eval, and why not batched decoding
    transformers_generation: dict[str, str] = Field(default_factory=dict)


# --- damage: what quantization changed, against the unquantized cell of the same checkpoint


class Ratio(RecordModel):
    """Σ values / Σ weights over documents, and its standard error; None without documents."""

    value: float | None
    stderr: float | None
    documents: int


@dataclass(frozen=True, slots=True)
class Question:
    """What one document asks: the texts of each request (context and continuation), and the right
    answer as the index of a choice or a text; None if the task has none."""

    texts: tuple[tuple[str, ...], ...]
    target: int | str | None


class Divergence(RecordModel):
    """KL divergence of next-token distributions over the whole vocabulary, in nats per
    token. ``mean_stderr`` is over documents; None for one document, and in earlier records."""

    mean: float
    mean_stderr: float | None = None
    median: float
    p90: float
    p99: float
    p99_9: float
    largest: float


class Distributions(RecordModel):
    """Changes over every scored token."""

    tokens: int
    kl: Divergence
    top1_agreement: float


class Flips(RecordModel):
    """How many documents have another value of one 0/1 metric than in the unquantized cell."""

    documents: int
    right_to_wrong: int
    wrong_to_right: int


class TaskDamage(RecordModel):
    """What quantization changed in one task. ``flips`` by metric: empty in records, computed from
    the outcomes of both cells."""

    distributions: Distributions | None = None
    flips: dict[str, Flips] = Field(default_factory=dict)


class Damage(RecordModel):
    """What quantization changed, by task."""

    status: Literal["measured"] = "measured"
    tasks: dict[str, TaskDamage]


class Unavailable(RecordModel):
    """Why damage could not be measured. ``retry``: only the unquantized cell's distributions are
    missing, so a later run may measure it."""

    status: Literal["unavailable"] = "unavailable"
    reason: str
    retry: bool = False


# --- training: how a checkpoint was trained, as it is written beside its weights

TRAINING_FILE = "training.json"


class TrainingSession(RecordModel):
    """One session of a training, from its start or resumption to its end."""

    first_step: int
    last_step: int
    seconds: float
    processes: int  # GPUs, one each
    code: Digest  # of qbench's own modules that a training runs
    environment: Environment


class TrainingSample(RecordModel):
    """One evaluation on the held-out texts."""

    step: int
    loss: float  # nats per token
    sink_rate: float  # share of (text, head) whose mean weight on the first token exceeds 0.3
    sink_rate_gu: float  # the same by Gu et al. 2024
    kurtosis: float
    largest: float  # |x| of the hidden states


class Trained(RecordModel):
    """The summary of a checkpoint's training in its cells' records."""

    recipe: Name
    normalizer: Line
    seed: int
    attention: Line
    in_common: dict[str, Any]  # what the runs of a pair must have in common, by part


class TrainedOn(RecordModel):
    """The description of the token files."""

    digest: Digest
    tokens: int
    documents: int
    tokenizer: Line
    sources: tuple[Line, ...]
    licences: Line = ""


class Training(RecordModel, populate_by_name=True):
    """One training. Those of a pair have the same ``in_common``: only their normalizers differ."""

    schema_version: Literal[1] = 1
    kind: Literal["training"] = "training"
    name: Name  # of the recipe
    normalizer: Line
    seed: Annotated[int, Field(ge=0)]
    settings: dict[str, Any]  # all that shapes a run but its normalizer and seed
    settings_digest: Digest  # of these, the data, the normalizer and the seed
    data: TrainedOn
    attention: Line  # what attends, e.g. "softpick/triton"
    kernels: tuple[Line, ...]  # of attention, as a profile of one step named them
    compiled: Line  # torch.compile's mode, or "no"
    parameters: int
    steps: int
    tokens: int  # seen
    final_loss: float | None  # mean training loss of the last logged steps, nats per token
    best_step: int | None
    best_loss: float | None  # on the held-out texts
    watched: tuple[TrainingSample, ...] = ()
    sessions: tuple[TrainingSession, ...] = ()
    # SHA-256 of the checkpoint's files and of state/log.jsonl, by path below the run's folder;
    # earlier versions kept only those of the weights
    files: dict[str, Digest] = Field({}, validation_alias=AliasChoices("files", "weights"))
    finished: datetime

    @property
    def summary(self) -> Trained:
        """Return the part of the record that cells of the checkpoint keep."""
        return Trained(
            recipe=self.name,
            normalizer=self.normalizer,
            seed=self.seed,
            attention=self.attention,
            in_common=self.in_common,
        )

    @property
    def in_common(self) -> dict[str, Any]:
        """Return, by part, the settings and data that trainings of a pair must share."""
        return {
            **{f"settings.{part}": value for part, value in self.settings.items()},
            "seed": self.seed,
            "data": self.data.digest,
            "steps": self.steps,
            "code": sorted({session.code for session in self.sessions}),
            "processes": sorted({session.processes for session in self.sessions}),
            "hardware": sorted({session.environment.hardware for session in self.sessions}),
            "torch": sorted(
                {session.environment.versions.get("torch", "") for session in self.sessions}
            ),
        }


# --- the record and the grid

OUTCOME_COLUMNS = ("task", "document", "metric", "value", "weight")
RESPONSE_COLUMNS = (
    "task", "document", "request", "log_likelihood", "greedy", "answer", "filter", "cut",
)  # fmt: skip
DIVERGENCE_COLUMNS = ("task", "document", "request", "tokens", "text", "kl", "change")
ANSWERS = "answers"  # the task of the model's own answers, and the table of their tokens
ANSWER_COLUMNS = (
    "document", "sample", "position", "text", "kl", "change", "margin", "agrees",
)  # fmt: skip
PROMPT = -1  # position of the row that holds the prompt
TableName = Literal["outcomes", "responses", "divergences", "answers"]
TOKENS_KEPT = 32768
ANSWER_CHARACTERS = 4096


class _Value(RecordModel):
    label: Line  # as tables show it, e.g. "sciq [validation]"
    metric: TaskName  # "acc", "acc_norm", "perplexity", "word_perplexity", …
    value: float
    stderr: float | None  # lm-eval's, in the units of value; None if it, or a task, has none
    higher_is_better: bool
    documents: int


class Score(_Value):
    """One metric of one task.

    ``aggregation`` is lm-eval's name for how documents become the value: ``mean``, ``perplexity``
    exp(−mean value), ``weighted_perplexity`` exp(−Σ value / Σ weight), or ``bits_per_byte`` −Σ
    value / (Σ weight · ln 2). ``f1`` and ``matthews_corrcoef`` are of all documents at once.
    Scores with other names get no statistics.
    """

    task: TaskName  # as the recipe calls it; the name in the Parquet files
    aggregation: Line


class GroupScore(_Value):
    """One metric of a group of tasks, such as mmlu: the mean of its tasks' values, as lm-eval
    weights them. Its documents' outcomes are those of ``tasks``."""

    group: TaskName
    weight_by_size: bool  # by their documents; else each task counts alike
    tasks: tuple[TaskName, ...]

    @property
    def task(self) -> str:
        """Return the group's name."""
        return self.group


class Stage(RecordModel):
    """One step of a cell: what it cost."""

    name: Literal["make", "load", "quantize", "audit", "wait", "evaluate", "analyze", "sensitivity"]
    seconds: float
    peak_memory_gib: float  # CUDA: of that device's allocator; CPU: resident set of the process
    detail: str = ""  # e.g. "artifact reused"


class StoredTable(RecordModel):
    """A Parquet file beside a record, as it was written."""

    sha256: Digest
    bytes: int


class CellKey(RecordModel):
    """Names a cell by its checkpoint and its quantizer's label, and holds its content key."""

    checkpoint: Name
    quantizer: Name  # label, unique in its recipe
    key: Digest

    @property
    def cell(self) -> str:
        """Return ``<checkpoint>/<quantizer label>``."""
        return f"{self.checkpoint}/{self.quantizer}"


class GridCell(CellKey):
    """One cell of a run: its checkpoint and quantizer, and the key of its record."""

    method: Line  # of quantization, e.g. "gptq"; "none" for unquantized cells
    title: Line  # the method as tables write it, e.g. "GPTQ"
    precision: Precision

    @property
    def quantized(self) -> bool:
        """Return whether any part of the model is quantized."""
        return self.precision.quantized


class CellRecord(GridCell):
    """The fields of every record of a cell. ``key`` is the hash of ``key_parts``."""

    schema_version: int = SCHEMA_VERSION
    key_parts: dict[str, Any]
    normalizer: Line
    error: str | None = None
    bad_input: bool = False  # its checkpoint cannot be loaded, so another run would fail too
    stages: tuple[Stage, ...] = ()
    environment: Environment
    started: datetime
    finished: datetime


class Record(CellRecord):
    """The result of one cell. ``files`` is filled when the record is written (``Store.put``)."""

    training: Trained | None = None  # None if the checkpoint does not say
    attention: Line  # what ran, e.g. "softpick/triton" or "softpick/reference"
    status: Literal["ok", "failed"]
    scores: tuple[Score, ...] = ()
    groups: tuple[GroupScore, ...] = ()  # of groups whose tasks were all scored
    failed_tasks: dict[TaskName, str] = Field(default_factory=dict)  # could not be scored, and why
    # by task: SHA-256 over the definition and the documents that were scored, the same whether
    # they came from the hub or from files, so that results of both can be compared
    documents: dict[TaskName, str] = Field(default_factory=dict)
    # hub id with its revision, or folder, of the model and of the tasks' documents, and how many
    # documents per task were requested (None: all); not in earlier versions
    source: Line | None = None
    data: Line | None = None
    limit: int | None = None
    audit: Audit | None = None
    scoring: ScoringReport | None = None  # None if scoring did not begin
    damage: Annotated[Damage | Unavailable, Field(discriminator="status")] | None = None
    files: dict[TableName, StoredTable] = Field(default_factory=dict)

    @property
    def pooled_groups(self) -> tuple[GroupScore, ...]:
        """Return the groups whose score is the mean over all documents of their tasks, as mmlu."""
        means = {(score.task, score.metric) for score in self.scores if score.aggregation == "mean"}
        return tuple(
            score
            for score in self.groups
            if score.weight_by_size and all((task, score.metric) in means for task in score.tasks)
        )

    def by_name(self) -> dict[tuple[str, str], Score]:
        """Return scores by (task, metric), those of ``pooled_groups`` by (group, metric)."""
        of_groups = (
            Score(
                task=score.group,
                aggregation="mean",
                **{name: getattr(score, name) for name in _Value.model_fields},
            )
            for score in self.pooled_groups
        )
        return {(score.task, score.metric): score for score in (*self.scores, *of_groups)}


class TaskRecord(CellKey):
    """The result of one task of a cell, kept in the cache so that no later run scores it again.
    ``key`` is that of the cell with only this task (``store.task_key``); ``digest`` is the task's
    in ``Record.documents``."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["task"] = "task"
    task: TaskName
    digest: str
    scores: tuple[Score, ...]
    scoring: ScoringReport
    damage: TaskDamage | None = None  # None if it was not measured
    seconds: float
    files: dict[TableName, StoredTable] = Field(default_factory=dict)


class RunManifest(RecordModel):
    """The cells of a run: ``grid.json``, written at its start. ``checkpoints`` and ``quantizers``
    are in the recipe's order; the first checkpoint is the baseline of Δ. Cells may lack records."""

    schema_version: int = SCHEMA_VERSION
    name: Line
    checkpoints: Annotated[tuple[Name, ...], Field(min_length=1)]
    quantizers: Annotated[tuple[Name, ...], Field(min_length=1)]
    tasks: Annotated[tuple[TaskName, ...], Field(min_length=1)]
    skipped: tuple[TaskName, ...] = ()  # tasks of the recipe whose data were missing
    limit: int | None = None  # documents per task that were requested; None: all
    primary: Line | None = None  # TASK/METRIC that the verdict orders by; None: KL divergence
    hub_ids: dict[Name, Line] = Field(default_factory=dict)  # of checkpoints that came from the hub
    # checkpoint → hub id with its revision, or folder; empty in earlier versions, as ``data`` is
    sources: dict[Name, Line] = Field(default_factory=dict)
    data: Line | None = None  # the folder of tasks' documents, or "the hub"
    cells: Annotated[tuple[GridCell, ...], Field(min_length=1)]
    # several trainings of one kind: a group's name → its checkpoints
    replicates: dict[Name, tuple[Name, ...]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _cells_are_of_the_grid(self) -> Self:
        """Refuse cells that are listed twice, or of other checkpoints or quantizers."""
        names = [cell.cell for cell in self.cells]
        for cell in self.cells:
            if cell.checkpoint not in self.checkpoints or cell.quantizer not in self.quantizers:
                raise ValueError(f"cell {cell.cell}: the grid lacks its checkpoint or quantizer")
            if names.count(cell.cell) > 1:
                raise ValueError(f"cell {cell.cell} is listed twice")
        members = [member for group in self.replicates.values() for member in group]
        if not set(members) <= set(self.checkpoints) or len(set(members)) < len(members):
            raise ValueError("replicates: each must be a checkpoint of the manifest, in one group")
        return self


KEY_DIGITS = 16  # of keys and checksums in names


# --- analysis: measurements of a cell's model on a text. Formulas and their sources are in the code
# that computes them, in ``qbench.analysis``. A share is a number from 0 to 1. Every mean over texts
# weighs them alike: all have the same length.


class AnalyzedText(RecordModel):
    """The text of an analysis: ``samples`` texts of ``length`` tokens each, BOS included."""

    source: str  # the file, or the task whose documents they are
    digest: str  # of the file's bytes, or of the planned task
    tokens: Digest  # SHA-256 of the token ids
    samples: int
    left_out: int  # texts before the last one taken that were too short
    length: int
    bos: bool


class Sinks(RecordModel):
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


class Head(RecordModel):
    """One query head."""

    sinks: tuple[Sinks, ...]  # of the first positions, in order
    zeros: float  # share of weights that are exactly 0, of the pairs that attention allows
    mass: float  # mean over queries of Σ weights
    silent: float  # share of queries without any weight
    entropy: float | None  # nats, mean over queries with any weight; None if there is none
    output: float  # mean norm of its output, as a ratio to the mean of its layer's heads
    dormant: float  # share of texts on which that ratio is below DORMANT
    largest: float | None = None  # mean over queries of their largest weight


class Hidden(RecordModel):
    """Hidden states after one decoder layer, or after all of them."""

    kurtosis: float  # of all values at once (the softpick paper)
    minimum: float
    maximum: float
    median: float  # of |x|: the median over texts of each text's
    largest_to_median: float  # the largest over texts of max |x| / median |x|
    massive: int  # how many values are massive activations
    quantiles: dict[str, float] = Field(default_factory=dict)  # by level, of all values at once


class Layer(RecordModel):
    """One decoder layer; ``heads`` is empty if it has no attention."""

    heads: tuple[Head, ...]
    hidden: Hidden


class MassiveActivation(RecordModel):
    """One value of the hidden states that is far larger than the others (Sun et al. 2024)."""

    layer: int  # index, from 0, of the layer whose output has it
    sample: int
    position: int
    token: int  # id
    text: str  # of that token
    channel: int
    value: float
    to_median: float  # |value| / median |x| of that layer's hidden states of that text


class LinearInput(RecordModel):
    """The input of one linear layer."""

    name: str
    largest: float  # |x|
    rms: float


class PositionBin(RecordModel):
    """A range of positions in the texts, BOS being 0; means over its queries, texts and heads.
    ``loss`` is that of predicting the tokens at these positions, in nats, with its standard error
    over texts; None if there is no token to predict, or one text only."""

    first: int
    last: int
    loss: float | None
    loss_stderr: float | None
    mass: float  # Σ weights
    largest: float  # a query's largest weight
    entropy: float | None  # nats


class AttentionMap(RecordModel):
    """The attention weights of one head on one short text: ``rows[q][k]`` for keys k ≤ q."""

    text: str  # prose, code or few-shot
    layer: int
    head: int
    tokens: tuple[str, ...]
    rows: tuple[tuple[float, ...], ...]


class Measured(RecordModel):
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
    stretches: tuple[PositionBin, ...] = ()
    maps: tuple[AttentionMap, ...] = ()


class Analysis(CellRecord):
    """The analysis of one cell."""

    kind: Literal["analysis"] = "analysis"
    attention: Line
    status: Literal["ok", "failed"]
    text: AnalyzedText | None = None  # None if it failed before the text was read
    measured: Measured | None = None


class UnitSensitivity(RecordModel):
    """The change of predictions if one linear layer, or one decoder layer, is quantized.

    ``kl``: divergence of the unquantized from the changed model's next-token distribution, over
    the whole vocabulary, nats per token; ``ln_perplexity_ratio``: changed over unquantized. Both
    means over texts with their standard errors.
    """

    name: str
    layer: int | None  # decoder layer that it is in, from 0
    kl: Ratio
    ln_perplexity_ratio: Ratio


class Sensitivity(CellRecord):
    """The sensitivity of each unit of one checkpoint to one quantizer. ``units`` grows while it is
    measured and is complete if ``status`` is ok. ``together``: all units quantized at once."""

    kind: Literal["sensitivity"] = "sensitivity"
    unit: Literal["linear", "block"]
    status: Literal["ok", "unfinished", "failed"]
    text: AnalyzedText | None = None
    perplexity: float | None = None  # of the unquantized model
    together: UnitSensitivity | None = None
    units: tuple[UnitSensitivity, ...] = ()


class AnalysisManifest(RecordModel):
    """The cells of the last ``qbench analyze``, in the recipe's order; a cell that was not analyzed
    has no record."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["analysis grid"] = "analysis grid"
    name: Line
    cells: tuple[CellKey, ...] = Field(min_length=1)
    # Checkpoints that are trainings of one kind, as of a run's grid.
    replicates: dict[Name, tuple[Name, ...]] = Field(default_factory=dict)


# --- a record as a file: JSON with its own checksum

CHECKSUM = "checksum"
RUN_AGAIN = "run the recipe again"  # the remedy that messages name

T = TypeVar("T", bound=RecordModel)


def read_record(
    path: Path, kind: type[T], remedy: str = RUN_AGAIN, payload: bytes | None = None
) -> T:
    """Return the record of type ``kind`` in the file ``path``, or whose JSON text is ``payload``.
    Raises OSError if there is no such file.

    ``path`` and ``remedy`` begin and end the message of an error. Raises DamagedError if the
    checksum or fields are wrong or an older qbench wrote it, NewerSchemaError for a newer one.
    """
    try:
        values = json.loads(path.read_bytes() if payload is None else payload)
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        version = values.get("schema_version")
        if type(version) is not int:
            raise ValueError("it has no schema_version")
        writer = f"qbench (schema {version}, this one reads {SCHEMA_VERSION})"
        if version > SCHEMA_VERSION:
            raise NewerSchemaError(f"{path}: written by a newer {writer}: update qbench")
        if version < SCHEMA_VERSION:
            raise DamagedError(f"{path}: written by an older {writer}: {remedy}")
        require_checksum(values)
        return kind.model_validate(values)
    except ValidationError as error:
        why = validation_line(error)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        why = "not whole JSON"
    except ValueError as error:
        why = str(error)
    raise DamagedError(f"{path}: damaged: {why}; {remedy}")


def require_checksum(values: dict[str, Any]) -> None:
    """Compare the checksum in ``values``, a record as a dict, with the other values, and remove it.
    Raises ValueError if it is missing or does not match."""
    checksum = values.pop(CHECKSUM, None)
    if checksum is None:
        raise ValueError("it has no checksum")
    if checksum != content_key(values):
        raise ValueError("its content does not match its checksum")


def read_training(path: Path) -> Training:
    """Return the record of a training in the file ``path``; earlier versions wrote it without
    checksum. Raises ValueError for another file, DamagedError if it was changed afterwards."""
    values = json.loads(path.read_bytes())
    if isinstance(values, dict) and CHECKSUM in values:
        try:
            require_checksum(values)
        except ValueError:
            raise DamagedError(f"{path}: changed after training") from None
    return Training.model_validate(values)


def write_record(path: Path, record: RecordModel | dict[str, Any]) -> None:
    """Write ``record``, or its values, to ``path`` in one step: JSON with one key per line, and as
    the last the checksum, the SHA-256 of the others' canonical JSON."""
    values = record if isinstance(record, dict) else json.loads(record.model_dump_json())
    values = {**values, CHECKSUM: content_key(values)}
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}"
        for key, value in values.items()
    ]
    write_atomically(path, ("{" + ",\n".join(lines) + "}\n").encode(errors="surrogatepass"))
