"""Infer from one primary measure: of one precision, two precisions, two models.

The measure is KL divergence from the unquantized model, or the loss in a score that the recipe
names. A document's KL divergence is the mean over its scored tokens, in nats per token; a cell's is
the mean over all documents of all tasks, documents weighted alike, and is inferred on its
logarithm. All is paired by document.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from qbench.comparison.rows import Comparison, Losses, Row, status_of
from qbench.metrics import is_percentage, kind_of
from qbench.records import ANSWERS, Damage, Record
from qbench.statistics import (
    KL_MEAN,
    Column,
    Effect,
    Missing,
    Panel,
    adjust,
    effects,
    over_seeds,
)
from qbench.statistics.panel import Signs, with_shared_documents
from qbench.store import Store

NO_DOCUMENTS = "records of earlier versions hold no KL by document"
Columns = Mapping[object, Column]


def kl_of(comparison: Comparison, store: Store) -> Losses:
    """Return the KL divergences of all cells of a results folder that have them, with intervals and
    tests. Raises ResultsError if a table of divergences is damaged."""
    records = {
        name: record
        for name, record in comparison.records.items()
        if status_of(record)[0] == "ok" and record.quantized
    }
    return kl_from(comparison, {name: kl_column(store, each) for name, each in records.items()})


def kl_from(comparison: Comparison, by_document: Mapping[str, Column | None]) -> Losses:
    """Return the KL divergences of cells from their columns by document; a cell whose column is
    None gets its record's mean without an interval."""
    means = {
        name: float(column.values.mean()) if column else mean_of_tasks(comparison.records[name])
        for name, column in by_document.items()
    }
    columns = with_shared_documents({name: each for name, each in by_document.items() if each})
    return _losses(
        comparison,
        Losses(measure="KL", means={name: mean for name, mean in means.items() if mean is not None},
               kind="log ratio"),
        {name: {name: 1.0} for name in columns}, columns, KL_MEAN,
    )  # fmt: skip


def score_losses(
    comparison: Comparison, columns: Mapping[str, Mapping[tuple[str, str], Column]], primary: str
) -> Losses:
    """Return what quantized cells lose in the score ``primary``, TASK/METRIC.

    ``columns``: task → (cell, metric) → outcomes.
    """
    task, _, metric = primary.partition("/")
    rows = [row for row in comparison.lines if (row.task, row.metric) == (task, metric)]
    aggregation = rows[0].aggregation if rows else ""
    terms, means = {}, {}
    for row in rows:
        worse = -1.0 if row.higher_is_better else 1.0
        for entry in row.entries:
            if not row.quantized or comparison.no_damage(entry.cell):
                continue
            base = f"{entry.checkpoint}/{comparison.unquantized_of(row.quantizer)}"
            signs = {(entry.cell, metric): worse, (base, metric): -worse}
            if all(name in columns.get(task, {}) for name in signs):
                terms[entry.cell] = signs
            if (loss := _loss(rows, row, entry.cell, base)) is not None:
                means[entry.cell] = worse * loss
    kind = kind_of(aggregation)
    losses = Losses(measure=primary, means=means, kind=kind, percent=is_percentage(metric))
    return _losses(comparison, losses, terms, columns.get(task, {}), aggregation)


def _loss(rows: Sequence[Row], row: Row, cell: str, base: str) -> float | None:
    """Return the score of the cell ``cell`` minus that of ``base`` in ``rows``, the rows of the
    metric of ``row``; for perplexities the difference of logarithms. None if either is missing."""
    values = {entry.cell: entry.value for each in rows for entry in each.entries}
    before, after = values.get(base), values.get(cell)
    if None in (before, after):
        return None
    return math.log(after / before) if row.ratio else after - before


