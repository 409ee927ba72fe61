"""The papers' tables as CSV with source and caption, every number as printed."""

from __future__ import annotations

import csv
from collections.abc import Collection
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib import resources
from typing import Any

import yaml

from qbench import text
from qbench.errors import RecipeError

# The papers' names → lm-eval's.
TASKS = {
    "Arc Easy": "arc_easy",
    "Lambada": "lambada_openai",
    "Piqa": "piqa",
    "Sciq": "sciq",
    "Wikitext": "wikitext",
}
METRICS = {
    "Acc Norm": "acc_norm",
    "Acc": "acc",
    "Perplexity": "perplexity",
    "Word Perplexity": "word_perplexity",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedTable:
    """One table of a paper. Cells are strings as printed."""

    name: str  # e.g. "softpick-table-09"
    paper: str
    source: str  # e.g. "Table 9"
    caption: str
    scale: str | None  # "340M", "1.8B"
    method: str | None  # of quantization; "none" for unquantized scores, None for no scores
    columns: tuple[str, ...]
    rows: tuple[dict[str, str], ...]

    @property
    def models(self) -> tuple[str, ...]:
        """Columns that hold a model's scores, where the table is one of scores."""
        if self.method is None:
            return ()
        about = {"task", "metric", "direction", "quantization", "delta"}
        return tuple(column for column in self.columns if column not in about)


@dataclass(frozen=True, kw_only=True, slots=True)
class Printed:
    """What a paper prints for one metric at one precision: values in its units (per cent)."""

    source: str  # e.g. "Table 9"
    values: dict[str, Decimal]  # model → value
    delta: Decimal


def tables() -> list[PublishedTable]:
    """All published tables, in the order of the index."""
    return [table(name) for name in _index()["tables"]]


@cache
def table(name: str) -> PublishedTable:
    """One table by name. Raises RecipeError where it is unknown, naming the known ones."""
    index = _index()
    if name not in index["tables"]:
        raise RecipeError(f"unknown published table {name!r}; known: {', '.join(index['tables'])}")
    about = index["tables"][name]
    text = resources.files(__package__).joinpath("data", f"{name}.csv").read_text("utf-8")
    reader = csv.DictReader(text.splitlines())
    rows = tuple(reader)
    return PublishedTable(
        name=name,
        paper=index["papers"][about["paper"]],
        source=about["source"],
        caption=about["caption"],
        scale=about.get("scale"),
        method=about.get("method"),
        columns=tuple(reader.fieldnames or ()),
        rows=rows,
    )


def sets() -> tuple[str, ...]:
    """Names that ``--published`` takes."""
    return tuple(_index()["sets"])


def scale(name: str) -> str:
    """Of the models that the set ``name`` scores. Raises RecipeError for an unknown set."""
    return str(_set(name)[0].scale)


def _set(name: str) -> list[PublishedTable]:
    names = _index()["sets"]
    if name not in names:
        raise RecipeError(f"--published {name}: unknown; possible: {', '.join(names)}")
    return [table(one) for one in names[name]]


@cache
def printed(name: str) -> dict[tuple[str, str, str, float | None], Printed]:
    """A set's numbers by (task, metric, method, bits), in lm-eval's and our words.

    Raises RecipeError for an unknown set.
    """
    found = {}
    for one in _set(name):
        for row in one.rows:
            bits = row.get("quantization", "").removesuffix("-bit")
            cell = (TASKS[row["task"]], METRICS[row["metric"]], str(one.method))
            found[*cell, float(bits) if bits else None] = Printed(
                source=one.source,
                values={model: Decimal(row[model]) for model in one.models},
                delta=Decimal(row["delta"]),
            )
    return found


def show(one: PublishedTable) -> str:
    """A table in Markdown with its source, as ``qbench published`` prints it."""
    rows = [[row[column] for column in one.columns] for row in one.rows]
    about = f"{one.paper}, {one.source}. {one.caption}"
    align = "".join(
        "r" if any(map(_is_number, cells)) else "l" for cells in zip(*rows, strict=True)
    )
    return "\n\n".join([f"### {one.name}", about, text.table(one.columns, rows, align=align)])


def doubts(sources: Collection[str] | None = None) -> list[str]:
    """What is wrong with the tables at ``sources`` (such as "Table 13"), a line each; None: of all,
    and of what the paper's text says of them."""
    return [
        f"{one['where']}: {one['text']}"
        for one in _index()["doubts"]
        if sources is None or one["where"].split(",")[0] in sources
    ]


def deltas() -> tuple[int, list[str]]:
    """How many Δ are printed, and those that are not the difference of the printed scores."""
    rows = [(one, row) for one in tables() for row in one.rows if "delta" in row]
    found = []
    for one, row in rows:
        again = Decimal(row["softpick"]) - Decimal(row["softmax"])
        if again != Decimal(row["delta"]):
            parts = (one.source, row["task"], row["metric"], row.get("quantization", ""))
            where = ", ".join(part for part in parts if part)
            found.append(f"{where}: Δ is printed as {row['delta']}, the scores give {again:+}")
    return len(rows), found


def _is_number(text: str) -> bool:
    return text.lstrip("+-").replace(".", "").rstrip("*").isdigit()


@cache
def _index() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("index.yaml").read_text("utf-8")
    return yaml.safe_load(text)
