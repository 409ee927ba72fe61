"""List what there is (``qbench list``) and print the JSON Schema of recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from qbench import recipe_schema
from qbench.attention.normalizers import NORMALIZERS
from qbench.checkpoints.supported import CLASSES, ModelClass
from qbench.cli.options import PluginOption
from qbench.errors import RecipeError
from qbench.evaluation.definitions import task_names
from qbench.plugins import load_packages
from qbench.quantizers.prequantized import format_rows
from qbench.recipe_schema import Row


def list_command(
    what: Annotated[
        Literal["quantizers", "formats", "normalizers", "models", "tasks"],
        typer.Argument(metavar="WHAT", help="quantizers, formats, normalizers, models or tasks."),
    ],
    plugin: PluginOption = [],  # noqa: B006  typer copies it
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The models as the table of docs/models.md.")
    ] = False,
) -> None:
    """List the quantizers with their options, the formats of checkpoints that are quantized
    already, the normalizers, the classes of models that were tried, or lm-eval's tasks.

    Examples:
    ```
    qbench list quantizers
    qbench list models
    ```
    """
    load_packages()
    if markdown:
        if what != "models":
            raise RecipeError(f"list {what}: --markdown is for models")
        typer.echo(model_table(), nl=False)
        return
    if what == "tasks":
        typer.echo("\n".join(task_names()))
        return
    table = Table.grid(Column(no_wrap=True), Column(), padding=(0, 1))
    for name, text in ROWS[what]():
        table.add_row(Text(name), Padding(Text(text), (0, 0, 0, 0 if name else 2)))
    Console(highlight=False).print(table)


def normalizer_rows() -> Iterator[Row]:
    for one in map(NORMALIZERS.get, NORMALIZERS):
        yield from [(one.name, one.description), ("", f"{one.traits}")]
    yield "native", "the attention of the model's own class in transformers"


def model_rows() -> Iterator[Row]:
    """Three rows a class: its name, whose attention and which scoring, what is quantized."""
    for row in CLASSES.values():
        yield row.kind, f"{row.name}: {row.models}"
        yield "", f"attention {row.attention}; scoring {_scoring(row)}"
        yield "", f"quantized: {_weights(row)}"


ROWS = {
    "quantizers": recipe_schema.quantizer_rows,
    "normalizers": normalizer_rows,
    "models": model_rows,
    "formats": format_rows,
}


def model_table() -> str:
    """The table of docs/models.md."""
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
    spared = f"{row.spared} (set ignore: [{row.spared}])" if row.spared else ""
    not_quantized = ", ".join(filter(None, [row.left_out, spared]))
    return f"{row.weights}; not {not_quantized}" if not_quantized else row.weights


def schema(
    plugin: PluginOption = [],  # noqa: B006  typer copies it
) -> None:
    """Print the JSON Schema of recipes, by which editors check and complete them.

    Examples:
    ```
    qbench schema > recipe.schema.json
    ```
    """
    load_packages()
    typer.echo(json.dumps(recipe_schema.json_schema()))
