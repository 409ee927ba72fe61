"""Several trainings of one kind as replicates: effects over seeds.

A grid's ``replicates`` names groups of checkpoints; the first group is the baseline of Δ. With as
many trainings in each group the first of one goes with the first of another, and so on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from qbench.comparison.lines import Comparison, Line, redundant
from qbench.comparison.seed_lines import QUESTIONS, TESTED, SeedLine
from qbench.comparison.statistics import Column, Panel, SeedEffect, adjust, mean_score, over_seeds
from qbench.comparison.statistics.seeds import Signs


def seed_lines(
    comparison: Comparison, columns: Mapping[str, Mapping[tuple[str, str], Column]]
) -> tuple[SeedLine, ...]:
    """A line for each of the comparison's that all groups have; ``columns`` as ``read_columns``
    gives them. p-values are adjusted over the grid within each question."""
    if not comparison.grid.replicates:
        return ()
    made = [_line(comparison, line, columns.get(line.task, {})) for line in comparison.lines]
    found = [line for line in made if line is not None]
    for question in TESTED:
        places = [
            (index, group)
            for index, one in enumerate(found)
            for group in getattr(one, question)
            if not redundant(one.line, comparison.lines)
        ]
        answers = adjust([getattr(found[i], question)[group] for i, group in places])
        for (index, group), answer in zip(places, answers, strict=True):
            changed = {**getattr(found[index], question), group: answer}
            found[index] = dataclasses.replace(found[index], **{question: changed})
    return tuple(found)


def _line(
    comparison: Comparison, line: Line, columns: Mapping[tuple[str, str], Column]
) -> SeedLine | None:
    groups = comparison.grid.replicates
    values = {
        group: tuple(line.entry(member).value for member in members)
        for group, members in groups.items()
    }
    found: dict[str, dict[str, SeedEffect]] = {question: {} for question in QUESTIONS}
    means = {}
    for question, group, asked in _questions(comparison, line):
        names = {name: None for part in asked for signs in part for name in signs}
        if not all(name in columns for name in names):
            continue
        panel = Panel.of({name: columns[name] for name in names})
        answer = over_seeds(panel, asked, line.aggregation)
        if answer is not None:
            found[question][group] = answer
            if question == "scores":
                means[group] = mean_score(panel, list(names), line.aggregation)
    return SeedLine(line=line, values=values, means=means, **found) if means else None


def _questions(comparison: Comparison, line: Line) -> Iterator[tuple[str, str, list[list[Signs]]]]:
    """Question, group, and the contrasts of its trainings."""
    groups = comparison.grid.replicates
    base, *others = groups
    whole = comparison.unquantized

    def signs(member: str, sign: int) -> dict[tuple[str, str], int]:
        return {(f"{member}/{line.quantizer}", line.metric): sign}

    def damage(member: str, sign: int) -> dict[tuple[str, str], int]:
        return signs(member, sign) | {(f"{member}/{whole}", line.metric): -sign}

    for group, members in groups.items():
        yield "scores", group, [[signs(member, 1) for member in members]]
    for group in others:
        yield "deltas", group, _against(groups[group], groups[base], signs)
    if not line.quantized or whole is None:
        return
    comparable = {
        group: all(
            comparison.same_weights(f"{member}/{line.quantizer}", f"{member}/{whole}")
            for member in members
        )
        for group, members in groups.items()
    }
    for group, members in groups.items():
        if comparable[group]:
            yield "damages", group, [[damage(member, 1) for member in members]]
            if group != base and comparable[base]:
                yield "differences", group, _against(members, groups[base], damage)


def _against(
    members: Sequence[str], base: Sequence[str], signs: Callable[[str, int], dict]
) -> list[list[Signs]]:
    """One group minus another: pair by pair where there are as many of both."""
    if len(members) == len(base):
        return [
            [signs(one, 1) | signs(other, -1) for one, other in zip(members, base, strict=True)]
        ]
    return [[signs(one, 1) for one in members], [signs(other, -1) for other in base]]
