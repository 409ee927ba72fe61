"""Infer from one primary measure: of one precision, two precisions, two models; paired by document.

The measure is KL divergence from the unquantized model, or the loss in a score that the recipe
names. A document's KL divergence is the mean over its scored tokens, in nats per token; a cell's is
the mean over all documents of all tasks, documents weighted alike, inferred on its logarithm."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from statistics import fmean

import numpy as np

from qbench.comparison.rows import Comparison, status_of
from qbench.metrics import is_percentage, kind_of
from qbench.records import ANSWERS, Damage, Record, Unavailable
from qbench.statistics import (
    KL_MEAN,
    Column,
    Effect,
    Missing,
    Trainings,
    adjust,
    effects,
    over_trainings,
)
from qbench.statistics.effect import Kind
from qbench.statistics.panel import Signs
from qbench.store import Store

NO_DOCUMENTS = "records of earlier versions hold no KL by document"
Columns = Mapping[object, Column]


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Hold what quantized cells lose in one measure: ``KL``, or a score, TASK/METRIC.

    ``means``: cell → KL in nats per token, or loss in the score on the scale that is compared.
    ``terms``: cell → the signed ``columns`` whose sum is its loss, of those with outcomes.
    ``cells``: cell → the loss with an interval (of KL its logarithm), or why there is none.
    ``contrasts``: (checkpoint or group, quantizer) → what it loses more than the baseline; p
    adjusted over all. ``overall``: the same by checkpoint or group, mean over the quantizers that
    both have. Of KL and perplexities differences are logarithms of ratios."""

    measure: str
    aggregation: str
    kind: Kind
    percent: bool = False
    means: Mapping[str, float]
    terms: Mapping[str, Signs]
    columns: Columns
    cells: Mapping[str, Effect | Missing] = field(default_factory=dict)
    contrasts: Mapping[tuple[str, str], Effect | Missing] = field(default_factory=dict)
    overall: Mapping[str, Effect | Missing] = field(default_factory=dict)

    @property
    def is_kl(self) -> bool:
        """Return whether the measure is KL divergence."""
        return self.measure == "KL"

    def size(self, cell: str) -> float | None:
        """Return a cell's mean on the scale that is compared: of KL its logarithm. None if it has
        none, or for a KL of 0."""
        mean = self.means.get(cell)
        if mean is None or not self.is_kl:
            return mean
        return math.log(mean) if mean > 0 else None

    @cached_property
    def pairs(self) -> dict[tuple[str, str, str], Effect]:
        """Return (checkpoint, quantizer, another) → how much more the first quantizer loses than
        the other; p adjusted over a checkpoint's pairs, those without a test left out."""
        cells: dict[str, list[str]] = defaultdict(list)
        for cell in self.terms:
            cells[cell.rpartition("/")[0]].append(cell)
        pairs: dict[tuple[str, str, str], Effect] = {}
        for checkpoint, names in cells.items():
            signs = {
                (checkpoint, *(name.rpartition("/")[2] for name in pair)): _sum(
                    [(self.terms[pair[0]], 1), (self.terms[pair[1]], -1)]
                )
                for pair in combinations(names, 2)
            }
            made = effects(self.columns, [*signs.values()], self.aggregation)
            adjust(made)
            answers = zip(signs, made, strict=True)
            pairs |= {key: each for key, each in answers if isinstance(each, Effect)}
        return pairs


def kl_of(comparison: Comparison, store: Store) -> Losses:
    """Return the KL divergences of the quantized cells that have scores."""
    return kl_from(comparison, {
        name: kl_column(store, record) for name, record in comparison.records.items()
        if status_of(record)[0] == "ok" and record.quantized
    })  # fmt: skip


