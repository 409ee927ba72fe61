"""List quantizers, formats, normalizers, models, tasks and recipes (``qbench list``)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from qbench.attention.normalizers import NORMALIZERS
from qbench.checkpoints.find import tried_classes
from qbench.cli.options import PluginOption
from qbench.evaluation.tasks import task_names
from qbench.quantizers.published import format_rows
from qbench.quantizers.registry import COMBINATIONS, Method, methods
from qbench.recipe import bundled_recipes


def list_command(
    what: Annotated[
        Literal["quantizers", "formats", "normalizers", "models", "tasks", "recipes"],
        typer.Argument(metavar="WHAT"),
    ],
    plugin: PluginOption = None,
) -> None:
    """List the quantizers with their options, the formats of checkpoints that are quantized
    already, the normalizers, the classes of models that were tried, lm-eval's tasks, or the recipes
    that come with qbench.

    Examples:
    qbench list quantizers
    qbench list models

    Options:
    what: quantizers, formats, normalizers, models, tasks or recipes.
    """
    if what in ("models", "tasks"):
        typer.echo(model_table() if what == "models" else "\n".join(task_names()))
        return
    table = Table.grid(Column(no_wrap=True), Column(), padding=(0, 1))
    for name, text in ROWS[what]():
        table.add_row(Text(name), Padding(Text(text), (0, 0, 0, 0 if name else 2)))
    Console(highlight=False).print(table)


def recipe_rows() -> Iterator[Row]:
    """Yield (path, first sentence of its comment) of each recipe that comes with qbench."""
    folder = bundled_recipes()
    for path in sorted((*folder.glob("*.yaml"), *folder.glob("train/*.yaml"))):
        comment = takewhile(lambda line: line.startswith("# "), path.read_text().splitlines())
        text = " ".join(line[2:] for line in comment)
        yield f"recipes/{path.relative_to(folder)}", re.split(r"(?<=[.?])(?<! al\.)\s|:$", text)[0]


def normalizer_rows() -> Iterator[Row]:
    """Yield two rows per normalizer: name and description, then its traits; last ``native``."""
    for normalizer in NORMALIZERS.values():
        yield from [(normalizer.name, normalizer.description), ("", f"{normalizer.traits}")]
    yield "native", "the attention of the model's own class in transformers"


def model_table() -> str:
    """Return the table of docs/models.md."""
    head = "| `model_type` | such as | attention | fastest scoring | quantized |\n"
    rule = "| --- | --- | --- | --- | --- |\n"
    rows = (f"| `{row.model_type}` | {' | '.join(row[1:])} |\n" for row in tried_classes())
    return (head + rule + "".join(rows)).rstrip("\n")


# --- quantizers with their options


Row = tuple[str, str]
ABOUT = {
    "unquantized": "weights in a dtype",
    "weights": "of linear layers; here, on a CPU or a GPU, unless a line says otherwise",
    "transform": "changes the model to an equal one that is easier to quantize",
    "activations": "inputs of linear layers, without the LM head",
    "kv_cache": "keys and values that attention reads; under the key kv_cache without kv-",
}


def quantizer_rows() -> Iterator[Row]:
    """Yield a row per method and one per option, for a list of quantizers."""
    yield "grammar:", "parts joined by +, each a name with options after a colon:"
    yield "", "gptq-4bit:group_size=64,desc_act=true+int8-token+kv4 (kv4: kv-int4-token)"
    yield "in a recipe:", "the same, or a mapping: {name: gptq-4bit, group_size: 64, label: mine},"
    yield "", "{weights: gptq-4bit, activations: int8-token, kv_cache: int4-token}"
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
        for option, field in method.options.items():
            default = field.get_default(call_default_factory=True)
            value = list(default) if isinstance(default, tuple) else default
            line = f"{option}={value}: {field.description}"
            if line in explained:
                as_above.append(option)
            else:
                explained.add(line)
                yield "", line
        if as_above:
            yield "", f"as above: {', '.join(as_above)}"


ROWS = {
    "quantizers": quantizer_rows,
    "normalizers": normalizer_rows,
    "formats": format_rows,
    "recipes": recipe_rows,
}
