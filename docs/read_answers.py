"""Write docs/answers.csv and the two pictures of docs/answers.md, from results/answers,
results/answers-27m and results/answers-sampled: `make numbers`.

Rank correlations are Spearman's between the precisions' KL along answers and on WikiText; their
intervals draw prompts and documents with replacement.
"""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from qbench.comparison.answers import AnswerDamage
from qbench.comparison.compare import compare
from qbench.records import ANSWERS
from qbench.statistics import KL_MEAN, Column, Effect, Missing, Panel, adjust, effect
from qbench.statistics.effect import DRAWN_ERRORS
from qbench.store import Store

DOCS = Path(__file__).parent
ROUNDS = 2_000
STABLE = {"Date": None}
rcParams["svg.hashsalt"] = "answers"  # the same identifiers every time
# Per cent of 1,000 runs, as tests/comparison/test_sham_answers.py counts them: marks in tables; the
# gate fails with given margins; it passes with margins of its own.
SHAM = {"samples": {2: 0.2, 4: 0.2, 8: 0.7}, "gate": {2: 0.0, 4: 0.0, 8: 0.2},
        "default": {2: 95.7, 4: 97.7, 8: 95.6}}  # fmt: skip
Columns = dict[str, Column]  # quantizer → KL by prompt or document


def columns(store: Store, checkpoint: str) -> tuple[Columns, Columns]:
    """Return KL along answers and on WikiText of each quantized cell of ``checkpoint``."""
    along, wikitext = {}, {}
    for record in store.records():
        if record.checkpoint != checkpoint or not record.quantized:
            continue
        outcomes = store.outcomes(record)
        kl = outcomes[(outcomes["task"] == ANSWERS) & (outcomes["metric"] == "kl")]
        along[record.quantizer] = Column.of(kl["document"].to_numpy(), kl["value"], kl["weight"])
        table = store.divergences(record)
        sums = (table["kl"] * table["tokens"]).groupby(table["document"]).sum()
        values = (sums / table.groupby("document")["tokens"].sum()).to_numpy(float)
        wikitext[record.quantizer] = Column.of(np.arange(len(values)), values, np.ones(len(values)))
    return along, wikitext


def means(parts: Columns, picked: np.ndarray | None = None) -> np.ndarray:
    return np.array([
        column.values.mean() if picked is None else column.values[picked].mean()
        for column in parts.values()
    ])  # fmt: skip


def correlation(along: Columns, wikitext: Columns) -> tuple[float, float, float]:
    """Return Spearman's rank correlation over precisions, with a 95 % percentile interval."""
    draw = np.random.default_rng(0)
    drawn = []
    for _ in range(ROUNDS):
        pair = []
        for parts in (along, wikitext):
            count = len(next(iter(parts.values())).documents)
            pair.append(means(parts, draw.integers(0, count, count)))
        drawn.append(spearmanr(*pair).statistic)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(spearmanr(means(along), means(wikitext)).statistic), float(low), float(high)


def contrast(parts: Columns, one: str, other: str) -> Effect | Missing:
    """Return the logarithm of the KL of ``one`` over that of the ``other``."""
    panel = Panel.of({name: parts[name] for name in (one, other)})
    return effect(panel, {one: 1, other: -1}, KL_MEAN)


def told_apart(parts: Columns) -> set[tuple[str, str]]:
    """Return the pairs of precisions whose KL differs at 5 % after Holm's correction over all."""
    tested = {}
    for pair in combinations(parts, 2):
        found = contrast(parts, *pair)
        if isinstance(found, Effect):
            tested[pair] = found
    return {p for p, one in zip(tested, adjust(list(tested.values())), strict=True)
            if one.significant}  # fmt: skip