def kl_from(comparison: Comparison, by_document: Mapping[str, Column | None]) -> Losses:
    """Return the KL divergences of cells from ``by_document``, cell → KL per document; a cell whose
    column is None gets its record's mean without an interval, or is left out if it has none."""
    columns = {name: column for name, column in by_document.items() if column}
    means = {
        name: float(column.values.mean()) if column else mean_of_tasks(comparison.records[name])
        for name, column in by_document.items()
    }
    means = {name: mean for name, mean in means.items() if mean is not None}
    terms = {f"{checkpoint}/{name}": {f"{checkpoint}/{name}": 1.0}
             for checkpoint in comparison.grid.checkpoints for name in comparison.quantizers
             if f"{checkpoint}/{name}" in columns}  # fmt: skip
    losses = Losses(
        measure="KL", aggregation=KL_MEAN, kind="log ratio", means=means, terms=terms,
        columns=columns,
    )  # fmt: skip
    return _inferred(comparison, losses)


def score_losses(
    comparison: Comparison, columns: Mapping[str, Mapping[tuple[str, str], Column]], primary: str
) -> Losses:
    """Return what quantized cells lose in the score ``primary``, TASK/METRIC; cells without an
    unquantized one are left out. ``columns``: task → (cell, metric) → outcomes."""
    task, _, metric = primary.partition("/")
    rows = [row for row in comparison.lines if (row.task, row.metric) == (task, metric)]
    aggregation = rows[0].aggregation if rows else ""
    values = {entry.cell: entry.value for row in rows for entry in row.entries.values()}
    terms, means = {}, {}
    for row in rows:
        worse = -1.0 if row.higher_is_better else 1.0
        for entry in row.entries.values():
            if not row.quantized or comparison.no_damage(entry.cell):
                continue
            base = f"{entry.checkpoint}/{comparison.unquantized_of[row.quantizer]}"
            signs = {(entry.cell, metric): worse, (base, metric): -worse}
            if all(name in columns.get(task, {}) for name in signs):
                terms[entry.cell] = signs
            before, after = values.get(base), entry.value
            if None not in (before, after):
                loss = math.log(after / before) if row.ratio else after - before
                means[entry.cell] = worse * loss
    return _inferred(comparison, Losses(
        measure=primary, aggregation=aggregation, kind=kind_of(aggregation),
        percent=is_percentage(metric), means=means, terms=terms, columns=columns.get(task, {}),
    ))  # fmt: skip


def _inferred(comparison: Comparison, losses: Losses) -> Losses:
    """Return ``losses`` with intervals of cells, and of groups of trainings against the first."""
    (_, base), *others = comparison.groups.items()
    asked: dict[tuple[str, str], tuple[Sequence[str], Sequence[str]]] = {}  # "": over all
    for group, members in others:
        both = (*members, *base)
        shared = [name for name in comparison.quantizers
                  if all(f"{member}/{name}" in losses.means for member in both)]  # fmt: skip
        asked |= {(group, name): (members, [name]) for name in shared}
        if shared:
            asked[group, ""] = (members, shared)
    trainings = {key: _against(losses, base, *each) for key, each in asked.items()}
    single = {key: each[0][0] for key, each in trainings.items() if [*map(len, each)] == [1]}
    signs = losses.terms | single  # all at once: their columns are prepared once
    effects_of = effects(losses.columns, [*signs.values()], losses.aggregation)
    made: dict[object, Effect | Missing] = dict(zip(signs, effects_of, strict=True))
    for key, each in trainings.items():
        if each and key not in made:
            made[key] = over_trainings(losses.columns, each, losses.aggregation)
    unknown = Missing(reason=NO_DOCUMENTS)
    answers = {key: _sized(losses, made.get(key, unknown), base, *of) for key, of in asked.items()}
    contrasts = {key: each for key, each in answers.items() if key[1]}
    overall = {group: each for (group, name), each in answers.items() if not name}
    adjust(contrasts.values())
    adjust(overall.values())
    cells = {cell: made.get(cell, unknown) for cell in losses.means}
    return replace(losses, cells=cells, contrasts=contrasts, overall=overall)


