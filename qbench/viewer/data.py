"""Make the JSON that the page shows from records, one payload per view. Imports no torch.

The name of a payload is safe as a file name: folders, cells and tasks are named by their index in
the order in which ``overview`` lists them.

    index                     the folders
    0/overview                verdict, scores, effects, problems
    0/cell/3                  the record of cell 3
    0/documents/3/1           cell 3, task 1: outcomes and responses per document
    0/tokens/3/1/7            KL divergence per token of document 7, if the record has it
    0/texts/1                 task 1: prompts and answers, if its data are available
    0/analysis                sinks, outliers, sensitivity"""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench import __version__
from qbench.comparison.answers import split_prompts
from qbench.comparison.compare import cell_flips, compare
from qbench.comparison.rows import (
    TESTED,
    Comparison,
    Row,
    bits_per_weight,
    flat,
    gib,
    status_of,
    training_notes,
)
from qbench.comparison.verdict import about, verdict
from qbench.errors import QbenchError, ResultsError
from qbench.records import ANSWERS, UNQUANTIZED_BITS, Damage, Divergence, GridCell, Question, Record
from qbench.store import Analyses, Sensitivities, Store
from qbench.text import metric_title

if TYPE_CHECKING:
    import pandas as pd


Json = dict[str, Any]
# (record, task) → by document, the texts of each request and the right answer
Texts = Callable[[Record, str], Mapping[int, Question]]
NO_TEXTS = (
    "The texts of these documents are not available: name the run's --data and --definitions."
)


class WholeStore(Store):
    """A store that treats damaged records as missing; ``unreadable``: cell → reason."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.unreadable: dict[str, str] = {}

    def get(self, cell: GridCell) -> Record | None:
        """Return the record of ``cell``; None if it is missing, or if it or its outcomes cannot be
        read. ``unreadable`` then has the reason. Raises no ResultsError."""
        try:
            record = super().get(cell)
            if record is not None and "outcomes" in record.files:
                self.payload(record, "outcomes")
        except ResultsError as error:
            self.unreadable[cell.cell] = str(error)
            return None
        self.unreadable.pop(cell.cell, None)
        return record


def unreadable(store: Store) -> Mapping[str, str]:
    """Return cell → why its record cannot be read, so far; {} for a store that raises instead."""
    return store.unreadable if isinstance(store, WholeStore) else {}


class Results:
    """Hold one results folder and its comparison. Intervals and tests take seconds: a thread
    computes them for one ``version`` of the folder after another, and ``overview`` says whether it
    has them."""

    def __init__(self, store: Store, *, texts: Texts | None = None) -> None:
        self.store = store
        self.texts = texts
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._version: int | None = None
        self._tested: Future[Comparison] = Future()

    @property
    def version(self) -> int:
        """Return a checksum over names and times of change of the manifest's, the records' and the
        analyses' JSON files. Other files of the folder do not change it."""
        folder = self.store.directory
        files = [folder / "grid.json", *(folder / "records").glob("*/*/*.json")]
        files += (folder / "analysis").rglob("*.json")
        times = []
        for path in files:
            with suppress(OSError):  # removed meanwhile
                times.append(f"{path} {path.stat().st_mtime_ns}")
        return zlib.crc32("\n".join(sorted(times)).encode(errors="surrogateescape"))

    @property
    def ready(self) -> bool:
        """Return whether intervals and tests of the newest version are computed; if not, a thread
        begins."""
        return self._begin().done()

    def comparison(self, *, wait: bool) -> Comparison:
        """Return the comparison, with intervals and tests if they are computed or ``wait`` is true.

        Raises ResultsError if the folder has no manifest that can be read."""
        while True:
            tested = self._begin()
            try:
                if wait or tested.done():
                    return tested.result()
                return compare(self.store, statistics=False)
            except CancelledError:  # a file changed meanwhile
                continue

    def _begin(self) -> Future[Comparison]:
        """Start to compare the newest version in a thread; return the comparison's future."""
        with self._lock:
            version = self.version
            if version != self._version:
                self._tested.cancel()  # if it has not begun
                self._version, self._tested = version, Future()
                # no pool, whose threads a process that ends would wait for
                threading.Thread(target=self._compare, args=(self._tested,), daemon=True).start()
            return self._tested

    def _compare(self, tested: Future[Comparison]) -> None:
        """Compare the folder, once earlier comparisons end, unless ``tested`` is cancelled."""
        with self._turn:
            if tested.set_running_or_notify_cancel():
                try:
                    tested.set_result(compare(self.store))
                except BaseException as error:
                    tested.set_exception(error)

    def payload(self, name: str, *, wait: bool = False) -> Json:
        """Return the payload ``name``, such as overview or cell/3. ``wait``: until intervals and
        tests are computed. Raises KeyError for an unknown name, or a cell or task that does not
        exist; ResultsError for records that cannot be read."""
        kind, *indexes = name.split("/")
        try:
            numbers = [int(index) for index in indexes]
            makers = {
                ("overview", 0): lambda: overview(self, self.comparison(wait=wait)),
                ("analysis", 0): lambda: analysis(self.store),
                ("cell", 1): lambda: cell_page(self.store, *numbers),
                ("documents", 2): lambda: documents(self.store, *numbers),
                ("tokens", 3): lambda: tokens(self.store, *numbers),
                ("texts", 1): lambda: task_texts(self, *numbers),
            }
            made = makers[kind, len(numbers)]()
        except (ValueError, IndexError):
            raise KeyError(name) from None
        return plain(made)