def _losses(
    comparison: Comparison, losses: Losses, terms: Mapping[str, Signs], columns: Columns,
    aggregation: str,
) -> Losses:  # fmt: skip
    """Add intervals, pairs and contrasts to ``losses``. ``terms``: cell → the signed columns whose
    sum is its loss."""

    inferred = dict(zip(terms, effects(columns, [*terms.values()], aggregation), strict=True))
    cells = {cell: inferred.get(cell, Missing(reason=NO_DOCUMENTS)) for cell in losses.means}
    pairs: dict[tuple[str, str, str], Effect] = {}
    for checkpoint in comparison.checkpoints:
        cells_of = {name: terms[f"{checkpoint}/{name}"] for name in comparison.quantizers
                    if f"{checkpoint}/{name}" in terms}  # fmt: skip
        signs = {
            (checkpoint, a, b): _sum([(cells_of[a], 1), (cells_of[b], -1)])
            for a, b in combinations(cells_of, 2)
        }
        answers = effects(columns, [*signs.values()], aggregation)
        pairs |= _adjusted(dict(zip(signs, answers, strict=True)))
    contrasts, overall = {}, {}
    base, *others = comparison.groups.items()
    for group, members in others:
        both = (*members, *base[1])
        shared = [name for name in comparison.quantizers
                  if all(f"{member}/{name}" in losses.means for member in both)]  # fmt: skip

        def answer(names: list[str], members=members, both=both):
            result = Missing(reason=NO_DOCUMENTS)
            if all(f"{member}/{name}" in terms for member in both for name in names):
                result = _against(members, base[1], names, terms, columns, aggregation)
            if isinstance(result, Missing):  # its size at least is known
                size = _mean_difference(losses, members, base[1], names)
                result = Missing(reason=result.reason, estimate=size, kind=losses.kind)
            return result

        contrasts |= {(group, name): answer([name]) for name in shared}
        if shared:
            overall[group] = answer(shared)
    return replace(
        losses, cells=cells, pairs=pairs, contrasts=_adjusted(contrasts, keep=True),
        overall=_adjusted(overall, keep=True),
    )  # fmt: skip


def _against(
    members: Sequence[str], base: Sequence[str], names: Sequence[str],
    terms: Mapping[str, Signs], columns: Columns, aggregation: str,
) -> Effect | Missing:  # fmt: skip
    """Return the effect of ``members`` minus ``base``, as a mean over the quantizers ``names``."""

    def signs(member: str, sign: float) -> list[tuple[Signs, float]]:
        return [(terms[f"{member}/{name}"], sign / len(names)) for name in names]

    if len(members) == len(base):
        pairs = zip(members, base, strict=True)
        groups = [[_sum([*signs(a, 1), *signs(b, -1)]) for a, b in pairs]]
    else:
        groups = [[_sum(signs(a, 1)) for a in members], [_sum(signs(b, -1)) for b in base]]
    used = dict.fromkeys(name for group in groups for each in group for name in each)
    if len(members) == len(base) == 1:
        return effects(columns, groups[0], aggregation)[0]
    return over_seeds(Panel.of({name: columns[name] for name in used}), groups, aggregation)


def _sum(parts: Iterable[tuple[Signs, float]]) -> dict[object, float]:
    """Return the sum of signed columns, each times a factor; columns that cancel are left out."""
    total: dict[object, float] = defaultdict(float)
    for signs, factor in parts:
        for name, sign in signs.items():
            total[name] += factor * sign
    return {name: sign for name, sign in total.items() if abs(sign) > 1e-12}


def _mean_difference(
    losses: Losses, members: Sequence[str], base: Sequence[str], names: Sequence[str]
) -> float | None:
    """Return the mean loss of ``members`` minus that of ``base`` over the quantizers ``names``;
    None if one is missing."""
    sides = []
    for group in (members, base):
        sizes = [losses.size(f"{member}/{name}") for member in group for name in names]
        sides.append(None if None in sizes else sum(sizes) / len(sizes))
    return None if None in sides else sides[0] - sides[1]


def _adjusted(answers: Mapping, *, keep: bool = False) -> dict:
    """Return the effects with p adjusted over all of them; with ``keep`` also the Missing ones."""
    tested = {key: each for key, each in answers.items() if not isinstance(each, Missing)}
    tested = dict(zip(tested, adjust(list(tested.values())), strict=True))
    return {**answers, **tested} if keep else tested


def kl_column(store: Store, record: Record) -> Column | None:
    """Return a record's mean KL divergence per document over all tasks; without tasks that have it,
    along the model's answers; None without either."""
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
    return Column(documents=documents, values=totals / counts, weights=np.ones(len(documents)))


def mean_of_tasks(record: Record) -> float | None:
    """Return a record's mean KL divergence, tasks weighted by their documents; without tasks that
    have it, along the model's answers; None without either."""
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
