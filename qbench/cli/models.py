"""``qbench list models``: the classes of transformers that were tried, as text or Markdown; and
``qbench convert``. Importing this imports no torch.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qbench.cli.screen import show_written

if TYPE_CHECKING:
    from qbench.checkpoints.supported import ModelClass


class Format(StrEnum):
    llama = "llama"
    fla = "fla"


def convert(
    checkpoint: Annotated[str, typer.Argument(help="A folder or hub id.")],
    out: Annotated[Path, typer.Argument(help="A new folder.", metavar="OUT")],
    to: Annotated[
        Format,
        typer.Option(
            help="llama: a stock class of transformers (Llama, or Mistral, Qwen 2, Qwen 3 where "
            "attention has windows, biases, norms); fla: flash-linear-attention's transformer."
        ),
    ],
    revision: Annotated[str | None, typer.Option(help="Of a hub id.")] = None,
) -> None:
    """Write a checkpoint in the other format, weights bit for bit, tokenizer along.

    What the other format cannot say is refused by name (exit code 2), and nothing is written.
    """
    from qbench.checkpoints import find
    from qbench.checkpoints.convert import convert as write

    show_written(write(find(checkpoint, revision=revision), to.value, out))


def model_lines() -> list[str]:
    """Three lines a class: its name, whose attention and which scoring, what is quantized."""
    from qbench.checkpoints.supported import CLASSES

    lines = []
    for row in CLASSES.values():
        lines.append(f"{row.kind:18} {row.name}: {row.models}")
        lines.append(f"{'':18}   attention {row.attention}; scoring {_scoring(row)}")
        lines.append(f"{'':18}   quantized: {_weights(row)}")
    return lines


def model_table() -> str:
    """The table of docs/models.md."""
    from qbench.checkpoints.supported import CLASSES

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
    spared = f"{row.spared} (say ignore: [{row.spared}])" if row.spared else ""
    not_quantized = ", ".join(filter(None, [row.left_out, spared]))
    return f"{row.weights}; not {not_quantized}" if not_quantized else row.weights
