"""What changed between two sets of results of the same cells, document by document.

Serves ``qbench compare A B`` (two results folders) and the gate (a folder against a baseline).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from qbench.comparison.metrics import base_metric, is_percentage
from qbench.comparison.result_sets import CellResults, Name, ResultSet, read_results
from qbench.comparison.seed_changes import SeedChange, seed_changes
from qbench.comparison.statistics import Effect, Panel, adjust, effect, value
from qbench.comparison.trainings import differences, unlike
from qbench.errors import ResultsError
from qbench.records import Score
from qbench.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One metric of one task of one cell, before and after, on the documents that both saw."""

    cell: str
    task: str
    label: str
    metric: str
    higher_is_better: bool
    old: float
    new: float
    documents: int
    left_out: int  # documents that only one side saw, counted on both
    effect: Effect | None  # new − old; None where too few documents or an unknown aggregation
    precision: str = ""  # of a cell whose activations or KV cache are quantized: ``W4A8KV4``

    @property
    def told(self) -> str:
        """The cell, with its precision."""
        return f"{self.cell} ({self.precision})" if self.precision else self.cell

    @property
    def base_metric(self) -> str:
        """The metric without lm-eval's filter."""
        return base_metric(self.metric)

    @property
    def percent(self) -> bool:
        return is_percentage(self.metric)


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Two results side by side. ``problems``: cells that cannot be compared, and why."""

    old: str
    new: str
    lines: tuple[Change, ...]
    problems: tuple[str, ...]
    seeds: tuple[SeedChange, ...] = ()  # over several trainings of one kind


def compare_results(a: Store, b: Store) -> Changes:
    """What the results of folder ``b`` change against those of folder ``a``, paired.

    Raises ResultsError where the folders have no cell in common, score different data, or hold
    models that were trained otherwise than in the normalizer and the seed, in one of them or both.
    """
    old, new = read_results(a), read_results(b)
    for folder, results in ((a, old), (b, new)):
        _trained_alike(folder, results)
    _same_trainings(old, new)
    lines = compare_sets(old, new)
    if not lines:
        raise ResultsError(
            f"{a.name} and {b.name} have no scored cell in common; "
            "compare two results of one recipe"
        )
    problems = [f"{cell}: {a.name}: {why}" for cell, why in old.broken.items()]
    problems += [f"{cell}: {b.name}: {why}" for cell, why in new.broken.items()]
    for one, other, folder in ((old, new, b), (new, old, a)):
        known = other.cells.keys() | other.broken.keys()
        problems += [f"{cell}: not in {folder.name}" for cell in one.cells.keys() - known]
    problems += _other_precisions(old, new)
    return Changes(
        old=a.name,
        new=b.name,
        lines=tuple(lines),
        problems=tuple(problems),
        seeds=seed_changes(old, new),
    )


def compare_sets(old: ResultSet, new: ResultSet) -> list[Change]:
    """Every metric that a cell has on both sides; p-values adjusted over all of them.

    Raises ResultsError where a task's definition or data differ.
    """
    lines = []
    for cell, before in old.cells.items():
        after = new.cells.get(cell)
        if after is None:
            continue
        _same_tasks(cell, before, after)
        for name, score in before.scores.items():
            if name in after.scores:
                lines.append(_change(cell, name, score, before, after))
    tested = [index for index, line in enumerate(lines) if line.effect]
    adjusted = adjust([lines[index].effect for index in tested])
    for index, one in zip(tested, adjusted, strict=True):
        lines[index] = dataclasses.replace(lines[index], effect=one)
    return lines


def _other_precisions(old: ResultSet, new: ResultSet) -> list[str]:
    """Cells of one name that are not quantized alike, or whose products are."""
    both = [(cell, one, new.cells[cell]) for cell, one in old.cells.items() if cell in new.cells]
    return [
        f"{cell}: {before.precision.words} before, {after.precision.words} now"
        for cell, before, after in both
        if before.precision.words != after.precision.words
    ]


def _same_tasks(cell: str, before: CellResults, after: CellResults) -> None:
    for task in dict.fromkeys([*before.documents, *before.tasks]):
        told = task in before.documents and task in after.documents
        sides = (before.documents, after.documents) if told else (before.tasks, after.tasks)
        one, other = (digests.get(task) for digests in sides)
        if None not in (one, other) and one != other:
            raise ResultsError(
                f"{cell}: {task}: its definition or data are not those of the other results, so "
                "documents cannot be paired; score both on the same data (or make a new baseline)"
            )


def _same_trainings(old: ResultSet, new: ResultSet) -> None:
    for cell, before in old.cells.items():
        after = new.cells.get(cell)
        if after is None or before.training is None or after.training is None:
            continue
        if differing := differences(before.training, after.training, seeds=True):
            raise ResultsError(
                f"{cell}: trained otherwise than in the other results, in more than the normalizer "
                f"and the seed: {'; '.join(differing)}; compare results of models that were "
                "trained alike"
            )


def _trained_alike(folder: Store, results: ResultSet) -> None:
    """Of the checkpoints that one folder compares."""
    trained = {
        cell.split("/", 1)[0]: found.training
        for cell, found in results.cells.items()
        if found.training is not None
    }
    checkpoints = dict.fromkeys(cell.split("/", 1)[0] for cell in results.cells)
    if found := unlike(trained, list(checkpoints), results.replicates):
        raise ResultsError(f"{folder.directory}: {found[0]} Compare models that were trained alike")


def _change(cell: str, name: Name, score: Score, before: CellResults, after: CellResults) -> Change:
    columns = {"new": after.columns[name], "old": before.columns[name]}
    panel = Panel.of(columns)
    found = None
    if panel.documents > 1:
        signs = {"new": 1, "old": -1}
        found = effect(panel, signs, score.aggregation)
    seen = sum(len(column.documents) for column in columns.values())
    # On the shared documents; as recorded where we do not know how the score is made.
    values = {
        side: value(panel, side, score.aggregation) if found else source.scores[name].value
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
        documents=panel.documents,
        left_out=seen - 2 * panel.documents,
        effect=found,
        precision=after.precision.words if after.precision.in_parts else "",
    )
