"""``qbench list`` and ``qbench convert``: what there is, and checkpoints in another format."""

from __future__ import annotations

import json
import textwrap
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from qbench import recipe_schema
from qbench.attention.normalizers import NORMALIZERS
from qbench.checkpoints import find
from qbench.checkpoints.supported import CLASSES, ModelClass
from qbench.cli.messages import show_written
from qbench.cli.options import PluginOption
from qbench.errors import RecipeError, shown
from qbench.evaluation.definitions import task_names
from qbench.plugins import load_packages
from qbench.quantizers.names import COMBINATIONS, PARTS, Presets
from qbench.quantizers.prequantized import format_lines

COLUMNS = 80
WIDTH = 22
ABOUT = {
    "weights": "by its name alone, or as weights: of an entry in parts",
    "activations": "inputs of linear layers, without the LM head",
    "kv": "keys and values that attention reads",
    "outliers": "changes the model to an equivalent one that is easier to quantize",
    "prune_heads": "attention heads that are cut out",
}
EXAMPLE = "{weights: gptq-4bit, activations: int8-token, kv: int4-token, label: w4a8kv4}"


def quantizer_lines() -> list[str]:
    """Parts and ready combinations, one line a name and one an option."""
    lines = [
        f"a quantizer of a recipe is a name, or has parts: {EXAMPLE}",
        "--quantizers takes names, and parts joined by +: kv4, gptq-4bit+int8-token+kv4",
        "",
    ]
    for kind, about in ABOUT.items():
        lines += [f"{kind}: {about}", *_of(PARTS[kind]), ""]
    lines.append("combinations: several parts under one name; each can be replaced")
    for name in COMBINATIONS:
        one = COMBINATIONS.get(name)
        parts = ", ".join(f"{kind}: {_shown(part)}" for kind, part in one.fixed.items())
        lines += [f"{name:{WIDTH}} {one.description}", f"{'':{WIDTH}}   {{{parts}}}"]
    return lines


def _of(registry: Presets) -> list[str]:
    """Options are explained where they first stand."""
    lines: list[str] = []
    explained: set[str] = set()
    for preset in map(registry.get, registry):
        lines.append(f"{preset.name:{WIDTH}} {preset.description}")
        as_above = []
        for option, default in preset.options.items():
            told = list(default) if isinstance(default, tuple) else default
            line = f"{'':{WIDTH}}   {option}={told}: {recipe_schema.explain(preset, option)}"
            if line in explained:
                as_above.append(option)
            else:
                explained.add(line)
                lines.append(line)
        if as_above:
            lines.append(f"{'':{WIDTH}}   as above: {', '.join(as_above)}")
    return lines


def _shown(part: object) -> str:
    if not isinstance(part, dict):
        return str(part)
    return "{" + ", ".join(f"{key}: {value}" for key, value in part.items()) + "}"


class Listing(StrEnum):
    quantizers = "quantizers"
    normalizers = "normalizers"
    models = "models"
    formats = "formats"
    tasks = "tasks"


def list_command(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            autocompletion=lambda incomplete: [w for w in Listing if w.startswith(incomplete)],
            help="quantizers, formats, normalizers, models or tasks.",
        ),
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
    if what not in list(Listing):
        raise typer.BadParameter(
            f"{shown(what)} is none of {', '.join(Listing)}", param_hint="WHAT"
        )
    load_packages()
    if markdown and what != Listing.models:
        raise RecipeError(f"list {what}: --markdown is for models")
    if markdown:
        typer.echo(model_table(), nl=False)
        return
    for line in _listing(Listing(what)):
        typer.echo(folded(line))


def folded(line: str) -> str:
    """``line`` in 80 columns: what goes on stands a little to the right of where it began."""
    if len(line) <= COLUMNS:
        return line
    begins = len(line) - len(line.lstrip())
    return textwrap.fill(
        line, COLUMNS, subsequent_indent=" " * ((begins or WIDTH - 1) + 2),
        break_long_words=False, break_on_hyphens=False, replace_whitespace=False,
    )  # fmt: skip


def _listing(what: Listing) -> list[str]:
    if what is Listing.tasks:
        return ["passkey", "passkey_TOKENS (qbench's own, without data)", *task_names()]
    if what is Listing.formats:
        return format_lines()
    if what is Listing.models:
        return model_lines()
    if what is Listing.normalizers:
        known = [NORMALIZERS.get(name) for name in NORMALIZERS]
        wide = max(len(one.name) for one in known)
        lines = [
            line
            for one in known
            for line in (f"{one.name:{wide}} {one.description}", f"{'':{wide}}   {one.traits}")
        ]
        own = "the attention of the model's own class in transformers"
        return [*lines, f"{'native':{wide}} {own}"]
    return quantizer_lines()


def model_lines() -> list[str]:
    """Three lines a class: its name, whose attention and which scoring, what is quantized."""
    lines = []
    for row in CLASSES.values():
        lines.append(f"{row.kind:18} {row.name}: {row.models}")
        lines.append(f"{'':18}   attention {row.attention}; scoring {_scoring(row)}")
        lines.append(f"{'':18}   quantized: {_weights(row)}")
    return lines


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
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The page docs/reference/recipe.md.")
    ] = False,
) -> None:
    """Print the JSON Schema of recipes, by which editors check and complete them.

    Examples:
    ```
    qbench schema > recipe.schema.json
    ```
    """
    load_packages()
    shown = recipe_schema.markdown() if markdown else json.dumps(recipe_schema.json_schema())
    typer.echo(shown.rstrip("\n"))


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

    Examples:
    ```
    qbench convert DIR OUT --to llama
    ```
    """
    from qbench.checkpoints.convert import convert as write

    show_written(write(find(checkpoint, revision=revision), to.value, out))
