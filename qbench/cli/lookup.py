"""List what there is (``qbench list``), print the JSON Schema of recipes (``qbench schema``), list
and bound the cache (``qbench cache``)."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal

import typer
from pydantic import TypeAdapter
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text
from tabulate import tabulate

from qbench import store
from qbench.attention.normalizers import NORMALIZERS
from qbench.checkpoints.find import class_names, tried_classes
from qbench.cli.options import CommandGroup, PluginOption
from qbench.errors import RecipeError
from qbench.evaluation.tasks import task_names
from qbench.files import cache_folder
from qbench.machine import GIB
from qbench.plugins import load_packages
from qbench.quantizers.config import KINDS, UNQUANTIZED
from qbench.quantizers.published import format_rows
from qbench.quantizers.registry import COMBINATIONS, Method, methods, names
from qbench.recipe import Recipe, bundled_recipes
from qbench.store import entries, in_words
from qbench.text import duration


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
    typer.echo(json.dumps(json_schema()))


# --- keys of recipes as JSON Schema, quantizers with options as a list


Schema = dict[str, Any]
Row = tuple[str, str]
ABOUT = {
    "weights": "of linear layers",
    "transform": "changes the model to an equal one that is easier to quantize",
    "activations": "inputs of linear layers, without the LM head",
    "kv_cache": "keys and values that attention reads; under the key kv_cache without kv-",
}


def json_schema() -> Schema:
    """Return the JSON Schema (2020-12) of recipes, short forms included."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["description"] = "A recipe of qbench."
    schema["properties"]["quantizers"]["items"] = {"$ref": "#/$defs/Quantizer"}
    options = {
        option: {} for kind in KINDS for method in methods(kind) for option in method.options
    }  # fmt: skip
    parts = {
        kind: {"anyOf": [{"enum": [m.name for m in methods(kind)]}, {"type": "string"},
                         {"type": "object"}]}
        for kind in KINDS
    }  # fmt: skip
    mapping = {
        "type": "object",
        "properties": {
            "name": {"anyOf": [{"enum": names()}, {"type": "string"}]},
            "label": {"type": "string", "description": "Unique in its recipe."},
            **options,
            **parts,
        },
    }
    schema["$defs"]["Quantizer"] = {"anyOf": [{"enum": names()}, {"type": "string"}, mapping]}
    return schema


def explain(method: Method, option: str) -> str:
    """Return what an option of a quantizer means and which values it takes."""
    value = TypeAdapter(method.settings).json_schema()["properties"][option]
    return f"{value.get('description', option)} ({_what(value)})"


def _what(value: Schema) -> str:
    """Return the values that a JSON Schema allows, in words."""
    if "enum" in value:
        return ", ".join(map(str, value["enum"]))
    if "const" in value:
        return str(value["const"])
    if "anyOf" in value:
        kinds = [_what(choice) for choice in value["anyOf"] if choice.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if value.get("type") == "array":
        return f"a list of: {_what(value.get('items', {}))}"
    words = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}
    text = words.get(value.get("type", ""), "text")
    if {"exclusiveMinimum", "exclusiveMaximum"} <= value.keys():
        return text + " between {exclusiveMinimum:g} and {exclusiveMaximum:g}".format(**value)
    least, most = value.get("minimum"), value.get("maximum")
    return text + (f" ≥ {least:,}" if least is not None else "") + (
        f", ≤ {most:,}" if most is not None else ""
    )  # fmt: skip


def quantizer_rows() -> Iterator[Row]:
    """Yield a row per method and one per option, for a list of quantizers."""
    yield "grammar:", "parts joined by +, each a name with options after a colon:"
    yield "", "gptq-4bit:group_size=64,desc_act=true+int8-token+kv4 (kv4: kv-int4-token)"
    yield "in a recipe:", "the same, or a mapping: {name: gptq-4bit, group_size: 64, label: mine},"
    yield "", "{weights: gptq-4bit, activations: int8-token, kv_cache: int4-token}"
    yield from [("", ""), ("unquantized:", "weights in a dtype")]
    yield from ((name, dtype) for dtype, name in UNQUANTIZED.items())
    for kind, about in ABOUT.items():
        yield from [("", ""), (f"{kind}:", about), *_of(methods(kind))]
    yield from [("", ""), ("combinations:", "names of several parts")]
    yield from ((name, f"{about}: {parts}") for name, (parts, about) in COMBINATIONS.items())


def _of(every: Sequence[Method]) -> Iterator[Row]:
    """Yield the rows of methods; an option is explained at the first method that has it."""
    explained: set[str] = set()
    for method in every:
        yield method.name, method.description
        as_above = []
        for option, default in method.options.items():
            value = list(default) if isinstance(default, tuple) else default
            line = f"{option}={value}: {explain(method, option)}"
            if line in explained:
                as_above.append(option)
            else:
                explained.add(line)
                yield "", line
        if as_above:
            yield "", f"as above: {', '.join(as_above)}"


# --- the cache


cache = CommandGroup("List and bound what runs keep for later ones.")


@cache.command("list")
def list_entries() -> None:
    """List what is kept with sizes and ages, the least recently used first.

    Examples:
    ```
    qbench cache list
    ```
    """
    listed = entries(cache_folder())
    now = time.time()
    rows = [(entry.name, in_words(entry.bytes), duration(now - entry.used)) for entry in listed]
    if rows:
        head = ("what", "size", "unused for")
        typer.echo(tabulate(rows, headers=head, tablefmt="plain", disable_numparse=True))
    total = in_words(sum(entry.bytes for entry in listed))
    typer.echo(f"{cache_folder()}: {len(listed)} entries, {total}")


@cache.command("prune")
def prune(
    max_gib: Annotated[float, typer.Option(min=0)],
    dry_run: bool = False,
) -> None:
    """Remove what was not used for longest, and the files that killed processes left.

    What a run uses stays. What is gone is made again by the run that needs it.

    Examples:
    ```
    qbench cache prune --max-gib 20 --dry-run
    ```

    Options:
    max_gib: Keep at most this much. The least recently used is removed first.
    dry_run: Only show what would be removed.
    """
    pruned = store.prune(cache_folder(), max_bytes=max_gib * GIB, dry_run=dry_run)
    word = "would remove" if dry_run else "removed"
    for entry in pruned.removed:
        typer.echo(f"{word} {entry.name}, {in_words(entry.bytes)}")
    for entry in pruned.in_use:
        typer.echo(f"kept {entry.name}, {in_words(entry.bytes)}: a run uses it")
    for path in pruned.leftovers:
        typer.echo(f"removed what a killed process left: {path}")
    freed = in_words(sum(entry.bytes for entry in pruned.removed))
    typer.echo(f"{cache_folder()}: {word} {len(pruned.removed)} entries, {freed}")


ROWS = {
    "quantizers": quantizer_rows,
    "normalizers": normalizer_rows,
    "models": model_rows,
    "formats": format_rows,
    "recipes": recipe_rows,
}
