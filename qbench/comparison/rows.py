"""Hold a comparison: one row per score and precision, what is missing of the cells,
which parts of their keys and of their trainings differ."""

from __future__ import annotations

import functools
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from qbench.errors import ResultsError
from qbench.metrics import kind_of
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
    from qbench.comparison.losses import Losses
    from qbench.statistics import Effect, Missing


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
    """Return in words by which files the key parts ``old`` and ``new`` of two cells differ: ``other
    weights and another tokenizer``. Call it only if they differ: it never returns "". Older records
    have one digest for all files: all are named."""
    before, after = old.get("checkpoint"), new.get("checkpoint")
    if not before or not after:
        return "other weights, configuration or tokenizer"
    changed = [words for part, words in FILES.items() if before.get(part) != after.get(part)]
    return " and ".join(changed) or "other files of the checkpoint"


def explanation(a: Record, b: Record) -> str:
    """Return the differences between the keys of two records, one aligned line each, or a line that
    says that they have the same key."""
    differences = key_differences(a.key_parts, b.key_parts)
    if not differences:
        return f"{a.cell} and {b.cell} have the same key, {a.key[:16]}."
    width = max(len(part) for part, _, _ in differences)
    return "\n".join(f"{part.ljust(width)}  {in_a}  →  {in_b}" for part, in_a, in_b in differences)


def find_cell(name: str) -> tuple[Store, Record]:
    """Return the store and the record called ``name``: a record's JSON file, or
    DIR/CHECKPOINT/QUANTIZER. Raises ResultsError if there is none or it is damaged."""
    path = Path(name)
    if path.is_file():
        if b'"key_parts"' not in path.read_bytes():
            raise ResultsError(f"{name}: not a record; name a records/…/KEY.json file")
        above = path.absolute().parents
        return Store(above[min(3, len(above) - 1)]), read_record(path, Record)
    store = Store(path.parent.parent)
    if not store.has_manifest():
        raise ResultsError(
            f"{name}: names no cell; write DIR/CHECKPOINT/QUANTIZER, of a folder that `qbench run` "
            "wrote, or a record's JSON file"
        )
    cell = "/".join(path.parts[-2:])
    cells = {planned.cell: planned for planned in store.manifest().cells}
    if cell not in cells:
        raise ResultsError(f"{name}: no cell {cell}; {store.directory} has {', '.join(cells)}")
    record = store.get(cells[cell])
    if record is None:
        raise ResultsError(f"{name}: this cell has no record yet; run the recipe again")
    return store, record


def flat(parts: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, value as text) of every part of a key, names after ``prefix`` and a dot.
    A list is one value, and so is an empty mapping."""
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
    cell: str
    status: Status
    key: str  # of the record that the grid asks for
    value: float | None = None  # as lm-eval gives it: accuracies are fractions
    stderr: float | None = None
    documents: int | None = None
    reason: str = ""  # why there is no number


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Hold one metric of one task at one precision, over all checkpoints (the manifest's order).
    ``effects``: by contrast and checkpoint, its effect, or why it has none. The contrasts are
    ``scores``; ``deltas``, the score minus the baseline checkpoint's; ``damages``, and
    ``differences``, the damage minus the baseline checkpoint's: both are losses, positive is worse
    in every metric; ``against``, what is lost more than at the precision ``Comparison.against``. A
    row over seeds has a group of trainings in place of a checkpoint in its effects."""

    task: str
    label: str
    metric: str
    higher_is_better: bool
    aggregation: str
    quantizer: str
    method: str
    title: str  # the method as tables write it
    precision: Precision
    percent: bool  # whether papers print this metric in per cent
    redundant: bool  # whether another metric of the task says the same, as word_perplexity does
    entries: Mapping[str, RowValue]  # by checkpoint
    effects: Mapping[tuple[str, str], Effect | Missing] = field(default_factory=dict)

    @property
    def quantized(self) -> bool:
        """Return whether the row's precision is a quantized one."""
        return self.precision.quantized

    @property
    def ratio(self) -> bool:
        """Return whether scores are compared by their ratio, as perplexities and lengths are."""
        return kind_of(self.aggregation) == "log ratio"

    def of(self, contrast: str) -> dict[str, Effect]:
        """Return the effects of a contrast that have an interval, by checkpoint or group."""
        return {
            group: effect
            for (name, group), effect in self.effects.items()
            if name == contrast and hasattr(effect, "p")
        }

    def effect(self, contrast: str, group: str) -> Effect | None:
        """Return the effect of a contrast in a checkpoint or group; None without an interval."""
        effect = self.effects.get((contrast, group))
        return effect if hasattr(effect, "p") else None

    def delta(self, checkpoint: str) -> float | None:
        """Return the score of ``checkpoint`` minus the baseline checkpoint's, in its units; None if
        one of them has none."""
        ours, base = self.entries[checkpoint].value, next(iter(self.entries.values())).value
        return None if ours is None or base is None else ours - base

    def mean(self, group: str) -> float | None:
        """Return the mean of the scores of a group of trainings; None if it has no effect, or is a
        single checkpoint."""
        effect = self.effect("scores", group)
        if effect is None or not effect.seeds:
            return None
        return fmean(map(math.exp, effect.each) if self.ratio else effect.each)


