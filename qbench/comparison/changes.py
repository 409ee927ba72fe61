"""Compare two results, two cells or two precisions, paired by document; count the answers that
changed."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from qbench.comparison.rows import Change, Comparison, status_of, training_differences, unlike
from qbench.errors import ResultsError
from qbench.metrics import REDUNDANT, VARIANCE, variance_name
from qbench.records import Flips, Record, Score
from qbench.statistics import (
    TESTABLE,
    Column,
    Effect,
    Panel,
    adjust,
    drawing_error,
    effect,
    joined,
    value,
)
from qbench.store import Store
from qbench.text import MINUS, group_by_reason

Name = tuple[str, str]  # task, metric


@dataclass(frozen=True, slots=True, eq=False)
class CellResults:
    """Hold one cell's record and the outcomes that its scores rest on, redundant metrics left
    out.

    The column of a score that no test knows, such as bleu, is empty. ``variances`` are those of
    prompts' means over drawn answers.
    """

    record: Record
    columns: Mapping[Name, Column]
    scores: Mapping[Name, Score]
    variances: Mapping[Name, Column] = field(default_factory=dict)

    @classmethod
    def of(cls, record: Record, columns: Mapping[Name, Column]) -> CellResults:
        scores, nothing = record.by_name(), Column.of(np.arange(0), [], [])
        testable = {name for name, score in scores.items() if score.aggregation in TESTABLE}
        testable &= columns.keys()
        kept = {name: columns[name] if name in testable else nothing for name in _kept(record)}
        kept |= of_groups(record, kept)
        variances = {name: columns[drawn] for name in kept if (drawn := _variance(name)) in columns}
        return cls(record, kept, {name: scores[name] for name in kept}, variances)


def _kept(record: Record) -> list[Name]:
    """Return (task, metric) of a record's scores, without those that another of the same task
    repeats."""
    scores = [(score.task, score.metric) for score in record.scores]
    return [name for name in scores if (name[0], REDUNDANT.get(name[1])) not in scores]


def of_groups(record: Record, columns: Mapping[Name, Column]) -> dict[Name, Column]:
    """Return the outcomes of groups such as mmlu, by (group, metric): those of all documents of
    their tasks, which ``columns`` holds."""
    return {
        (group.group, group.metric): joined(
            {task: columns[task, group.metric] for task in group.tasks}
        )
        for group in record.pooled_groups
        if all((task, group.metric) in columns for task in group.tasks)
    }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ResultSet:
    """Hold the cells of a results folder or baseline; ``broken`` says why a cell has no scores."""

    name: str
    cells: Mapping[str, CellResults]
    broken: Mapping[str, str]
    replicates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read_results(store: Store, *, decimals: int | None = None) -> ResultSet:
    """Read the cells of a results folder with their outcomes, redundant metrics left out.

    ``decimals``: outcomes are rounded to so many, to be compared with a baseline that was.
    """
    grid = store.manifest()
    cells, broken = {}, {}
    for cell in grid.cells:
        record = store.get(cell)
        status, reason = status_of(record)
        if status != "ok":
            broken[cell.cell] = f"{status}: {reason}"
            continue
        cells[cell.cell] = _read_cell(store, record, decimals)
    return ResultSet(name=grid.name, cells=cells, broken=broken, replicates=grid.replicates)


def _read_cell(store: Store, record: Record, decimals: int | None = None) -> CellResults:
    names = [each for name in _kept(record) for each in (name, _variance(name))]
    return CellResults.of(record, read_columns(store, record, names, decimals))


def _variance(name: Name) -> Name:
    return name[0], variance_name(name[1])


def read_columns(
    store: Store,
    record: Record,
    names: Collection[Name] | None = None,
    decimals: int | None = None,
) -> dict[Name, Column]:
    """Return a record's outcomes of the scores ``names`` (None: all), in their order in the file;
    values rounded to ``decimals``."""
    columns = {}
    for name, (document, values, weight) in store.outcome_arrays(record).items():
        if names is None or name in names:
            if decimals is not None:
                values = rounded(values, name[1], decimals)
            columns[name] = Column.of(document, values, weight)
    return columns


def rounded(values: np.ndarray, metric: str, decimals: int) -> np.ndarray:
    """Return outcomes of ``metric`` rounded to ``decimals``; KL and variances to four more."""
    fine = metric == "kl" or metric.endswith(VARIANCE)
    return values.astype(float).round(decimals + 4 * fine)


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Hold two results side by side; ``problems``: cells that cannot be compared, and why."""

    old: str
    new: str
    lines: tuple[Change, ...]
    problems: tuple[str, ...]


