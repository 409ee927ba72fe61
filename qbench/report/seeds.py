"""Effects over several trainings of each kind: tables, and sentences that only count."""

from __future__ import annotations

from collections.abc import Iterator

from qbench.comparison.changes import training_notes
from qbench.comparison.lines import Comparison, SeedLine, redundant
from qbench.comparison.wording import (
    LEGEND,
    RATIOS_LEGEND,
    SEEDS_LEGEND,
    SHARE,
    SHARE_LEGEND,
    arrow,
    each_text,
    ends_text,
    mean_text,
    mostly_seeds,
    order_note,
    values_text,
)
from qbench.report.table import Cell, DataTable, build, p_value, plain
from qbench.statistics import SeedEffect
from qbench.text import MINUS, NO_VALUE, metric_title, number

NAMES = ["Task", "Metric", "Quantizer"]
TITLES = {
    "differences": "Difference of damages over seeds",
    "damages": "Damage over seeds",
    "deltas": "Scores over seeds",
}


def seed_tables(comparison: Comparison) -> Iterator[DataTable]:
    """The differences of damages first, which the claim is about."""
    lines = _shown(comparison)
    base, *others = comparison.grid.replicates
    claims = {
        "differences": [(group, f"{group}’s {MINUS} {base}’s") for group in others],
        "damages": [(group, group) for group in (base, *others)],
        "deltas": [(group, f"Δ {group} {MINUS} {base}") for group in others],
    }
    for question, groups in claims.items():
        head = list(NAMES)
        if question == "deltas":
            head += [part for group in (base, *others) for part in (group, f"{group}, each")]
        for _, title in groups:
            head += [title, "95 % interval", "each", "p (Holm)", SHARE]
        rows = [_row(one, question, groups) for one in lines if getattr(one, question)]
        if rows:
            told = [LEGEND, SEEDS_LEGEND, SHARE_LEGEND, RATIOS_LEGEND, order_note(comparison)]
            told += training_notes(comparison)
            yield build(
                f"seeds-{question}", "seeds", TITLES[question], " ".join(told), head, rows,
                keys=len(NAMES),
            )  # fmt: skip


def seed_summary(comparison: Comparison) -> list[str]:
    """One sentence a question, then what the uncertainty comes of, then what is missing."""
    base, *others = comparison.grid.replicates
    lines = _shown(comparison)
    sentences = [
        "Several trainings: "
        + ", ".join(f"{len(m)} of {group}" for group, m in comparison.grid.replicates.items())
        + "."
    ]
    asked: list[SeedEffect] = []
    for group in others:
        found = [(one, one.differences[group]) for one in lines if group in one.differences]
        asked += [effect for _, effect in found]
        if found:
            less, surely_less = _count(found, 1)
            more, surely_more = _count(found, -1)
            sentences.append(
                f"Quantization costs {group} less than {base} in {less} of {len(found)} "
                f"comparisons ({surely_less} significantly), more in {more} ({surely_more} "
                "significantly), by the mean over trainings of the difference of their damages."
            )
    if asked:
        mostly = sum(mostly_seeds(effect) for effect in asked)
        sentences.append(
            f"In {mostly} of {len(asked)} of these comparisons seeds, not documents, are the "
            "larger part of the uncertainty."
        )
        sentences.append(
            "Significant: at 5 % after Holm's correction over all comparisons of that question."
        )
    problems = comparison.problems()
    if problems:
        cells = len(comparison.grid.cells)
        sentences.append(f"{len(problems)} of {cells} cells have no sound score: see below.")
    return sentences


def _shown(comparison: Comparison) -> list[SeedLine]:
    return [one for one in comparison.seeds if not redundant(one.line, comparison.lines)]


def _row(one: SeedLine, question: str, groups: list[tuple[str, str]]) -> list[Cell]:
    line = one.line
    row = [
        Cell(text=line.label),
        Cell(text=f"{metric_title(line.metric)} {arrow(line)}"),
        Cell(text=line.quantizer),
    ]
    if question == "deltas":
        for group, values in one.values.items():
            mean = one.means.get(group)
            row.append(Cell(text=number(mean, percent=line.percent), sort=mean))
            row.append(Cell(text=values_text(values, percent=line.percent)))
    for group, _ in groups:
        effect = getattr(one, question).get(group)
        if effect is None:
            row += [Cell(text=NO_VALUE)] * 5
            continue
        row += [
            Cell(text=mean_text(effect, percent=line.percent), sort=effect.estimate),
            Cell(text=ends_text(effect, percent=line.percent), sort=effect.low),
            Cell(text=each_text(effect, percent=line.percent)),
            p_value(effect.p_holm),
            plain(effect.of_seeds, "{:.0%}"),
        ]
    return row


def _count(found: list[tuple[SeedLine, SeedEffect]], sign: int) -> tuple[int, int]:
    """How many effects are better (``sign`` 1) or worse (−1), and how many of them surely."""
    good = [
        effect.mark == "‡"
        for one, effect in found
        if sign * effect.estimate * (1 if one.line.higher_is_better else -1) > 0
    ]
    return len(good), sum(good)
