"""The pages of evidence and speed, and what results they name, as the tests of their numbers
read them."""

import io
import re
from functools import lru_cache
from pathlib import Path

import pandas as pd

from qbench.api import load_records
from qbench.comparison.compare import compare
from qbench.store import Store
from qbench.tables import table_files

ROOT = Path(__file__).parent.parent
EVIDENCE = (ROOT / "docs" / "evidence.md").read_text()
SPEED = (ROOT / "docs" / "speed.md").read_text()
RESULTS = ROOT / "results"
TASKS = {
    "WikiText": ("wikitext [test_document_level]", "Word Perplexity ↓"),
    "LAMBADA": ("lambada_openai", "Perplexity ↓"),
}


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def part(begin: str, end: str, page: str = EVIDENCE) -> str:
    start = page.index(begin)
    return page[start : page.index(end, start)]


@lru_cache
def shown(folder: str) -> dict[tuple[str, str, str, str], list[str]]:
    """Rows of the folder's tables by what the table is of, delta or damage, task, metric and
    quantizer."""
    found = {}
    text = (RESULTS / folder / "tables.md").read_text()
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title, task = section.splitlines()[0], ""
        kind = "damage" if "damage" in title else "delta"
        if kind == "damage" and "softpick’s − softmax’s" not in section.splitlines()[2]:
            continue
        for row in rows(section)[2:]:
            task = row[0] or task
            found.setdefault((kind, task, row[1], row[2].partition(" (")[0]), row)
    return found


def analysis(folder: str) -> dict[str, dict[str, str]]:
    """By cell its columns in the tables of the analysis, of all that have a row a cell."""
    known: dict[str, dict[str, str]] = {}
    text = (RESULTS / folder / "analysis" / "tables.md").read_text()
    for section in text.split("\n### ")[1:]:
        head, _, *body = rows(section)
        if head[0] == "Cell" and len({row[0] for row in body}) == len(body):
            for row in body:
                known.setdefault(row[0], {}).update(zip(head, row, strict=True))
    return known


@lru_cache
def files(folder: str) -> dict[str, str]:
    """The tables of a results folder, made afresh from its records."""
    store = Store(RESULTS / folder)
    return table_files(store, compare(store), ("csv",))


def table(folder: str, name: str = "tables.csv") -> pd.DataFrame:
    return pd.read_csv(io.StringIO(files(folder)[name]))


def differences(folder: str) -> pd.DataFrame:
    """Of each score and quantizer: what softpick's damage is above softmax's, in softpick's
    favour where positive, and whether it is significant; and what softmax gained."""
    every = table(folder)
    every = every[every.metric.isin(["acc", "acc_norm", "perplexity", "word_perplexity"])].copy()
    sign = every.direction.map({"up": 1, "down": -1})
    every["gain"] = sign * every.damage_log_ratio.fillna(every.damage)
    every["favour"] = sign * every.did_log_ratio.fillna(every.did)
    keys = ["task", "metric", "quantizer"]
    softmax = every[every.checkpoint == "softmax"].set_index(keys).gain.rename("softmax_gain")
    softmax = softmax[softmax.notna()].groupby(level=keys).first()
    found = every[every.did_p_holm.notna()].join(softmax, on=keys)
    return found.assign(significant=found.did_p_holm < 0.05)


@lru_cache
def scores(folder: str) -> pd.DataFrame:
    return load_records(RESULTS / folder)


@lru_cache
def divergences(folder: str) -> dict[tuple[str, str], float]:
    """Of checkpoint and quantizer: KL divergence from the unquantized model, mean over all scored
    tokens, in nats."""
    means = {}
    for record in Store(RESULTS / folder).records():
        found = [
            one.distributions for one in (record.damage.tasks if record.damage else {}).values()
        ]
        if found:
            tokens = sum(one.tokens for one in found)
            mean = sum(one.tokens * one.kl.mean for one in found) / tokens
            means[record.checkpoint, record.quantizer] = mean
    return means