def compare_results(a: Store, b: Store) -> Changes:
    """Return what folder ``b`` loses against folder ``a``, paired by document.

    Raises ResultsError if the folders have no cell in common or score different data.
    """
    old, new = read_results(a), read_results(b)
    lines = compare_sets(old, new)
    if not lines:
        raise ResultsError(
            f"{a.directory} and {b.directory} have no scored cell in common; "
            "compare two results of one recipe"
        )
    problems = [f"{cell}: {a.directory}: {why}" for cell, why in old.broken.items()]
    problems += [f"{cell}: {b.directory}: {why}" for cell, why in new.broken.items()]
    for results, other, folder in ((old, new, b), (new, old, a)):
        named = other.cells.keys() | other.broken.keys()
        problems += [
            f"{cell}: not in {folder.directory}" for cell in results.cells if cell not in named
        ]
        problems += group_by_reason(
            (cell, line)
            for cell, scored in results.cells.items()
            if cell in other.cells
            for line in _lacking(scored, other.cells[cell], str(folder.directory))
        )
    # Say which cells are of models that were trained differently in more than normalizer and
    # seed
    cells = []
    for cell, before in old.cells.items():
        after = new.cells.get(cell)
        pair = before.record.training, after.record.training if after else None
        if None not in pair and (differing := training_differences(*pair, seeds=True)):
            cells.append((cell, f"trained differently: {'; '.join(differing)}"))
    problems += [*_other_precisions(old, new), *group_by_reason(cells)]
    return Changes(
        old=str(a.directory), new=str(b.directory), lines=tuple(lines), problems=tuple(problems)
    )


def compare_cells(a: tuple[Store, Record], b: tuple[Store, Record]) -> Changes:
    """Return what cell ``b`` loses against ``a``, paired by document; both as ``find_cell``
    returns them.

    Raises ResultsError if one has no valid score, or they score different data.
    """
    sides, names = [], []
    alone = a[0].directory == b[0].directory
    for store, record in (a, b):
        status, reason = status_of(record)
        if status != "ok":
            raise ResultsError(f"{store.directory}: {record.cell}: {status}: {reason}")
        sides.append(_read_cell(store, record))
        names.append(record.cell if alone else f"{store.directory}: {record.cell}")
    cell, other = a[1].cell, b[1].cell
    lines = compare_pairs({f"{other} {MINUS} {cell}": sides})
    if not lines:
        raise ResultsError(f"{cell} and {other} have no score in common")
    problems = [*_lacking(*sides, names[1]), *_lacking(*sides[::-1], names[0])]
    trainings = {name: side.record.training for name, side in zip(names, sides, strict=True)}
    problems += unlike(
        {name: training for name, training in trainings.items() if training}, names, {}
    )
    return Changes(old=names[0], new=names[1], lines=tuple(lines), problems=tuple(problems))


def _lacking(cell: CellResults, other: CellResults, name: str) -> list[str]:
    """Return what ``cell`` scored and ``other``, called ``name``, did not, with the reason if it
    is known."""
    tasks, lines = {task for task, _ in other.scores}, {}
    for task, metric in cell.scores.keys() - other.scores.keys():
        what, why = f"{task} {metric}" if task in tasks else task, other.record.failed_tasks
        lines[f"{what}: not in {name}" + (f": {why[task]}" if task in why else "")] = None
    return sorted(lines)


MOST_PAIRED = 4  # quantized precisions whose pairs are all shown unasked


