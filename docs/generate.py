"""Write the pages that state numbers of results from their templates: `make pages`.

docs/templates has a Jinja2 template for each such page, under the page's own path. A number in it
is an expression over docs/numbers.csv (written by docs/read_results.py) or over the tables in
results/bench, made with the functions below. A name that is not in the results is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import jinja2
import pandas as pd
from statsmodels.stats.multitest import multipletests

ROOT = Path(__file__).parent.parent
TEMPLATES = ROOT / "docs" / "templates"
# Folders that were measured on one pair of models. Holm's correction is over all of a pair's
# differences of damage.
PAIRS = {
    "first": ("pair-27m", "pair-27m-kv", "pair-27m-activations"),
    "outliers": ("pair-27m-outliers",),
    "seeds": ("seeds-27m", "seeds-27m-kv", "seeds-27m-activations"),
    "sinks": ("sinks-27m", "sinks-27m-kv", "sinks-27m-activations"),
    "126M": ("sinks-124m",),
    "rotary": ("sigmoid-27m",),
    "alibi": ("sigmoid-27m-alibi",),
    "formats": ("published-27m",),
    "gguf": ("published-27m-gguf",),
}
KEYS = ["task", "metric", "quantizer", "checkpoint"]
METRICS = {"wikitext": "word_perplexity", "lambada_openai": "perplexity"}  # where none is named
KINDS = {"weights": r"(bnb|gptq|hqq).*", "activations": r"[aw]\d.*", "KV cache": r"kv.*"}
FUNCTIONS: dict[str, Callable] = {}


def function(ours: Callable) -> Callable:
    """Make a function known to templates."""
    FUNCTIONS[ours.__name__] = ours
    return ours


@lru_cache
def numbers() -> pd.DataFrame:
    return pd.read_csv(ROOT / "docs" / "numbers.csv", keep_default_na=True)


@lru_cache
def pair(name: str) -> pd.DataFrame:
    """Return a pair's rows with ``holm``: p of its differences after Holm's correction."""
    rows = numbers()[numbers().folder.isin(PAIRS[name])]
    rows = rows.drop_duplicates(KEYS).copy()  # a cell of two recipes counts once
    tested = rows.difference_p.notna()
    if tested.any():
        rows.loc[tested, "holm"] = multipletests(rows.difference_p[tested], method="holm")[1]
    return rows


def find(name, task, metric, checkpoint, quantizer=None) -> pd.Series:
    """Return one row of a pair; the first of its folders that has it counts."""
    rows = pair(name)
    rows = rows[(rows.task == task) & (rows.metric == metric) & (rows.checkpoint == checkpoint)]
    rows = rows[rows.quantizer.isna() if quantizer is None else rows.quantizer == quantizer]
    if rows.empty:
        raise KeyError(f"no {metric} of {task} of {name}, {checkpoint}/{quantizer}")
    return rows.iloc[0]


@function
def value(name, task, metric, checkpoint, quantizer=None) -> float:
    """Return a score or a measurement."""
    return float(find(name, task, metric, checkpoint, quantizer).value)


@function
def mean(name, task, metric, checkpoint, quantizer=None, scale=1) -> float:
    """Return the mean over the seeds of ``checkpoint``, times ``scale``."""
    rows = pair(name)
    rows = rows[(rows.task == task) & (rows.metric == metric)]
    rows = rows[rows.quantizer.isna() if quantizer is None else rows.quantizer == quantizer]
    rows = rows[rows.checkpoint.str.match(rf"{checkpoint}\.\d+$")]
    assert len(rows) > 1, (name, task, metric, checkpoint, quantizer)
    return scale * float(rows.value.mean())


@function
def percent(name, task, metric, checkpoint, quantizer=None, decimals=1) -> str:
    """Return a share as per cent, without the sign."""
    return f"{100 * value(name, task, metric, checkpoint, quantizer):.{decimals}f}"


def _times(number: float, decimals: int) -> str:
    return f"{number:.{decimals}f}" if number < 10 else f"{number:.{1 if number < 100 else 0}f}"


@function
def times(name, checkpoint, quantizer, task="wikitext", decimals=3) -> str:
    """Return "× 1.177": perplexity quantized over unquantized."""
    row = find(name, task, METRICS[task], checkpoint, quantizer)
    return f"× {_times(math.exp(row.damage), decimals if abs(row.damage) > 0.01 else 4)}"


@function
def ratio(
    name, quantizer, task="wikitext", mark=False, interval=True, checkpoint="softpick"
) -> str:
    """Return "× 1.041 [1.034, 1.048]": softpick's damage over softmax's; ``mark`` adds ‡ if it
    differs from 1 after Holm's correction over all differences of the pair."""
    row = find(name, task, METRICS[task], checkpoint, quantizer)
    ends = row.difference, row.difference_low, row.difference_high
    middle, low, high = (math.exp(one) for one in ends)
    decimals = min(max(1 - math.floor(math.log10(high - low)), 3), 5)
    text = f"× {_times(middle, decimals)}"
    if interval:
        text += f" [{_times(low, decimals)}, {_times(high, decimals)}]"
    return text + "‡" * (bool(mark and row.holm < 0.05))


@function
def least(names, quantizers, task="wikitext") -> float:
    """Return the smallest of softpick's damages over softmax's, of several pairs and quantizers."""
    return min(
        math.exp(find(name, task, METRICS[task], "softpick", one).difference)
        for name in names
        for one in quantizers
    )


