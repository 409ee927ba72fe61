"""Delta tables in Markdown: what the terminal and ``tables.md`` show."""

from __future__ import annotations

from collections.abc import Sequence

from qbench.compare import Entry, Line
from qbench.tables.table import NO_VALUE, Table, arrow, metric_title, number, precision_title


def markdown(tables: Sequence[Table]) -> str:
    """The tables one below the other, columns aligned so that they read well unrendered."""
    return "\n\n".join(_one(table) for table in tables) + "\n"


def _one(table: Table) -> str:
    others = table.checkpoints[1:]
    head = ["Task", "Metric", "Quantization", *table.checkpoints]
    head += ["Δ"] if len(others) == 1 else [f"Δ {other}" for other in others]
    head.append("Documents")
    body = [
        [
            row.line.label if row.begins_task else "",
            f"{metric_title(row.line.metric)} {arrow(row.line)}",
            precision_title(row.line),
            *(entry_text(entry, row.line) for entry in row.line.entries),
            *(delta_text(row.line, other) for other in others),
            documents_text(row.line),
        ]
        for row in table.rows
    ]
    left = 3  # words to the left, numbers to the right
    widths = [max(len(line[column]) for line in [head, *body]) for column in range(len(head))]
    rule = [
        "-" * width if column < left else "-" * (width - 1) + ":"
        for column, width in enumerate(widths)
    ]
    pad = [
        [
            text.ljust(width) if column < left else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in [head, rule, *body]
    ]
    lines = [f"### {table.title}", "", *(f"| {' | '.join(line)} |" for line in pad)]
    if table.notes:
        lines += ["", *(f"- {note.replace('|', chr(92) + '|')}" for note in table.notes)]
    return "\n".join(lines)


def entry_text(entry: Entry, line: Line) -> str:
    """The score with its standard error; ``failed`` or ``— missing`` where there is none."""
    if entry.status == "missing":
        return f"{NO_VALUE} missing"
    if entry.status == "failed":
        return "failed"
    text = number(entry.value, percent=line.percent)
    if entry.stderr is not None:
        text += f" ± {number(entry.stderr, percent=line.percent)}"
    return text


def delta_text(line: Line, checkpoint: str) -> str:
    return number(line.delta(checkpoint), percent=line.percent, signed=True)


def documents_text(line: Line) -> str:
    """One number where all checkpoints saw as many documents, else one for each."""
    counts = [entry.documents for entry in line.entries]
    known = {count for count in counts if count is not None}
    if len(known) <= 1:
        return str(next(iter(known), NO_VALUE))
    return "/".join(NO_VALUE if count is None else str(count) for count in counts)