def index(results: Sequence[Results]) -> Json:
    """Return ``{"folders": [{"name": …}, …]}``: the folders' names; if two are equal, all are paths
    relative to the common folder."""
    paths = [folder.store.directory.resolve() for folder in results]
    names = [path.name for path in paths]
    if len({*names}) < len(names):
        names = [os.path.relpath(path, os.path.commonpath(paths)) for path in paths]
    return {"folders": [{"name": name} for name in names]}


def plain(value: Any) -> Any:
    """Return ``value`` for strict JSON: keys as text, infinities as "∞" and "−∞", NaN as None."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("∞" if value > 0 else "−∞")
    return value


# --- the first page


def overview(results: Results, comparison: Comparison) -> Json:
    """Return the first page: the verdict, scores and effects, cells, problems. ``ready`` says
    whether ``comparison`` has intervals and tests."""
    grid, store = comparison.grid, results.store
    lines = [line for line in comparison.lines if not line.redundant]
    labels = {line.task: line.label for line in lines}
    notes, once = training_notes(comparison), ", ".join(comparison.trained_once)
    if once and comparison.seeds:
        notes.append(f"Trained once, and so not over seeds: {once}. `qbench tables` compares it.")
    return {
        "ready": comparison.tested or not comparison.records,
        "name": grid.name,
        "program": __version__,
        "checkpoints": grid.checkpoints,
        "groups": {name: list(members) for name, members in comparison.groups.items()},
        "unquantized": comparison.unquantized,
        "tasks": [{"name": task, "label": labels.get(task, task)} for task in grid.tasks],
        "cells": [_cell(comparison, store, cell) for cell in grid.cells],
        "lines": [_line(line) for line in lines],
        "by_group": [_line(line, seeds=True) for line in comparison.seeds if not line.redundant],
        "verdict": verdict(comparison),
        "about": about(comparison),
        "summary": notes if comparison.tested else [],  # below the verdict
        "problems": [
            *(f"{cell.cell}: {text}" for cell, text in comparison.problems()),
            *unreadable(store).values(),
        ],
    }


def _cell(comparison: Comparison, store: Store, cell: GridCell) -> Json:
    """Return a cell's row on the first page: names, status, size, audit error, time, KL by task."""
    record = comparison.records.get(cell.cell)
    status, reason = status_of(record)
    shown = {
        "cell": cell.cell,
        "checkpoint": cell.checkpoint,
        "quantizer": cell.quantizer,
        "title": cell.title,
        "precision": cell.precision.name,
        "quantized": cell.quantized,
        "floor": bool((inputs := cell.precision.activations) and inputs.bits == UNQUANTIZED_BITS),
        "status": status,
        "reason": unreadable(store).get(cell.cell, reason),
    }
    if record is None:
        return shown
    tasks = record.damage.tasks if isinstance(record.damage, Damage) else {}
    weights = record.precision.weights is not None
    return shown | {
        "bits": bits_per_weight(record),
        "gib": gib(record),
        "weight_error": record.audit.weight_error if record.audit and weights else None,
        "seconds": (record.finished - record.started).total_seconds(),
        "memory_gib": max((stage.peak_memory_gib for stage in record.stages), default=None),
        "kl": _kl(comparison, cell.cell)
        | {
            task: _kl_of_task(damage.distributions.kl)
            for task, damage in tasks.items()
            if damage.distributions is not None
        },
        "documents": sorted(record.files),
    }


