"""``qbench list models``: the classes of transformers that were tried, as text or Markdown.

Imports no torch.
"""

from __future__ import annotations

from qbench.checkpoints.classes import CLASSES, ModelClass


def model_lines() -> list[str]:
    """Three lines a class: its name, whose attention and which scoring, what is quantized."""
    lines = []
    for row in CLASSES.values():
        lines.append(f"{row.kind:18} {row.name}: {row.models}")
        lines.append(f"{'':18}   attention {row.attention}; scoring {_scoring(row)}")
        lines.append(f"{'':18}   quantized: {_weights(row)}")
    return lines


def model_table() -> str:
    """The README's table."""
    head = "| `model_type` | such as | attention | fastest scoring | quantized |\n"
    rule = "| --- | --- | --- | --- | --- |\n"
    rows = (
        f"| `{row.kind}` | {row.models} | {row.attention} | {_scoring(row)} | {_weights(row)} |\n"
        for row in CLASSES.values()
    )
    return head + rule + "".join(rows)


def _scoring(row: ModelClass) -> str:
    return f"{row.scoring} ({row.slower})" if row.slower else row.scoring


def _weights(row: ModelClass) -> str:
    spared = f"{row.spared} (say leave_out: [{row.spared}])" if row.spared else ""
    not_quantized = ", ".join(filter(None, [row.left_out, spared]))
    return f"{row.weights}; not {not_quantized}" if not_quantized else row.weights
