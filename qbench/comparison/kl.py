"""Infer from KL divergences: of one precision, of the ratio of two, of the ratio of two models.

A document's KL divergence is the mean over its scored tokens, in nats per token. A cell's is the
mean over all documents of all tasks, documents weighted alike. All is inferred on logarithms,
paired by document.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from qbench.comparison.answers import kl_column_of, split_prompts
from qbench.comparison.rows import KL, Comparison, status_of
from qbench.records import ANSWERS, Damage, Record
from qbench.statistics import (
    LOG_MEAN,
    Column,
    Effect,
    Missing,
    Panel,
    SeedEffect,
    adjust,
    effect,
    over_seeds,
)
from qbench.store import Store

NO_DOCUMENTS = "its record holds no KL by document"


def kl_of(comparison: Comparison, store: Store) -> KL:
    """Return the KL divergences of all cells of a results folder that have any.

    Raises ResultsError if a table of divergences is damaged.
    """
    records = {
        name: record
        for name, record in comparison.records.items()
        if status_of(record)[0] == "ok" and record.quantized
    }
    return kl_from(comparison, {name: kl_column(store, one) for name, one in records.items()})


def kl_from(comparison: Comparison, found: Mapping[str, Column | None]) -> KL:
    """Return the KL divergences of cells whose documents' divergences are ``found``; of those
    without, the mean that their records have."""
    means = {
        name: float(column.values.mean()) if column else mean_of_tasks(comparison.records[name])
        for name, column in found.items()
    }
    columns = {name: column for name, column in found.items() if column}
    cells = {
        name: _effect(columns, {name: 1}) if name in columns else Missing(reason=NO_DOCUMENTS)
        for name, mean in means.items()
        if mean is not None
    }
    contrasts, overall = _contrasts(comparison, columns)
    return KL(
        means={name: mean for name, mean in means.items() if mean is not None},
        cells=cells,
        pairs=_pairs(comparison, columns),
        contrasts=contrasts,
        overall=overall,
    )


def kl_column(store: Store, record: Record) -> Column | None:
    """Return a record's KL divergence by document of all tasks; None if it holds none. Answers are
    apart: theirs is returned if no task has any."""
    if "divergences" not in record.files:
        if ANSWERS not in record.files or mean_of_tasks(record) is None:
            return None
        return kl_column_of(split_prompts(store.answers(record))[0])
    table = store.divergences(record)
    tokens = table["tokens"].fillna(1).to_numpy(float)
    names = table["task"].astype(str) + " " + table["document"].astype(str)
    found = Column.of(names.to_numpy(str), table["kl"].to_numpy(float) * tokens, tokens)
    scored = found.weights > 0
    return Column(
        documents=found.documents[scored],
        values=found.values[scored] / found.weights[scored],
        weights=np.ones(int(scored.sum())),
    )


def mean_of_tasks(record: Record) -> float | None:
    """Return the mean KL divergence from a record's tasks alone, by their documents; None without
    any. As :func:`kl_column`, that along answers if no task has any."""
    if not isinstance(record.damage, Damage):
        return None
    documents = {score.task: score.documents for score in record.scores}
    found = [
        (documents.get(task, 1), damage.distributions.kl.mean)
        for task, damage in record.damage.tasks.items()
        if damage.distributions and (task != ANSWERS or len(record.damage.tasks) == 1)
    ]
    total = sum(count for count, _ in found)
    return sum(count * mean for count, mean in found) / total if total else None


def _effect(columns: Mapping[str, Column], signs: Mapping[str, float]) -> Effect | Missing:
    return effect(Panel.of({name: columns[name] for name in signs}), signs, LOG_MEAN)


def _pairs(
    comparison: Comparison, columns: Mapping[str, Column]
) -> dict[tuple[str, str, str], Effect]:
    found: dict[tuple[str, str, str], Effect] = {}
    for checkpoint in comparison.checkpoints:
        own = [cell for cell in comparison.quantizers if f"{checkpoint}/{cell}" in columns]
        tested = {}
        for one, other in combinations(own, 2):
            signs = {f"{checkpoint}/{one}": 1, f"{checkpoint}/{other}": -1}
            answer = _effect(columns, signs)
            if isinstance(answer, Effect):
                tested[checkpoint, one, other] = answer
        found |= dict(zip(tested, adjust(list(tested.values())), strict=True))
    return found


def _contrasts(
    comparison: Comparison, columns: Mapping[str, Column]
) -> tuple[dict[tuple[str, str], Effect | SeedEffect], dict[str, Effect | SeedEffect]]:
    groups = comparison.groups
    base, *others = groups
    found: dict[tuple[str, str], Effect | SeedEffect] = {}
    overall: dict[str, Effect | SeedEffect] = {}
    for group in others:
        members = [*groups[base], *groups[group]]
        shared = [
            name
            for name in comparison.quantizers
            if all(f"{member}/{name}" in columns for member in members)
        ]
        for name in shared:
            answer = _against(groups[group], groups[base], [name], columns)
            if not isinstance(answer, Missing):
                found[group, name] = answer
        if shared:
            answer = _against(groups[group], groups[base], shared, columns)
            if not isinstance(answer, Missing):
                overall[group] = answer
    adjusted = dict(zip(found, adjust(list(found.values())), strict=True))
    return adjusted, dict(zip(overall, adjust(list(overall.values())), strict=True))


def _against(
    members: Sequence[str],
    base: Sequence[str],
    quantizers: Sequence[str],
    columns: Mapping[str, Column],
) -> Effect | SeedEffect | Missing:
    """Return the logarithm of the KL of ``members`` over that of ``base``, mean over
    ``quantizers``."""
    share = 1 / len(quantizers)

    def signs(member: str, sign: float) -> dict[str, float]:
        return {f"{member}/{name}": sign * share for name in quantizers}

    if len(members) == len(base) == 1:
        return _effect(columns, signs(members[0], 1) | signs(base[0], -1))
    if len(members) == len(base):
        pairs = zip(members, base, strict=True)
        groups = [[signs(one, 1) | signs(other, -1) for one, other in pairs]]
    else:
        groups = [[signs(one, 1) for one in members], [signs(other, -1) for other in base]]
    names = {name for part in groups for one in part for name in one}
    return over_seeds(Panel.of({name: columns[name] for name in names}), groups, LOG_MEAN)


def nats(logarithm: float) -> str:
    """Return a KL divergence with two to three digits: ``0.29``, ``0.0041``, ``1.9``."""
    value = math.exp(logarithm)
    return f"{value:.2f}" if 0.1 <= value < 10 else f"{value:.2g}"
