"""List what there is (``qbench list``) and print the JSON Schema of recipes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from qbench import recipe_schema
from qbench.attention.normalizers import NORMALIZERS
from qbench.checkpoints.classes import class_names, tried_classes
from qbench.cli.options import PluginOption
from qbench.errors import RecipeError
from qbench.evaluation.definitions import task_names
from qbench.plugins import load_packages
from qbench.quantizers.published import format_rows
from qbench.recipe_schema import Row
from qbench.recipe_yaml import bundled_recipes


def list_command(
    what: Annotated[
        Literal["quantizers", "formats", "normalizers", "models", "tasks", "recipes"],
        typer.Argument(metavar="WHAT"),
    ],
    plugin: PluginOption = [],  # noqa: B006  typer copies it
    markdown: bool = False,
) -> None:
    """List the quantizers with their options, the formats of checkpoints that are quantized
    already, the normalizers, the classes of models that were tried, lm-eval's tasks, or the recipes
    that come with qbench.

    Examples:
    ```
    qbench list quantizers
    qbench list models
    ```

    Options:
    what: quantizers, formats, normalizers, models, tasks or recipes.
    markdown: The models as the table of docs/models.md.
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


def recipe_rows() -> Iterator[Row]:
    """Yield the recipes that come with qbench, with the first sentence of their comments."""
    folder = bundled_recipes()
    for path in sorted((*folder.glob("*.yaml"), *folder.glob("train/*.yaml"))):
        comment = takewhile(lambda line: line.startswith("# "), path.read_text().splitlines())
        text = " ".join(line[2:] for line in comment)
        yield f"recipes/{path.relative_to(folder)}", re.split(r"(?<=[.?])(?<! al\.)\s|:$", text)[0]


def normalizer_rows() -> Iterator[Row]:
    for normalizer in map(NORMALIZERS.get, NORMALIZERS):
        yield from [(normalizer.name, normalizer.description), ("", f"{normalizer.traits}")]
    yield "native", "the attention of the model's own class in transformers"


def model_rows() -> Iterator[Row]:
    """Yield three rows per class: its name, attention and scoring, what is quantized."""
    yield "", "any other class runs too if it passes what is measured when it is loaded"
    for row in tried_classes():
        yield row.model_type, f"{class_names().get(row.model_type, row.model_type)}: {row.models}"
        yield "", f"attention {row.attention}; scoring {row.scoring}"
        yield "", f"quantized: {row.quantized}"


ROWS = {
    "quantizers": recipe_schema.quantizer_rows,
    "normalizers": normalizer_rows,
    "models": model_rows,
    "formats": format_rows,
    "recipes": recipe_rows,
}


def model_table() -> str:
    """Return the table of docs/models.md."""
    head = "| `model_type` | such as | attention | fastest scoring | quantized |\n"
    rule = "| --- | --- | --- | --- | --- |\n"
    rows = (f"| `{row.model_type}` | {' | '.join(row[1:])} |\n" for row in tried_classes())
    return head + rule + "".join(rows)


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