@dataclass(frozen=True, kw_only=True, eq=False)
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
    folder: str = ""  # name of the results folder
    against: str | None = None  # the precision that the others are compared with by score
    tested: bool = False  # whether intervals and tests were computed

    @property
    def unquantized(self) -> str | None:
        """Return the first unquantized quantizer of the manifest; None without one."""
        return next((cell.quantizer for cell in self.grid.cells if not cell.quantized), None)

    @functools.cached_property
    def unquantized_of(self) -> dict[str, str | None]:
        """Return quantizer → the unquantized one against which its damage is measured: the first
        that computes in the same dtype, as KL divergence requires; the first of all for a quantizer
        whose dtype is not known. None if there is none."""
        dtypes = {record.quantizer: dtype_of(record) for record in self.records.values()}
        names = [cell.quantizer for cell in self.grid.cells if not cell.quantized]
        unknown = next((name for name in names if dtypes.get(name) is None), None)
        first = {dtypes.get(name): name for name in reversed(names)}
        return {
            name: self.unquantized if dtypes.get(name) is None else first.get(dtypes[name], unknown)
            for name in (cell.quantizer for cell in self.grid.cells)
        }

    def no_damage(self, cell: str) -> str:
        """Return why a quantized cell has no damage, "" if it may have."""
        record = self.records.get(cell)
        quantizer = cell.rpartition("/")[2]
        if status_of(record)[0] != "ok":
            return "the cell has no scores"
        base = self.unquantized_of[quantizer]
        if self.unquantized is None:
            return "the run has no unquantized column"
        if base is None:
            return f"no unquantized column computes in {dtype_of(record)}, as {quantizer} does"
        other = f"{cell.rpartition('/')[0]}/{base}"
        if status_of(self.records.get(other))[0] != "ok":
            return f"{other} has no scores"
        before, after = (self.records[name].key_parts for name in (other, cell))
        if before.get("weights") == after.get("weights"):
            return ""
        return f"made from {changed_files(before, after)} than {other}"

    @functools.cached_property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        """Return group name → its checkpoints: trainings of one kind, or single checkpoints."""
        return self.grid.replicates or {name: (name,) for name in self.grid.checkpoints}

    @property
    def trained_once(self) -> tuple[str, ...]:
        """Return the checkpoints that belong to no group of trainings, if there are groups."""
        grouped = [member for members in self.grid.replicates.values() for member in members]
        return tuple(name for name in self.grid.checkpoints if grouped and name not in grouped)

    @functools.cached_property
    def quantizers(self) -> tuple[str, ...]:
        """Return the labels of the quantized columns, in the manifest's order."""
        return tuple(dict.fromkeys(cell.quantizer for cell in self.grid.cells if cell.quantized))

    def task_damage(self, cell: str, task: str) -> TaskDamage | None:
        """Return the damage of one task or group in a cell; None if it was not measured."""
        record = self.records.get(cell)
        measured = record.damage.tasks if record and isinstance(record.damage, Damage) else {}
        flips = dict(self.flips.get(cell, {}).get(task, {}))
        if task in measured:
            return measured[task].model_copy(update={"flips": flips or measured[task].flips})
        return TaskDamage(flips=flips) if flips else None

    def problems(self) -> list[tuple[GridCell, str]]:
        """Return (cell, line) for each limit of a cell: missing, failed or unaudited, cut requests,
        tasks that failed or were scored exactly, no damage."""
        lines: list[tuple[GridCell, str]] = []
        for cell in self.grid.cells:
            record = self.records.get(cell.cell)
            status, reason = status_of(record)
            if status != "ok":
                lines.append((cell, f"{status}: {reason}"))
                continue
            scoring = record.scoring
            texts = ["not audited"] if record.audit is None and cell.quantized else []
            if cut := scoring.truncated or 0 if scoring else 0:
                share = f" of {scoring.requests:,}" if scoring.requests else ""
                texts.append(f"{cut:,}{share} requests are longer than the context and were cut")
            texts += [f"{task}: failed: {_short(why)}" for task, why in record.failed_tasks.items()]
            exact = scoring.exact_tasks if scoring else {}
            texts += [f"{task}: scored exactly: {_short(why)}" for task, why in exact.items()]
            if isinstance(record.damage, Unavailable):
                texts.append(f"no KL divergence: {record.damage.reason}")
            if cell.quantized and (why := self.no_damage(cell.cell)):
                texts.append(f"no damage: {why}")
            lines += [(cell, text) for text in texts]
        return lines


def dtype_of(record: Record) -> str | None:
    """Return the dtype that a cell computes in; None if its key does not say."""
    settings = record.key_parts.get("quantizer")
    for part in (settings, settings.get("weights") if isinstance(settings, Mapping) else None):
        if isinstance(part, Mapping) and (dtype := part.get("compute_dtype", part.get("dtype"))):
            return str(dtype)
    return None


BITS = {"bfloat16": 16.0, "float16": 16.0, "float32": 32.0}


def bits_per_weight(record: Record | None) -> float | None:
    """Return the stored bits per weight of all matrices outside embeddings and LM head if the audit
    counted them, else of the quantized modules; of an unquantized cell its dtype's; else None."""
    if record is None:
        return None
    if record.audit and record.audit.size:
        return record.audit.size.bits_per_weight
    if record.quantized:
        return record.audit.bits_per_weight if record.audit else None
    return BITS.get(dtype_of(record) or "")


def gib(record: Record | None) -> float | None:
    """Return the GiB of all weights as stored; None if no audit counted them (earlier versions)."""
    return record.audit.size.gib if record and record.audit and record.audit.size else None


def status_of(record: Record | None) -> tuple[Status, str]:
    """Return whether a record is ok, failed (also by its audit) or missing, and why."""
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
    normalizer, or that are seeds of one kind with two normalizers; else one note that all were
    trained alike; nothing if that is not known."""
    trainings, groups = trained(comparison.records.values()), comparison.grid.replicates
    base, *others = groups.values() or [(name,) for name in comparison.grid.checkpoints]
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
    if lines or not others or trainings.keys() < {*comparison.grid.checkpoints}:
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
