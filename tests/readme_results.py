"""The pages of findings and speed, and what results they name, as the tests of their numbers
read them."""

import io
from functools import lru_cache
from pathlib import Path

import pandas as pd

from qbench.comparison.compare import compare
from qbench.store import Store
from qbench.tables import table_files

ROOT = Path(__file__).parent.parent
FINDINGS = (ROOT / "docs" / "findings.md").read_text()
SPEED = (ROOT / "docs" / "speed.md").read_text()
RESULTS = ROOT / "results"
TASKS = {
    "WikiText": ("wikitext [test_document_level]", "Word Perplexity ↓"),
    "LAMBADA": ("lambada_openai", "Perplexity ↓"),
}


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def part(begin: str, end: str, page: str = FINDINGS) -> str:
    start = page.index(begin)
    return page[start : page.index(end, start)]


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
