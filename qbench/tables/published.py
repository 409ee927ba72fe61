"""Scores beside what a paper prints for the same task, metric, method and bits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from qbench.comparison.lines import Comparison, Line
from qbench.metrics import base_metric
from qbench.published import Printed, doubts, printed
from qbench.text import MINUS, NO_VALUE


def find_printed(line: Line, published: str) -> Printed | None:
    """What the paper prints for this line: same task, metric, method and bits. Raises RecipeError
    for an unknown set."""
    return printed(published).get((line.task, base_metric(line.metric), line.method, line.bits))


def standard_errors_away(line: Line, checkpoint: str, value: float) -> float | None:
    """(ours − printed) / our standard error, of perplexities on the scale of their logarithm.

    ``None`` where we have no score or no error.
    """
    entry, interval = line.entry(checkpoint), line.intervals.get(checkpoint)
    stderr = entry.stderr or (interval.stderr if interval else None)
    if entry.value is None or not stderr:
        return None
    if line.ratio:
        return math.log(entry.value / value) * entry.value / stderr
    return (entry.value - value / _unit(line)) / stderr


def models(comparison: Comparison) -> dict[str, str]:
    """Checkpoint → the paper's name for it, by the normalizer that its records state."""
    normalizers = {record.checkpoint: record.normalizer for record in comparison.records.values()}
    return {name: normalizers.get(name, name) for name in comparison.checkpoints}


def printed_cells(
    comparison: Comparison, line: Line, checkpoints: Sequence[str], published: str
) -> list[tuple[str, str]]:
    """Of a row: a cell a checkpoint, then one a Δ, with their heads. Raises RecipeError for an
    unknown set."""
    found, of = find_printed(line, published), models(comparison)
    base, *others = checkpoints
    cells = []
    for name in checkpoints:
        value = found.values.get(of[name]) if found else None
        text = NO_VALUE
        if value is not None:
            text = _away_text(value, standard_errors_away(line, name, float(value)))
        cells.append((f"{name}, printed", text))
    for name in others:
        text = NO_VALUE
        if found and (of[base], of[name]) == ("softmax", "softpick"):
            text = _away_text(found.delta, _delta_away(line, name, found), signed=True)
        cells.append(("Δ, printed", text))
    return cells


def printed_notes(lines: Iterable[Line], published: str) -> list[str]:
    """Where the numbers stand, what their brackets mean, and what is wrong with them."""
    found = [find_printed(line, published) for line in lines]
    sources = list(dict.fromkeys(one.source for one in found if one))
    if not sources:
        return [f"{published} prints none of these cells."]
    told = (
        f"Printed: {published}, {', '.join(sources)}; in brackets ours minus the printed value, in "
        "our standard errors."
    )
    return [told, *(f"Beware: {doubt}" for doubt in doubts(sources))]


def _delta_away(line: Line, checkpoint: str, found: Printed) -> float | None:
    effect = line.deltas.get(checkpoint)
    if effect is None or not effect.interval.stderr:
        return None
    if effect.kind == "log ratio":
        stated = math.log(found.values["softpick"] / found.values["softmax"])
    else:
        stated = float(found.delta) / _unit(line)
    return (effect.estimate - stated) / effect.interval.stderr


def _unit(line: Line) -> float:
    return 100.0 if line.percent else 1.0


def _away_text(value: object, away: float | None, *, signed: bool = False) -> str:
    text = f"{value:{'+' if signed else ''}}".replace("-", MINUS)
    return text if away is None else f"{text} ({away:+.1f} SE)".replace("-", MINUS)