@function
def each(name, quantizer, task="wikitext") -> str:
    """Return the same of every seed: "1.473, 1.457, 1.441"."""
    row = find(name, task, METRICS[task], "softpick", quantizer)
    return ", ".join(_times(math.exp(float(one)), 3) for one in row["each"].split())


def differences(name: str, kind: str = "", task: str = "") -> pd.DataFrame:
    rows = pair(name)
    rows = rows[
        rows.difference.notna() & rows.quantizer.fillna("").str.fullmatch(KINDS.get(kind, ".*"))
    ]
    return rows[rows.task == task] if task else rows


@function
def precisions(name, kind) -> list[str]:
    return list(dict.fromkeys(differences(name, kind).quantizer))


@function
def compared(name, kind="", task="") -> int:
    """Return the number of differences of damage."""
    return len(differences(name, kind, task))


@function
def significant(*names, kind="", task="") -> tuple[int, int]:
    """Return how many differences are significant in softpick's favour and against it. Holm's
    correction is over all differences of the pairs that are named."""
    rows = pd.concat([pair(name) for name in names])
    rows = rows[rows.difference_p.notna()]
    rows["holm"] = multipletests(rows.difference_p, method="holm")[1]
    rows = rows[rows.quantizer.str.fullmatch(KINDS.get(kind, ".*"))]
    marked = rows[(rows.holm < 0.05) & ((rows.task == task) | (not task))].difference
    return int((marked < 0).sum()), int((marked > 0).sum())


@function
def same_sign(name, seeds) -> tuple[int, int]:
    """Return how many of the significant differences of the pair ``name`` have their sign in each
    of ``seeds``, and how many there are."""
    marked = differences(name)[differences(name).holm < 0.05]
    others = differences(seeds).set_index(KEYS)["each"]
    signs = [
        all(
            float(one) * row.difference > 0
            for one in others[tuple(row[key] for key in KEYS)].split()
        )
        for _, row in marked.iterrows()
    ]
    return sum(signs), len(signs)


@function
def require(claim: bool, words: str) -> str:
    """Return ``words``, a claim that numbers must support; raise if they do not."""
    if not claim:
        raise ValueError(f"not so any more: {words}")
    return words


@function
def kl(name, checkpoint, quantizer, task="all") -> float:
    """Return the mean KL divergence from the unquantized model, nats per token."""
    return value(name, task, "kl", checkpoint, quantizer)


@function
def moves(name, kind, one="softpick", base="softmax") -> tuple[int, int, int]:
    """Return under how many precisions ``one`` has the smaller KL than ``base``, the larger one
    (of several seeds: in each of them), and the number of precisions."""
    rows = pair(name)
    rows = rows[
        (rows.metric == "kl") & (rows.task == "all") & rows.quantizer.str.fullmatch(KINDS[kind])
    ]
    table = rows.drop_duplicates(["quantizer", "checkpoint"])
    table = table.pivot(index="quantizer", columns="checkpoint", values="value")
    seeds = [column[len(one) :] for column in table if column.split(".")[0] == one]
    gaps = pd.concat([table[one + seed] - table[base + seed] for seed in seeds], axis=1)
    return int((gaps < 0).all(axis=1).sum()), int((gaps > 0).all(axis=1).sum()), len(gaps)


@function
def direction(name, one, quantizer, base="softmax") -> str:
    """Return " ▲" if the KL of ``one`` is above that of ``base`` in every seed, " ▼" if below."""
    if one == base:
        return ""
    rows = pair(name)
    rows = rows[(rows.metric == "kl") & (rows.task == "all") & (rows.quantizer == quantizer)]
    found = rows.set_index("checkpoint").value
    seeds = [key.partition(".")[2] for key in found.index if key.startswith(f"{one}.")]
    above = {found[f"{one}.{seed}"] > found[f"{base}.{seed}"] for seed in seeds}
    return {(True,): " ▲", (False,): " ▼"}.get(tuple(above), "")


@function
def cell(page, column, **where) -> str:
    """Return a cell of a table in results/bench/PAGE.md: the ``column`` of the only row whose
    columns have the texts in ``where`` (names with _ for spaces)."""
    found = {
        row[column]
        for row in bench_rows(page)
        if column in row
        and all(text == row.get(key.replace("_", " ")) for key, text in where.items())
    }
    if len(found) != 1:
        raise KeyError(f"{page}: {len(found)} rows have {where}")
    return found.pop()


@function
def rate(page, shape, kernel, base) -> str:
    """Return how many times as fast as ``base`` a kernel's causal forward pass is."""
    ours, theirs = (
        float(cell(page, "forward TFLOP/s", shape=shape, variant="causal", kernel=one))
        for one in (kernel, base)
    )
    return f"{ours / theirs:.2f}"


@lru_cache
def bench_rows(page: str) -> list[dict[str, str]]:
    rows, head = [], None
    for line in (
        (ROOT / "results" / "bench" / f"{page}.md").read_text(encoding="utf-8").splitlines()
    ):
        cells = [part.strip() for part in line.strip("|").split("|")] if line[:1] == "|" else None
        if cells is None or head is None:
            head = cells
        elif not re.fullmatch(r"[|:\- ]+", line):
            rows.append(dict(zip(head, cells, strict=True)))
    return rows


def pages() -> dict[Path, str]:
    """Return the text of every page that has a template."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True,
        trim_blocks=True, lstrip_blocks=True, autoescape=False,
    )  # fmt: skip
    environment.globals |= FUNCTIONS
    return {
        ROOT / name: environment.get_template(name).render() for name in loader.list_templates()
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