def compare_precisions(store: Store, checkpoint: str, against: str | None) -> tuple[Change, ...]:
    """Return what each quantized precision of a checkpoint loses against each earlier one of the
    manifest; with ``against`` each other one against that.

    Empty if there are more than ``MOST_PAIRED`` and none is named. p-values are adjusted over all
    of them. Raises ResultsError if ``against`` names no quantized cell with a valid score.
    """
    cells = read_results(store).cells
    quantized = [
        cell.quantizer
        for cell in store.manifest().cells
        if cell.quantized and cell.checkpoint == checkpoint and cell.cell in cells
    ]
    if against is not None and against not in quantized:
        raise ResultsError(
            f"--against {against}: no quantized cell of that name has a score; there are "
            f"{', '.join(quantized) or 'none'}"
        )
    if against is None:
        pairs = list(combinations(quantized, 2)) if len(quantized) <= MOST_PAIRED else []
    else:
        pairs = [(against, other) for other in quantized if other != against]
    sides = {
        f"{later} {MINUS} {first}": (cells[f"{checkpoint}/{first}"], cells[f"{checkpoint}/{later}"])
        for first, later in pairs
    }
    return tuple(compare_pairs(sides))


def compare_sets(old: ResultSet, new: ResultSet) -> list[Change]:
    """Return the changes of the cells that both sets have, as ``compare_pairs`` does."""
    shared = [cell for cell in old.cells if cell in new.cells]
    return compare_pairs({cell: (old.cells[cell], new.cells[cell]) for cell in shared})


def compare_pairs(pairs: Mapping[str, Sequence[CellResults]]) -> list[Change]:
    """Return the change of every metric that both of a pair (old, new) have; p-values adjusted
    over all of them.

    Raises ResultsError if a task's definition or data differ.
    """
    lines = []
    for cell, (before, after) in pairs.items():
        _same_tasks(cell, before.record, after.record)
        lines += [
            change(cell, name, before, after) for name in before.scores if name in after.scores
        ]
    return adjusted(lines)


def adjusted(lines: Sequence[Change]) -> list[Change]:
    """Return the same changes with p-values adjusted over all that have one."""
    tested = [line.effect for line in lines if isinstance(line.effect, Effect)]
    effects = iter(adjust(tested))
    return [
        dataclasses.replace(line, effect=next(effects)) if isinstance(line.effect, Effect) else line
        for line in lines
    ]


def _other_precisions(old: ResultSet, new: ResultSet) -> list[str]:
    """Say which cells of one name are not quantized alike."""
    both = [
        (cell, results.record.precision, new.cells[cell].record.precision)
        for cell, results in old.cells.items()
        if cell in new.cells
    ]
    return [
        f"{cell}: {before.words} before, {after.words} now"
        for cell, before, after in both
        if before.words != after.words
    ]


def _same_tasks(cell: str, before: Record, after: Record) -> None:
    """Raise ResultsError if two records scored different data, by the digests of what was
    scored, or else by those in their keys."""
    keyed = [record.key_parts.get("tasks") or {} for record in (before, after)]
    for task in dict.fromkeys([*before.documents, *keyed[0]]):
        stored = task in before.documents and task in after.documents
        first, second = (
            digests.get(task)
            for digests in ((before.documents, after.documents) if stored else keyed)
        )
        if None not in (first, second) and first != second:
            raise ResultsError(
                f"{cell}: {task}: its definition or data differ from the other results', so "
                "documents cannot be paired; score both on the same data (or make a new baseline)"
            )


def change(cell: str, name: Name, before: CellResults, after: CellResults) -> Change:
    """Compare one score on the documents that both saw; its p-value is not adjusted."""
    score = before.scores[name]
    columns = {"new": after.columns[name], "old": before.columns[name]}
    panel = Panel.of(columns)
    worse = -1 if score.higher_is_better else 1
    answer = effect(panel, {"new": worse, "old": -worse}, score.aggregation)
    variances = [source.variances.get(name) for source in (after, before)]
    if isinstance(answer, Effect) and any(variances):
        drawn = drawing_error(columns.values(), variances, score.aggregation)
        answer = dataclasses.replace(answer, drawn=drawn)
    seen = sum(len(column.documents) for column in columns.values())
    precision = after.record.precision
    # On the shared documents; as recorded if nothing else is known of the score.
    testable = score.aggregation in TESTABLE and panel.documents
    values = {
        side: value(panel, side, score.aggregation) if testable else source.scores[name].value
        for side, source in (("old", before), ("new", after))
    }
    return Change(
        cell=cell,
        task=name[0],
        label=score.label,
        metric=name[1],
        higher_is_better=score.higher_is_better,
        old=values["old"],
        new=values["new"],
        documents=panel.documents if seen else after.scores[name].documents,
        left_out=seen - 2 * panel.documents,
        effect=answer,
        precision=precision.words if precision.in_parts else "",
    )