def main() -> None:
    rows: list[tuple[str, str, object]] = []
    points: dict[str, tuple[Columns, Columns]] = {}
    for folder in ("answers", "answers-27m"):
        store = Store(DOCS.parent / "results" / folder)
        for checkpoint in store.manifest().checkpoints:
            along, wikitext = points[checkpoint] = columns(store, checkpoint)
            for name, value in zip(("rank", "low", "high"), correlation(along, wikitext),
                                   strict=True):  # fmt: skip
                rows.append((checkpoint, name, f"{value:.2f}"))
            more, less = told_apart(along), told_apart(wikitext)
            rows += [
                (checkpoint, "precisions", len(along)),
                (checkpoint, "pairs", math.comb(len(along), 2)),
                (checkpoint, "answers", len(more)), (checkpoint, "wikitext", len(less)),
                (checkpoint, "only answers", len(more - less)),
                (checkpoint, "only wikitext", len(less - more)),
            ]  # fmt: skip
            for name, parts in (("along", along), ("wikitext", wikitext)):
                found = contrast(parts, "gptq-4bit", "rtn-4bit")
                for end in ("estimate", "low", "high"):
                    ratio = math.exp(getattr(found, end))
                    rows.append((checkpoint, f"gptq {name} {end}", f"{ratio:.2f}"))
            for quantizer in along:
                ratio = along[quantizer].values.mean() / wikitext[quantizer].values.mean()
                rows.append((checkpoint, f"ratio {quantizer}", f"{ratio:.2f}"))
    drawn = compare(Store(DOCS.parent / "results" / "answers-sampled"))
    for metric in ("stops", "length"):
        lines = [line for line in drawn.lines if (line.task, line.metric) == (ANSWERS, metric)]
        widest = max(one.drawn for line in lines for one in line.of("damages").values())
        rows.append(("drawn", metric, round(100 * DRAWN_ERRORS * widest, 1)))
    rows += [("sham", f"{count} {what}", share) for what, shares in SHAM.items()
             for count, share in shares.items()]  # fmt: skip
    table = pd.DataFrame(rows, columns=["checkpoint", "name", "value"])
    table.to_csv(DOCS / "answers.csv", index=False)
    _against_wikitext(points).savefig(DOCS / "pictures" / "answers-wikitext.svg", metadata=STABLE)
    _by_position().savefig(DOCS / "pictures" / "answers-position.svg", metadata=STABLE)


def _against_wikitext(points: dict[str, tuple[Columns, Columns]]) -> Figure:
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.subplots()
    for marker, (checkpoint, (along, wikitext)) in zip("os^", points.items(), strict=True):
        x, y = means(wikitext), means(along)
        label = {"smollm2": "SmolLM2-135M-Instruct"}.get(checkpoint, f"27M, {checkpoint}")
        axes.plot(x, y, marker, label=label, markersize=5)
        for name, *at in zip(along, x, y, strict=True) if checkpoint == "smollm2" else ():
            above = at[1] > at[0]  # the line on which both are equal
            axes.annotate(name, at, xytext=(-6, 1) if above else (6, -7), fontsize=7,
                          textcoords="offset points", ha="right" if above else "left")  # fmt: skip
    ends = [min(axes.get_xlim()[0], 3e-4), axes.get_xlim()[1]]
    axes.plot(ends, ends, color="0.8", linewidth=1, zorder=0)
    axes.set(xscale="log", yscale="log", xlabel="KL on WikiText, nats per token",
             ylabel="KL along answers, nats per token")  # fmt: skip
    axes.legend(frameon=False)
    return figure


def _last_kl(damage: AnswerDamage) -> float:
    return list(damage.by_position.values())[-1].kl


def _by_position() -> Figure:
    comparison = compare(Store(DOCS.parent / "results" / "answers"))
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    axes = figure.subplots()
    lowest = 0.0  # of the next label, so that none covers another
    for cell, damage in sorted(comparison.answers.items(), key=lambda item: _last_kl(item[1])):
        kl = [one.kl for one in damage.by_position.values()]
        (line,) = axes.plot(list(damage.by_position), kl, marker="o", markersize=3)
        height = max(kl[-1], lowest)
        lowest = 1.3 * height
        axes.text(len(kl) - 0.95, height, cell.split("/")[1], fontsize=7, va="center",
                  color=line.get_color())  # fmt: skip
    axes.set(yscale="log", xlabel="position in the answer", ylabel="KL, nats per token")
    axes.margins(x=0.16)
    return figure


if __name__ == "__main__":
    main()
