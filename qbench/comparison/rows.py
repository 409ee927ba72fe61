"""Hold a comparison: one row per score and precision, what is missing of the cells,
which parts of their keys and of their trainings differ."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qbench.errors import ResultsError
from qbench.metrics import REDUNDANT, is_percentage, kind_of
from qbench.records import (
    Damage,
    Flips,
    GridCell,
    Precision,
    Record,
    RunManifest,
    TaskDamage,
    Trained,
    Unavailable,
    read_record,
)
from qbench.store import Store
from qbench.text import one_line

if TYPE_CHECKING:
    from qbench.comparison.answers import AnswerDamage
    from qbench.statistics import Effect, Interval, Missing


ABSENT = "(absent)"


def key_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (name, value in a, value in b) for each part of two keys that differs, in the order
    of the key; an empty list if the keys are equal."""
    left, right = (dict(flat(parts)) for parts in (a, b))
    parts = dict.fromkeys([*left, *right])
    values = [(part, left.get(part, ABSENT), right.get(part, ABSENT)) for part in parts]
    return [(part, in_a, in_b) for part, in_a, in_b in values if in_a != in_b]


FILES = {
    "weights": "other weights",
    "config": "another config.json",
    "tokenizer": "another tokenizer",
}


def changed_files(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return in words which of weights, configuration and tokenizer differ; older records have one
    digest for all of them."""
    before, after = old.get("checkpoint"), new.get("checkpoint")
    if not before or not after:
        return "other weights, configuration or tokenizer"
    changed = [words for part, words in FILES.items() if before.get(part) != after.get(part)]
    return " and ".join(changed) or "other files of the checkpoint"


def text(a: Record, b: Record) -> str:
    """Return the differences between the keys of two records, one aligned line each."""
    differences = key_differences(a.key_parts, b.key_parts)
    if not differences:
        return f"{a.cell} and {b.cell} have the same key, {a.key[:16]}."
    width = max(len(part) for part, _, _ in differences)
    return "\n".join(f"{part.ljust(width)}  {in_a}  →  {in_b}" for part, in_a, in_b in differences)


def find_cell(name: str) -> tuple[Store, Record]:
    """Return the store and the record called ``name``: a record's JSON file, or
    DIR/CHECKPOINT/QUANTIZER.

    Raises ResultsError where there is none, naming the folder's cells, or it is damaged.
    """
    path = Path(name)
    if path.is_file():
        if b'"key_parts"' not in path.read_bytes():
            raise ResultsError(f"{name}: not a record; name a records/…/KEY.json file")
        above = path.absolute().parents
        return Store(above[min(3, len(above) - 1)]), read_record(path, Record)
    if len(path.parts) < 3 and not Store(path.parent.parent).has_manifest():
        raise ResultsError(f"{name}: write DIR/CHECKPOINT/QUANTIZER, or a record's JSON file")
    store = Store(path.parent.parent)
    cell = "/".join(path.parts[-2:])
    cells = {planned.cell: planned for planned in store.manifest().cells}
    if cell not in cells:
        raise ResultsError(f"{name}: no cell {cell}; {store.directory} has {', '.join(cells)}")
    record = store.get(cells[cell])
    if record is None:
        raise ResultsError(f"{name}: this cell has no record yet; run the recipe again")
    return store, record


def flat(parts: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, value as text) of every part of a key."""
    if isinstance(parts, Mapping) and parts:
        for name, part in parts.items():
            yield from flat(part, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield one_line(prefix), one_line(str(parts))


Status = Literal["ok", "failed", "missing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowValue:
    """Hold one score of one cell, or why there is none."""

    checkpoint: str
    quantizer: str
    status: Status
    key: str  # of the record that the grid asks for
    value: float | None = None  # as lm-eval gives it: accuracies are fractions
    stderr: float | None = None
    documents: int | None = None
    reason: str = ""  # why there is no number

    @property
    def cell(self) -> str:
        return f"{self.checkpoint}/{self.quantizer}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Hold one metric of one task at one precision, over all checkpoints (the manifest's order).

    ``intervals`` maps a checkpoint to its own score with an interval. ``deltas`` maps it to its Δ,
    itself minus the baseline checkpoint. ``damages`` maps it to its damage, and ``differences`` to
    its damage minus the baseline checkpoint's: both are losses, positive is worse in every metric.
    ``against`` maps it to what it loses more than at the precision ``Comparison.against``.
    ``missing`` says why a contrast (one of ``TESTED``) of a checkpoint has no interval.

    A row over seeds has a group of trainings in place of a checkpoint. ``means`` are those of the
    trainings' scores; ``scores`` has the interval of a group's mean, on the scale that is compared.
    """

    task: str
    label: str
    metric: str
    higher_is_better: bool
    aggregation: str
    quantizer: str
    method: str
    title: str  # the method as tables write it
    precision: Precision
    entries: tuple[RowValue, ...]
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    deltas: Mapping[str, Effect] = field(default_factory=dict)
    damages: Mapping[str, Effect] = field(default_factory=dict)
    differences: Mapping[str, Effect] = field(default_factory=dict)
    against: Mapping[str, Effect] = field(default_factory=dict)
    missing: Mapping[tuple[str, str], Missing] = field(default_factory=dict)
    means: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, Effect] = field(default_factory=dict)

    @property
    def quantized(self) -> bool:
        return self.precision.quantized

    @property
    def bits(self) -> float | None:
        """Return the nominal bits of a stored weight; None if weights are not quantized."""
        return self.precision.weights.bits if self.precision.weights else None

    @property
    def percent(self) -> bool:
        """Return whether papers print this metric in per cent."""
        return is_percentage(self.metric)

    @property
    def ratio(self) -> bool:
        """Return whether scores are compared by their ratio, as perplexities and lengths are."""
        return kind_of(self.aggregation) == "log ratio"

    def entry(self, checkpoint: str) -> RowValue:
        """Return the score of ``checkpoint`` in this row."""
        return next(entry for entry in self.entries if entry.checkpoint == checkpoint)

    def effect(self, contrast: str, group: str) -> Effect | Missing | None:
        """Return the effect named ``contrast`` of a checkpoint or group, or why it has none; None
        if it was not computed."""
        return getattr(self, contrast).get(group) or self.missing.get((contrast, group))

    def delta(self, checkpoint: str) -> float | None:
        """Return the score of ``checkpoint`` minus the baseline checkpoint's, in its units."""
        ours, base = self.entry(checkpoint).value, self.entries[0].value
        return None if ours is None or base is None else ours - base


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """Hold what quantized cells lose in one measure: ``KL``, or a score, TASK/METRIC.

    ``means``: cell → KL in nats per token, or loss in the score on the scale that is compared.
    ``cells``: cell → the same with an interval (of KL its logarithm), or why there is none.
    ``pairs``: (checkpoint, quantizer, another) → what it loses more than the other; p adjusted over
    a checkpoint's pairs. ``contrasts``: (checkpoint or group, quantizer) → what it loses more than
    the baseline; p adjusted over all. ``overall``: the same by checkpoint or group, mean over the
    quantizers that both have. Of KL and perplexities differences are logarithms of ratios.
    """

    measure: str
    kind: Literal["difference", "log ratio"]
    percent: bool = False
    means: Mapping[str, float] = field(default_factory=dict)
    cells: Mapping[str, Effect | Missing] = field(default_factory=dict)
    pairs: Mapping[tuple[str, str, str], Effect] = field(default_factory=dict)
    contrasts: Mapping[tuple[str, str], Effect | Missing] = field(default_factory=dict)
    overall: Mapping[str, Effect | Missing] = field(default_factory=dict)

    @property
    def is_kl(self) -> bool:
        return self.measure == "KL"

    def size(self, cell: str) -> float | None:
        """Return a cell's mean on the scale that is compared; None if it has none."""
        mean = self.means.get(cell)
        if mean is None or not self.is_kl:
            return mean
        return math.log(mean) if mean > 0 else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Hold all rows of one results folder and the records that they come from."""

    grid: RunManifest
    records: Mapping[str, Record]  # cell → record, failed ones too
    lines: tuple[Row, ...]
    seeds: tuple[Row, ...] = ()  # over several trainings, where the grid has replicates
    kl: Losses | None = None  # None without statistics
    primary: Losses | None = None  # measure of the verdict: ``kl``, or losses in a score
    chance: Mapping[str, float] = field(default_factory=dict)  # task → accuracy of guessing
    # (checkpoint, task, metric) of accuracies that the unquantized model may have guessed
    at_chance: frozenset[tuple[str, str, str]] = frozenset()
    # cell → task → metric → answers that quantization changed; nothing without statistics
    flips: Mapping[str, Mapping[str, Mapping[str, Flips]]] = field(default_factory=dict)
    # cell → what quantization changed in its answers; nothing without statistics
    answers: Mapping[str, AnswerDamage] = field(default_factory=dict)
    against: str | None = None  # the precision that the others are compared with by score
    tested: bool = False  # whether intervals and tests were computed

    @property
    def unquantized(self) -> str | None:
        """Return the first unquantized quantizer of the manifest; None without one."""
        return next((cell.quantizer for cell in self.grid.cells if not cell.quantized), None)

    def unquantized_of(self, quantizer: str) -> str | None:
        """Return the unquantized quantizer against which the damage of ``quantizer`` is measured:
        the first that computes in the same dtype, as KL divergence requires. None if there is
        none."""
        return self._unquantized.get(quantizer, self.unquantized)

    @functools.cached_property
    def _unquantized(self) -> dict[str, str | None]:
        """Return ``unquantized_of`` by quantizer, of those whose dtype is known."""
        dtypes = {record.quantizer: dtype_of(record) for record in self.records.values()}
        names = [cell.quantizer for cell in self.grid.cells if not cell.quantized]
        unknown = next((name for name in names if dtypes.get(name) is None), None)
        first: dict[str | None, str] = {}
        for name in names:
            first.setdefault(dtypes.get(name), name)
        return {
            quantizer: first.get(dtype, unknown)
            for quantizer, dtype in dtypes.items()
            if dtype is not None
        }

    def no_damage(self, cell: str) -> str:
        """Return why a quantized cell has no damage, "" if it may have."""
        record = self.records.get(cell)
        quantizer = cell.rpartition("/")[2]
        if status_of(record)[0] != "ok":
            return "the cell has no scores"
        base = self.unquantized_of(quantizer)
        if self.unquantized is None:
            return "the run has no unquantized column"
        if base is None:
            return f"no unquantized column computes in {dtype_of(record)}, as {quantizer} does"
        other = f"{cell.rpartition('/')[0]}/{base}"
        if status_of(self.records.get(other))[0] != "ok":
            return f"{other} has no scores"
        if self.same_weights(cell, other):
            return ""
        parts = self.records[other].key_parts, self.records[cell].key_parts
        return f"made from {changed_files(*parts)} than {other}"

    @property
    def checkpoints(self) -> tuple[str, ...]:
        return self.grid.checkpoints

    @property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        """Return group name → its checkpoints: trainings of one kind, or single checkpoints."""
        return self.grid.replicates or {name: (name,) for name in self.grid.checkpoints}

    @property
    def trained_once(self) -> tuple[str, ...]:
        """Return the checkpoints that belong to no group of trainings, if there are groups."""
        grouped = [member for members in self.grid.replicates.values() for member in members]
        return tuple(name for name in self.checkpoints if grouped and name not in grouped)

    @property
    def quantizers(self) -> tuple[str, ...]:
        """Return the labels of the quantized columns, in the manifest's order."""
        return tuple(dict.fromkeys(cell.quantizer for cell in self.grid.cells if cell.quantized))

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the quantization methods in the manifest's order; the unquantized method if
        there is no other."""
        quantizing = dict.fromkeys(cell.method for cell in self.grid.cells if cell.quantized)
        return tuple(quantizing) or tuple({cell.method: None for cell in self.grid.cells})

    def task_damage(self, cell: str, task: str) -> TaskDamage | None:
        """Return the damage of one task or group in a cell; None if it was not measured."""
        record = self.records.get(cell)
        measured = record.damage.tasks if record and isinstance(record.damage, Damage) else {}
        flips = dict(self.flips.get(cell, {}).get(task, {}))
        if task in measured:
            return measured[task].model_copy(update={"flips": flips or measured[task].flips})
        return TaskDamage(flips=flips) if flips else None

    def same_weights(self, cell: str, other: str) -> bool:
        """Return whether two cells were made from the same weights."""
        pair = (self.records.get(cell), self.records.get(other))
        if None in pair:
            return False
        return pair[0].key_parts.get("weights") == pair[1].key_parts.get("weights")

    @functools.cached_property
    def _metrics(self) -> frozenset[tuple[str, str]]:
        return frozenset((row.task, row.metric) for row in self.lines)

    def redundant(self, row: Row) -> bool:
        """Return whether the row repeats another metric of its task, as word_perplexity repeats
        bits_per_byte."""
        return (row.task, REDUNDANT.get(row.metric)) in self._metrics

    def problems(self) -> list[tuple[GridCell, str]]:
        """Return what is missing, failed, unaudited, cut or mismatched of a cell, a line each."""
        lines = []
        for cell in self.grid.cells:
            record = self.records.get(cell.cell)
            status, reason = status_of(record)
            if status != "ok":
                lines.append((cell, f"{status}: {reason}"))
            elif record.audit is None and cell.quantized:
                lines.append((cell, "not audited"))
            if status == "ok":
                lines += [(cell, line) for line in _of_tasks(record)]
            if status == "ok" and isinstance(record.damage, Unavailable):
                lines.append((cell, f"no KL divergence: {record.damage.reason}"))
            if status == "ok" and cell.quantized and (why := self.no_damage(cell.cell)):
                lines.append((cell, f"no damage: {why}"))
        return lines


def _of_tasks(record: Record) -> list[str]:
    """Return a line for each task that failed or was scored otherwise than the rest, and for
    truncated requests."""
    scoring = record.scoring
    exact = scoring.exact_tasks if scoring else {}
    cut = scoring.truncated or 0 if scoring else 0
    share = f" of {scoring.requests:,}" if cut and scoring.requests else ""
    return [
        *([f"{cut:,}{share} requests are longer than the context and were cut"] if cut else []),
        *(f"{task}: failed: {_short(why)}" for task, why in record.failed_tasks.items()),
        *(f"{task}: scored exactly: {_short(why)}" for task, why in exact.items()),
    ]


def dtype_of(record: Record) -> str | None:
    """Return the dtype that a cell computes in; None if its key does not say."""
    settings = record.key_parts.get("quantizer")
    for part in (settings, settings.get("weights") if isinstance(settings, Mapping) else None):
        if isinstance(part, Mapping) and (dtype := part.get("compute_dtype", part.get("dtype"))):
            return str(dtype)
    return None


BITS = {"bfloat16": 16.0, "float16": 16.0, "float32": 32.0}


def bits_per_weight(record: Record | None) -> float | None:
    """Return the stored bits per weight of all matrices outside embeddings and LM head if the
    audit counted them, else of the quantized modules; of an unquantized cell those of its dtype."""
    if record is None:
        return None
    if record.audit and record.audit.size:
        return record.audit.size.bits_per_weight
    if record.quantized:
        return record.audit.bits_per_weight if record.audit else None
    return BITS.get(dtype_of(record) or "")


def gib(record: Record | None) -> float | None:
    """Return the GiB of all weights as they are stored; None in records of earlier versions."""
    return record.audit.size.gib if record and record.audit and record.audit.size else None


def status_of(record: Record | None) -> tuple[Status, str]:
    """Return whether a record is ok, failed or missing, and the reason unless it is ok."""
    if record is None:
        return "missing", "no record; run the recipe again"
    if record.status == "failed":
        return "failed", _short(record.error or "no reason was recorded")
    if record.audit is not None and not record.audit.passed:
        return "failed", _short("; ".join(record.audit.problems) or "did not pass its audit")
    return "ok", ""


def _short(reason: str) -> str:
    """Return ``reason`` as one short line: an audit may name every layer."""
    return textwrap.shorten(reason, 240, placeholder=" … (the record has the whole text)")


TESTED = ("deltas", "damages", "differences", "against")  # contrasts, a family of tests each


# --- compare how models were trained: alike in all but the normalizer and the seed?


def training_notes(comparison: Comparison) -> list[str]:
    """Return a note per pair of checkpoints that were trained differently in more than the
    normalizer, or one note that all were trained alike; nothing if that is not known."""
    trainings, groups = trained(comparison.records.values()), comparison.grid.replicates
    base, *others = groups.values() or [(name,) for name in comparison.checkpoints]
    kinds = [(kind[0], member) for kind in groups.values() for member in kind[1:]]
    pairs = [(*pair, True) for pair in kinds]  # of one kind: their seeds differ too
    pairs += [(*pair, False) for other in others for pair in zip(base, other, strict=False)]
    lines = []
    for first, other, seeds in pairs:
        pair = trainings.get(first), trainings.get(other)
        if None in pair:
            continue
        differing = [
            f"{part} {_in_short(a)} and {_in_short(b)}"
            for part, a, b in key_differences(*(each.in_common for each in pair))
            if not (seeds and part == "seed")
        ]
        if differing:
            lines.append(
                f"{first} and {other} were trained differently, not in the normalizer alone: "
                f"{'; '.join(differing)}."
            )
        if seeds and pair[0].normalizer != pair[1].normalizer:
            lines.append(
                f"{first} and {other} are listed as seeds of one kind, but have two normalizers."
            )
    if lines or not others or trainings.keys() < {*comparison.checkpoints}:
        return lines
    names = " and ".join(comparison.groups)
    return [
        f"{names} were trained alike in all but the normalizer"
        f"{', trainings of one kind in all but the seed' if groups else ''}."
    ]


def trained(records: Iterable[Record]) -> dict[str, Trained]:
    """Return checkpoint → the summary of its training, for checkpoints that qbench trained."""
    return {record.checkpoint: record.training for record in records if record.training is not None}


def _in_short(text: str) -> str:
    """Return ``text`` cut to 60 characters."""
    return text if len(text) <= 60 else f"{text[:59]}…"