def _against(
    losses: Losses, base: Sequence[str], members: Sequence[str], names: Sequence[str]
) -> Trainings:
    """Return the signed columns of ``members`` minus ``base``, as a mean over the quantizers
    ``names``; [] if a cell has no outcomes."""

    def signs(member: str, sign: int) -> Signs:
        return _sum((losses.terms[f"{member}/{name}"], sign / len(names)) for name in names)

    if all(f"{member}/{name}" in losses.terms for member in (*members, *base) for name in names):
        return minus(members, base, signs)
    return []


def _sized(
    losses: Losses, answer: Effect | Missing, base: Sequence[str], members: Sequence[str],
    names: Sequence[str],
) -> Effect | Missing:  # fmt: skip
    """Return ``answer``, what ``members`` lose more than ``base`` as a mean over the quantizers
    ``names``; if it has no interval, with its size."""
    if isinstance(answer, Effect):
        return answer
    sides = [[losses.size(f"{member}/{name}") for member in group for name in names]
             for group in (members, base)]  # fmt: skip
    ours, theirs = (None if None in side else fmean(side) for side in sides)
    size = None if None in (ours, theirs) else ours - theirs
    return Missing(reason=answer.reason, estimate=size, kind=losses.kind)


def minus(
    members: Sequence[str], base: Sequence[str], signs: Callable[[str, int], Signs]
) -> Trainings:
    """Return the contrasts of ``members`` minus ``base``, as signed scores: ``[[member − base,
    …]]``, pair by pair, if both have equally many trainings, else ``[members, −base]``, each group
    by itself. ``signs`` gives the signed scores of a checkpoint, times a sign."""
    ours, theirs = [signs(name, 1) for name in members], [signs(name, -1) for name in base]
    if len(ours) != len(theirs):
        return [ours, theirs]
    return [[our | their for our, their in zip(ours, theirs, strict=True)]]


def _sum(parts: Iterable[tuple[Signs, float]]) -> dict[object, float]:
    """Return the sum of signed columns, each times a factor; columns that cancel are left out."""
    total: dict[object, float] = defaultdict(float)
    for signs, factor in parts:
        for name, sign in signs.items():
            total[name] += factor * sign
    return {name: sign for name, sign in total.items() if abs(sign) > 1e-12}


def kl_column(store: Store, record: Record) -> Column | None:
    """Return a record's mean KL divergence per document, in nats per token, over all tasks,
    documents without scored tokens left out; without tasks that have it, along the model's answers;
    None without either, or if the unquantized cell ended before all of them were measured."""
    if isinstance(record.damage, Unavailable):
        return None
    if "divergences" not in record.files:
        table = store.outcomes(record)
        along = table[(table["task"] == ANSWERS) & (table["metric"] == "kl")]
        names = (ANSWERS + " " + along["document"].astype(str)).to_numpy(str)
        return Column.of(names, along["value"], along["weight"]) if len(along) else None
    documents, index, kl, tokens = store.divergence_arrays(record)
    tokens = np.where(np.isnan(tokens), 1.0, tokens)
    totals, counts = (np.bincount(index, each, len(documents)) for each in (kl * tokens, tokens))
    if not (counts > 0).all():
        scored = counts > 0
        documents, totals, counts = documents[scored], totals[scored], counts[scored]
    return Column(
        documents=documents, values=totals / counts, weights=np.broadcast_to(1.0, len(documents))
    )


def mean_of_tasks(record: Record) -> float | None:
    """Return a record's mean KL divergence in nats per token, tasks weighted by their documents;
    without tasks that have it, along the model's answers; None without either."""
    if not isinstance(record.damage, Damage):
        return None
    documents = {score.task: score.documents for score in record.scores}
    measured = [
        (documents.get(task, 1), damage.distributions.kl.mean)
        for task, damage in record.damage.tasks.items()
        if damage.distributions and (task != ANSWERS or len(record.damage.tasks) == 1)
    ]
    total = sum(count for count, _ in measured)
    return sum(count * mean for count, mean in measured) / total if total else None
