"""What the statistics say about the claim, in sentences that only count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from qbench.comparison.lines import Comparison, Line, SeedLine, redundant
from qbench.statistics import Effect, SeedEffect


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """How many effects of one question point which way, how many of them significantly (Holm,
    5 %), and how many are exactly 0."""

    asked: int
    better: int
    surely_better: int
    worse: int
    surely_worse: int
    tied: int


def count(answers: Iterable[tuple[Line, Effect]]) -> Count:
    """Better means in the metric's good direction."""
    signs = []
    for line, effect in answers:
        good = effect.estimate * (1 if line.higher_is_better else -1)
        signs.append((good, effect.mark == "‡"))
    return Count(
        asked=len(signs),
        better=sum(good > 0 for good, _ in signs),
        surely_better=sum(good > 0 and sure for good, sure in signs),
        worse=sum(good < 0 for good, _ in signs),
        surely_worse=sum(good < 0 and sure for good, sure in signs),
        tied=sum(good == 0 for good, _ in signs),
    )


def answers(comparison: Comparison, question: str, checkpoint: str) -> list[tuple[Line, Effect]]:
    """All lines' effects of one question (``deltas``, ``damages``, ``differences``)."""
    return [
        (line, getattr(line, question)[checkpoint])
        for line in comparison.lines
        if checkpoint in getattr(line, question) and not redundant(line, comparison.lines)
    ]


def summary(comparison: Comparison) -> list[str]:
    """One sentence a question and checkpoint, then what is missing."""
    base = comparison.baseline
    sentences = []
    for other in comparison.others:
        quantized = [a for a in answers(comparison, "deltas", other) if a[0].quantized]
        plain = [a for a in answers(comparison, "deltas", other) if not a[0].quantized]
        if plain:
            sentences.append(
                f"Unquantized, {_which(other, base, count(plain), 'is better', 'is worse')}"
            )
        if quantized:
            told = _which(other, base, count(quantized), "is better", "is worse")
            sentences.append(f"Quantized, {told}")
        differences = answers(comparison, "differences", other)
        if differences:
            found = count(differences)
            sentences.append(
                f"Quantization costs {other} less than {base} in {found.better} of {found.asked} "
                f"comparisons ({found.surely_better} significantly), more in {found.worse} "
                f"({found.surely_worse} significantly){_tied(found, 'just as much')}, by the "
                "difference of their damages."
            )
    for checkpoint in comparison.checkpoints:
        damages = answers(comparison, "damages", checkpoint)
        if damages:
            found = count(damages)
            sentences.append(
                f"Quantization makes {checkpoint} worse in {found.worse} of {found.asked} scores "
                f"({found.surely_worse} significantly)."
            )
    if any(line.deltas or line.damages for line in comparison.lines):
        sentences.append(
            "Significant: at 5 % after Holm's correction over all comparisons of that question."
        )
    problems = comparison.problems()
    if problems:
        cells = len(comparison.grid.cells)
        sentences.append(f"{len(problems)} of {cells} cells have no valid score: see below.")
    return sentences


def _which(other: str, base: str, found: Count, better: str, worse: str) -> str:
    return (
        f"{other} {better} than {base} in {found.better} of {found.asked} scores "
        f"({found.surely_better} significantly), {worse} in {found.worse} "
        f"({found.surely_worse} significantly){_tied(found, 'equal')}."
    )


def _tied(found: Count, words: str) -> str:
    return f" and {words} in {found.tied}" if found.tied else ""


def headline(comparison: Comparison) -> str:
    """The answer in one sentence with its certainty, of the first question that has effects."""
    base, *others = comparison.groups
    lines = comparison.seeds or comparison.lines
    for question, better, worse in (
        ("differences", "Quantization hurts {other} less than {base}", "more"),
        ("damages", "Quantization makes {other} better", "worse"),
        ("deltas", "{other} is better than {base}", "worse"),
    ):
        named = others if question != "damages" else [*others, base]
        for other in named:
            found = count(_answers(comparison, lines, question, other))
            if found.asked:
                sure = found.surely_better + found.surely_worse
                if not sure:
                    return (
                        f"None of {found.asked} differences is significant (5 %, Holm’s "
                        "correction)."
                    )
                return (
                    f"{better.format(other=other, base=base)} in {found.surely_better} of "
                    f"{found.asked} comparisons and {worse} in {found.surely_worse}. The other "
                    f"{found.asked - sure} differences are not significant (5 %, Holm’s "
                    "correction)."
                )
    cells = len(comparison.grid.cells)
    return f"{len(comparison.records)} of {cells} cells have a record."


def _answers(
    comparison: Comparison, lines: Iterable[Line | SeedLine], question: str, group: str
) -> Iterator[tuple[Line, Effect | SeedEffect]]:
    for one in lines:
        line = one.line if isinstance(one, SeedLine) else one
        effect = getattr(one, question).get(group)
        asked = question != "deltas" or line.quantized or not comparison.unquantized
        if effect is not None and asked and not redundant(line, comparison.lines):
            yield line, effect