def _kl(comparison: Comparison, cell: str) -> Json:
    """Return {"": KL divergence over all tasks, with its interval}; {} before it is computed."""
    if comparison.kl is None or cell not in comparison.kl.means:
        return {}
    ends = {side: getattr(comparison.kl.cells[cell], side, None) for side in ("low", "high")}
    ends = {side: math.exp(end) if end is not None else None for side, end in ends.items()}
    return {"": {"mean": comparison.kl.means[cell], **ends}}


def _kl_of_task(kl: Divergence) -> Json:
    """Return a task's KL, with its 95 % interval, which is normal on the logarithm."""
    if kl.mean_stderr is None or not kl.mean_stderr < kl.mean:
        return {"mean": kl.mean, "low": None, "high": None}
    factor = math.exp(1.96 * kl.mean_stderr / kl.mean)
    return {"mean": kl.mean, "low": kl.mean / factor, "high": kl.mean * factor}


LINE = ("task", "label", "metric", "higher_is_better", "percent", "ratio", "aggregation",
        "quantizer", "quantized")  # fmt: skip
EFFECT = ("kind", "estimate", "p", "p_holm", "mark", "documents", "low", "high")


def _line(line: Row, *, seeds: bool = False) -> Json:
    """Return a row with its scores and effects, whose ``kind`` says whether numbers are in units of
    the score or logarithms of ratios. Over ``seeds`` a mean of perplexities has no interval."""
    effects = line.of("scores")
    ends = {
        name: dict(zip(("low", "high"), effect.score_interval(), strict=False))
        for name, effect in effects.items()
        if not (seeds and line.ratio)
    }
    if seeds:
        scores = {group: {"status": "ok", "value": line.mean(group)} for group in effects}
    else:
        names = ("status", "value", "reason", "documents")
        scores = {checkpoint: {name: getattr(entry, name) for name in names}
                  for checkpoint, entry in line.entries.items()}  # fmt: skip
    return {
        **{name: getattr(line, name) for name in LINE},
        "metric_title": metric_title(line.metric),
        **{
            contrast: {
                of: {name: getattr(effect, name) for name in EFFECT}
                for of, effect in line.of(contrast).items()
            }
            for contrast in TESTED
        },
        "scores": {name: score | ends.get(name, {}) for name, score in scores.items()},
    }


# --- a cell, its documents, the texts of a task


def _record(store: Store, cell: int) -> Record:
    """Return the record of cell number ``cell``. Raises IndexError if there is no such cell,
    ResultsError if it has no record."""
    listed = store.manifest().cells[cell]
    record = store.get(listed)
    if record is None:
        raise ResultsError(
            unreadable(store).get(listed.cell)
            or f"{listed.cell} has no record yet; run the recipe again"
        )
    return record


def cell_page(store: Store, cell: int) -> Json:
    """Return the fields, the flips, and the key as dotted name → value, of the record of cell
    number ``cell``. Raises IndexError or ResultsError if there is none."""
    record = _record(store, cell)
    _, reason = status_of(record)
    page = record.model_dump(mode="python", exclude={"key_parts", "started", "finished"})
    if isinstance(record.damage, Damage):
        for task, flips in cell_flips(store, record).items():
            if task in record.damage.tasks:
                changed = {metric: count.model_dump() for metric, count in flips.items()}
                page["damage"]["tasks"][task]["flips"] = changed
    return {
        **page,
        "cell": record.cell,
        "reason": reason,
        "precision_name": record.precision.name,
        "key_parts": dict(flat(record.key_parts)),
        "started": record.started.isoformat(),
        "seconds": (record.finished - record.started).total_seconds(),
    }


def documents(store: Store, cell: int, task: int) -> Json:
    """Return, for task number ``task`` of cell number ``cell``: ``outcomes`` and ``responses``
    (None: not stored) by column, ``kl`` per document, ``by_token``: documents with tokens."""
    record, name = _record(store, cell), store.manifest().tasks[task]
    page: Json = {
        "cell": record.cell,
        "task": name,
        "outcomes": _columns(store.outcomes(record), name),
        "responses": None,
        "kl": None,
        "by_token": [],
    }
    if "responses" in record.files:
        page["responses"] = _columns(store.responses(record), name)
    rows = _tokens(store, record, name)
    if rows is not None:
        total = (rows["kl"] * rows["tokens"]).groupby(rows["document"]).sum(min_count=1)
        mean = (total / rows["tokens"].groupby(rows["document"]).sum()).dropna()
        page["kl"] = {"document": mean.index.tolist(), "kl": mean.round(6).tolist()}
        page["by_token"] = sorted(set(rows["document"][rows["text"].notna()].tolist()))
    return page


