"""The answer on one screen: a line per precision, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from textwrap import fill

from qbench.comparison.rows import Comparison, Row, redundant
from qbench.comparison.verdict import kl_text, verdict
from qbench.comparison.wording import effect_text, metric_text
from qbench.tables.scores import bits_per_weight, gib, of_row
from qbench.text import NO_VALUE, group_by_reason, number, significant, table

WIDTH = 100
MOST = 5  # precisions that the verdict names in order


def summary(comparison: Comparison) -> str:
    """Return what the results are of, the verdict, a line per precision, and what is missing."""
    lines = [about(comparison), *verdict(comparison, most=MOST)]
    lines += group_by_reason((cell.cell, reason) for cell, reason in comparison.problems())
    if comparison.grid.skipped:
        lines.append(f"Left out, without data: {', '.join(comparison.grid.skipped)}.")
    text = "\n".join(fill(line, WIDTH) for line in lines)
    rows = _rows(comparison)
    if not rows:
        return f"{text}\n"
    shown = list(rows[0])
    while len(shown) > 3 and max(map(len, _table(rows, shown).splitlines())) > WIDTH:
        shown.pop()
    left_out = len(rows[0]) - len(shown)
    measured = dict.fromkeys(
        f"{row.label} {metric_text(row)[:-2]}" for row in _first_rows(comparison)
    )
    told = ", ".join(name for name in measured if name.split(" ")[0] in shown)
    notes = [f"{told}: the score unquantized, then losses: above 0, or above × 1, is worse."]
    notes += ["‡ at 5 % after Holm's correction."] if "‡" in _table(rows, shown) else []
    notes += [f"More columns ({left_out}): tables.md."] if left_out else []
    return f"{text}\n\n{_table(rows, shown)}\n\n{fill(' '.join(notes), WIDTH)}\n"


def about(comparison: Comparison) -> str:
    """Say what was run: the folder's name, checkpoints, documents, date, hardware."""
    records = list(comparison.records.values())
    documents = [value.documents for row in comparison.lines for value in row.entries]
    known = sorted({count for count in documents if count is not None})
    parts = [f"{comparison.grid.name}: {', '.join(comparison.checkpoints)}"]
    if known:
        most = f" to {known[-1]:,}" if len(known) > 1 else ""
        parts.append(f"{known[0]:,}{most} documents per task")
    if records:
        last = max(records, key=lambda record: record.finished)
        parts += [f"{last.finished:%Y-%m-%d}", last.environment.hardware]
    return " · ".join(parts)


def _table(rows: Sequence[dict[str, str]], shown: Sequence[str]) -> str:
    cells = [[row[name] for name in shown] for row in rows]
    return table(shown, cells, align="l" + "r" * (len(shown) - 1))


def _rows(comparison: Comparison) -> list[dict[str, str]]:
    by_quantizer: dict[str, dict[str, Row]] = {}
    for row in _first_rows(comparison):
        by_quantizer.setdefault(row.quantizer, {})[row.task] = row
    rows = []
    for quantizer, tasks in by_quantizer.items():
        for group, members in comparison.groups.items():
            cells = [f"{member}/{quantizer}" for member in members]
            records = [comparison.records.get(cell) for cell in cells]
            name = quantizer if len(comparison.groups) == 1 else f"{group}/{quantizer}"
            rows.append(
                {
                    "Precision": name,
                    "Bits": _mean([bits_per_weight(one) if one else None for one in records], 2),
                    "GiB": _mean([gib(one) for one in records]),
                    "KL": _kl(comparison, cells),
                    **{
                        row.label: effect_text(of_row(row, "damages", group), percent=row.percent)
                        if row.quantized
                        else _score(row, group)
                        for row in tasks.values()
                    },
                }
            )
    return rows


def _first_rows(comparison: Comparison) -> list[Row]:
    """Return the first metric of each task, in the papers' order, of each precision."""
    rows: dict[tuple[str, str], Row] = {}
    for row in comparison.seeds or comparison.lines:
        if not redundant(row, comparison.lines):
            rows.setdefault((row.quantizer, row.task), row)
    return list(rows.values())


def _kl(comparison: Comparison, cells: Sequence[str]) -> str:
    means = comparison.kl.means if comparison.kl else {}
    if len(cells) == 1 or not all(cell in means for cell in cells):
        return kl_text(comparison, cells[0]) or NO_VALUE
    return significant(fmean(means[cell] for cell in cells))


def _score(row: Row, group: str) -> str:
    """Return the unquantized score itself."""
    values = {value.checkpoint: value.value for value in row.entries} | dict(row.means)
    return number(values.get(group), percent=row.percent)


def _mean(values: Sequence[float | None], decimals: int | None = None) -> str:
    if None in values:
        return NO_VALUE
    mean = fmean(values)
    return significant(mean) if decimals is None else f"{mean:.{decimals}f}"