# --- count answers that quantization changed, from the outcomes of two records


ByTask = Mapping[str, Mapping[str, Flips]]  # task → metric → its flips


def flips_of(
    comparison: Comparison, columns: Mapping[str, Mapping[tuple[str, str], Column]]
) -> dict[str, ByTask]:
    """Return the flips of every quantized cell against the unquantized cell of its checkpoint.
    ``columns``: the outcomes by task, then by cell and metric.
    """
    by_cell: dict[str, dict[Name, Column]] = defaultdict(dict)
    for task in comparison.grid.tasks:  # groups have sums of theirs
        for (cell, metric), column in columns.get(task, {}).items():
            by_cell[cell][task, metric] = column
    names = {cell.key: cell.cell for cell in comparison.grid.cells}
    flips: dict[str, ByTask] = {}
    for cell in comparison.grid.cells:
        record = comparison.records.get(cell.cell)
        if not cell.quantized or status_of(record)[0] != "ok":
            continue
        base = names.get(record.key_parts.get("damage against"))  # what the run measured against
        if base is None and not comparison.no_damage(cell.cell):
            base = f"{cell.checkpoint}/{comparison.unquantized_of(cell.quantizer)}"
        if base is None or status_of(comparison.records.get(base))[0] != "ok":
            continue
        by_task = count_flips(by_cell[base], by_cell[cell.cell])
        flips[cell.cell] = by_task | _of_groups(record, by_task)
    return flips


def cell_flips(store: Store, record: Record) -> ByTask:
    """Return the flips of one record against the unquantized cell that its key names; nothing if
    it names none, or that cell has no outcomes here."""
    base = record.key_parts.get("damage against")
    for cell in store.manifest().cells if base and store.has_manifest() else ():
        if cell.key == base:
            try:
                before = store.get(cell)
                if before is None:
                    return {}
                by_task = count_flips(read_columns(store, before), read_columns(store, record))
            except ResultsError:
                return {}
            ordered: dict[str, dict[str, Flips]] = {}
            for score in record.scores:  # as the record lists them
                if (flips := by_task.get(score.task, {}).get(score.metric)) is not None:
                    ordered.setdefault(score.task, {})[score.metric] = flips
            return ordered
    return {}


def count_flips(
    base: Mapping[Name, Column], quantized: Mapping[Name, Column]
) -> dict[str, dict[str, Flips]]:
    """Return, by task and metric, how many documents quantization made wrong and how many right.

    Metrics whose documents are neither right nor wrong are left out.
    """
    flips: dict[str, dict[str, Flips]] = {}
    for (task, metric), after in quantized.items():
        if (before := base.get((task, metric))) is None:
            continue
        panel = Panel.of({"before": before, "after": after})
        right = right_answers(panel) if panel.documents else None
        if right is None:
            continue
        right_before, right_after = right.T
        flips.setdefault(task, {})[metric] = Flips(
            documents=panel.documents,
            right_to_wrong=int((right_before & ~right_after).sum()),
            wrong_to_right=int((~right_before & right_after).sum()),
        )
    return flips


def right_answers(panel: Panel) -> NDArray | None:
    """Return which documents of one metric are right in two cells, bool [documents, 2]; None if
    they are neither right nor wrong.

    ``values`` are 0 or 1 (``weights`` 1). For f1 and mcc they are the right answer, the same in
    both cells, and ``weights`` the prediction.
    """
    values, weights = panel.values, panel.weights
    if (weights == 1).all():
        return values == 1 if np.isin(values, (0, 1)).all() else None
    integers = (values % 1 == 0).all() and (weights % 1 == 0).all()
    return values == weights if integers and (values[:, 0] == values[:, 1]).all() else None


def _of_groups(record: Record, by_task: ByTask) -> dict[str, dict[str, Flips]]:
    """The sums over the tasks of each group, if all of them have flips."""
    sums: dict[str, dict[str, Flips]] = {}
    for group in record.groups:
        every = [by_task.get(task, {}).get(group.metric) for task in group.tasks]
        if None not in every:
            totals = {
                name: sum(getattr(flips, name) for flips in every) for name in Flips.model_fields
            }
            sums.setdefault(group.group, {})[group.metric] = Flips(**totals)
    return sums