def tokens(store: Store, cell: int, task: int, document: int) -> Json:
    """Return, for a document of task number ``task``, a list ``samples``, each of columns by token:
    ``texts``, ``kl``, ``change`` of the log-probability, and ``agrees``, whether both models'
    likeliest token is the same (None: not recorded)."""
    record, name = _record(store, cell), store.manifest().tasks[task]
    rows = _tokens(store, record, name)
    assert rows is not None, "the page asks for documents with tokens only"
    rows = rows[(rows["document"] == document) & rows["text"].notna()]
    columns = {"texts": "text", "kl": "kl", "change": "change", "agrees": "agrees"}
    return {
        "cell": record.cell,
        "samples": [
            {ours: _values(sample[column], 6) for ours, column in columns.items()}
            for _, sample in rows.groupby("sample")
        ],
    }


def _tokens(store: Store, record: Record, task: str) -> pd.DataFrame | None:
    """Return a task's divergences, with columns ``sample`` and ``agrees`` for answers, or None."""
    if task == ANSWERS and ANSWERS in record.files:
        rows, _ = split_prompts(store.answers(record))
        return rows.assign(tokens=1)
    if "divergences" not in record.files:
        return None
    table = store.divergences(record)
    return table[table["task"] == task].assign(sample=0, agrees=None)


def _values(column: pd.Series, decimals: int = 4) -> list:
    """Return a column's values as a list, numbers rounded to ``decimals``, missing ones None."""
    rounded = column.round(decimals) if column.dtype.kind == "f" else column
    return rounded.astype(object).where(column.notna(), None).tolist()


def _columns(table: pd.DataFrame, task: str) -> dict[str, list]:
    """Return column → values of the rows of ``task``, rounded to 0.0001, without empty columns."""
    rows = table[table["task"] == task].drop(columns="task")
    return {name: _values(rows[name]) for name in rows if rows[name].notna().any()}


def task_texts(results: Results, task: int) -> Json:
    """Return, by document of task number ``task``, the ``texts`` of its requests (context and
    continuation) and the right answer as ``targets``. If both are empty, ``missing`` says why."""
    name = results.store.manifest().tasks[task]
    empty: Json = {"task": name, "texts": {}, "targets": {}}
    if name == ANSWERS and (prompts := _prompts(results.store)):
        return empty | {"texts": prompts}
    if results.texts is None:
        return {**empty, "missing": NO_TEXTS}
    for record in results.store.records():
        if any(score.task == name for score in record.scores):
            try:
                questions = results.texts(record, name)
            except QbenchError as error:
                return {**empty, "missing": str(error)}
            return {
                "task": name,
                "texts": {document: question.texts for document, question in questions.items()},
                "targets": {document: question.target for document, question in questions.items()},
            }
    return {**empty, "missing": "No cell has scored this task yet."}


def _prompts(store: Store) -> dict[int, list[list[str]]]:
    """Return the prompts of answers by document, from the first record that has any."""
    for record in store.records():
        if ANSWERS in record.files:
            _, prompts = split_prompts(store.answers(record))
            return {int(document): [[text]] for document, text in prompts.items()}
    return {}


# --- why


def analysis(store: Store) -> Json:
    """Return the records of the analyses as ``cells`` and ``sensitivities``; ``problems``: a line
    per damaged file; ``command``: the command that makes them."""
    folder = store.directory.name if store.directory.is_absolute() else store.directory
    parts: Json = {"problems": [], "command": f"qbench analyze RECIPE --out {folder}"}
    kinds = {"cells": Analyses(store.directory), "sensitivities": Sensitivities(store.directory)}
    for name, analyses in kinds.items():
        try:
            everything = analyses.records()
        except ResultsError as error:
            parts["problems"].append(str(error))
            everything = []
        parts[name] = [
            record.model_dump(exclude={"key_parts", "environment", "stages", "started", "finished"})
            | {"cell": record.cell, "precision_name": record.precision.name}
            for record in everything
        ]
    return parts
