"""The answer on one screen: a line per precision, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from statistics import fmean
from textwrap import fill

from qbench.comparison.rows import Comparison, Row, bits_per_weight, gib
from qbench.comparison.verdict import about, loss_text, ordered, verdict
from qbench.comparison.wording import effect_text
from qbench.text import NO_VALUE, group_by_reason, metric_title, number, short, table

WIDTH = 100


def summary(comparison: Comparison) -> str:
    """Return as text: models and data, the verdict, missing and failed cells, and a table with a
    line per precision, if any was scored, with as many columns as fit the width and their legend.
    """
    lines = [*verdict(comparison)]
    lines += group_by_reason((cell.cell, reason) for cell, reason in comparison.problems())
    if comparison.grid.skipped:
        lines.append(f"Left out, without data: {', '.join(comparison.grid.skipped)}.")
    above = "\n\n".join(
        "\n".join(fill(line, WIDTH) for line in part) for part in (about(comparison), lines) if part
    )
    rows = precision_rows(comparison)
    if not rows:
        return f"{above}\n"
    shown = list(rows[0])

    def text() -> str:
        cells = [[row[name] for name in shown] for row in rows]
        return table(shown, cells, align="l" + "r" * (len(shown) - 1))

    def widths() -> list[int]:
        return [len(part) + 1 for part in text().splitlines()[1].split("|")[1:-1]]

    if sum(widths()) >= WIDTH:  # intervals go first
        rows = [{**row, "KL": row["KL"].partition(" [")[0]} for row in rows]
    columns = widths()
    while len(shown) > 4 and sum(columns[: len(shown)]) >= WIDTH:
        shown.pop()
    hidden = [name for name in rows[0] if name not in shown]
    notes = legend(comparison, [{name: row[name] for name in shown} for row in rows], shown[4:])
    notes += [f"In tables.md also: {', '.join(hidden)}."] if hidden else []
    return f"{above}\n\n{text()}\n\n{fill(' '.join(notes), WIDTH)}\n"


def legend(
    comparison: Comparison, rows: Sequence[dict[str, str]], tasks: Sequence[str]
) -> list[str]:
    """Return a sentence per column and mark of ``rows`` on its meaning. ``tasks``: the names of the
    tasks' columns."""
    metrics = {row.label: metric_title(row.metric) for row in _first_rows(comparison)}
    text = "".join(text for row in rows for text in row.values())
    notes = ["KL: divergence of the predictions from the unquantized model’s, nats per token."]
    if tasks and comparison.unquantized is not None:
        ratios = ", of perplexities the ratio (×)" if "×" in text else ""
        names = ", ".join(f"{name} {metrics[name]}" for name in tasks)
        notes.append(
            f"Tasks ({names}): {comparison.unquantized} has the score, the other rows what they "
            f"lose against it in points{ratios}; minus is a gain."
        )
    wide = {
        record.quantizer: None
        for record in comparison.records.values()
        if record.precision.weights and "float32 scales" in record.precision.weights.scheme
    }
    if wide:
        notes.append(
            f"Bits of {', '.join(wide)}: scales and zeros are stored in the model’s dtype, here "
            "float32, 64 bits per group of weights; bfloat16 needs half."
        )
    notes += ["‡: significant (5 %, Holm’s correction)."] if "‡" in text else []
    notes += ["§: mostly from the seeds."] if "§" in text else []
    notes += ["¶: no interval (tables.md says why)."] if "¶" in text else []
    notes += ["°: no better than guessing, so nothing can be lost."] if "°" in text else []
    return notes


def precision_rows(comparison: Comparison) -> list[dict[str, str]]:
    """Return the rows of the table of precisions as texts by column: Precision, Bits, GiB, KL, and
    one per task. A row is a precision of a model; several trainings of one kind share a row, with
    their means. The rows of a single model are in the order of the verdict. No column is left out
    for width. KL of a single training has its interval."""
    by_quantizer: dict[str, dict[str, Row]] = {}
    for row in _first_rows(comparison):
        by_quantizer.setdefault(row.quantizer, {})[row.task] = row
    one = len(comparison.groups) == 1
    order = ordered(comparison, comparison.grid.checkpoints[0]) if one else []
    names = sorted(by_quantizer, key=lambda name: order.index(name) if name in order else -1)
    means, rows = comparison.kl.means if comparison.kl else {}, []
    for name, (group, members) in product(names, comparison.groups.items()):
        cells = [f"{member}/{name}" for member in members]
        records = [comparison.records.get(cell) for cell in cells]
        if len(cells) > 1 and means.keys() >= {*cells}:
            kl = _mean(map(means.get, cells), short)
        else:  # of one cell, with its interval
            kl = loss_text(comparison.kl, cells[0]) or NO_VALUE
        rows.append(
            {
                "Precision": name if one else f"{group}/{name}",
                "Bits": _mean(map(bits_per_weight, records), "{:.2f}".format),
                "GiB": _mean(map(gib, records), short),
                "KL": kl,
                **{r.label: _value(comparison, r, group) for r in by_quantizer[name].values()},
            }
        )
    return rows


def _first_rows(comparison: Comparison) -> list[Row]:
    """Return the row of the first metric, in the papers' order, of each task and precision."""
    rows: dict[tuple[str, str], Row] = {}
    for row in comparison.seeds or comparison.lines:
        if not row.redundant:
            rows.setdefault((row.quantizer, row.task), row)
    return list(rows.values())


def _value(comparison: Comparison, row: Row, group: str) -> str:
    """Return the damage in one score; for an unquantized precision the score, marked if the model
    may have guessed."""
    if row.quantized:
        return effect_text(row.effects.get(("damages", group)), percent=row.percent)
    value, entry = row.mean(group), row.entries.get(group)
    value = entry.value if value is None and entry else value
    members = comparison.groups[group]
    guessed = any((name, row.task, row.metric) in comparison.at_chance for name in members)
    return number(value, percent=row.percent) + "°" * guessed


def _mean(values: Iterable[float | None], text: Callable[[float], str]) -> str:
    """Return the mean of ``values`` as ``text`` formats it; ``NO_VALUE`` if any is None."""
    return NO_VALUE if None in (values := [*values]) else text(fmean(values))
