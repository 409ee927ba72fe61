"""Simulate the verdict on documents of real runs and write results/bench/verdict.md, which
evidence.md takes numbers from: `python docs/simulate.py`, some 20 minutes on one core.

A grid is a run whose documents are drawn from those of a real one. *Equal*: every precision's KL
divergences are scaled to one mean, so that none is nearer than another. *Half*: half of the real
run's documents, without replacement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from qbench.comparison.compare import compare
from qbench.comparison.losses import kl_column, kl_from
from qbench.comparison.rows import Comparison
from qbench.comparison.verdict import ordered
from qbench.statistics import KL_MEAN, Column, Panel, effect, over_seeds
from qbench.store import Store
from qbench.text import table

RESULTS = Path(__file__).parent.parent / "results"
GRIDS = 400
FOUR_BITS = ("hqq-4bit", "bnb-4bit", "gptq-4bit", "rtn-4bit")
EQUAL = [
    *(("smollm2", FOUR_BITS, documents) for documents in (20, 100, 1_000)),
    *(("published-27m-gguf", ("Q8_0", "Q4_K_M", "Q4_0", "Q3_K_M"), n) for n in (20, 100, 1_000)),
]
HALF = ("smollm2", "published-27m-gguf")
# folder, the cell whose KL divergence has an interval, or two whose ratio has one
INTERVALS = [
    ("smollm2", "smollm2/hqq-4bit"),
    ("published-27m", "softpick/torchao-int8"),  # one document of 200 has 14 % of all KL
    ("methods-27m", "softpick/w8a8-int8"),  # one of 5,215 has 6 %
    ("smollm2", "smollm2/hqq-4bit", "smollm2/gptq-4bit"),
    ("smollm2", "smollm2/bnb-8bit", "smollm2/gptq-8bit"),
    ("published-27m-gguf", "softmax/Q4_K_M", "softmax/Q3_K_M"),
    ("published-27m", "softpick/bnb-nf4", "softmax/bnb-nf4"),
    ("published-27m", "softpick/bnb-int8", "softmax/bnb-int8"),
    ("published-27m", "softpick/torchao-int8", "softmax/torchao-int8"),
]
TRAININGS = 3
BETWEEN, WITHIN = 0.1, 0.3  # standard deviations of ln KL: of a training, of its documents


@lru_cache
def run(folder: str) -> tuple[Comparison, dict[str, Column]]:
    """Return a results folder's comparison, and the KL divergences by document of its cells."""
    store = Store(RESULTS / folder)
    comparison = replace(compare(store, statistics=False), tested=True)
    columns = {cell: kl_column(store, record) for cell, record in comparison.records.items()}
    return comparison, {cell: column for cell, column in columns.items() if column}


def panel(folder: str, cells: Sequence[str]) -> np.ndarray:
    """Return KL divergences on the documents that all ``cells`` share, [documents, cells]."""
    return Panel.of({cell: run(folder)[1][cell] for cell in cells}).values


def grid(comparison: Comparison, cells: Sequence[str], values: np.ndarray) -> Comparison:
    """Return the comparison with these KL divergences, [documents, cells]."""
    documents, ones = np.arange(len(values)), np.ones(len(values))
    columns = {
        cell: Column(documents=documents, values=values[:, index], weights=ones)
        for index, cell in enumerate(cells)
    }
    return replace(comparison, primary=kl_from(comparison, columns))


def wrong_order(folder: str, names: Sequence[str], documents: int, grids: int = GRIDS) -> float:
    """Return the share of grids of equal precisions in which one is called nearer than another."""
    comparison, _ = run(folder)
    cells = [f"{comparison.grid.checkpoints[0]}/{name}" for name in names]
    values = panel(folder, cells)
    values = values / values.mean(axis=0)
    rng, wrong = np.random.default_rng(documents), 0
    for _ in range(grids):
        drawn = values[rng.integers(0, len(values), documents)]
        pairs = grid(comparison, cells, drawn).primary.pairs.values()
        wrong += any(pair.significant for pair in pairs)
    return wrong / grids


def half_of_the_documents(folder: str, grids: int = GRIDS) -> dict[str, float]:
    """Return the shares of grids that find the real run's nearest precision and its whole order,
    and of the real run's significant pairs those that a grid finds or reverses."""
    comparison, columns = run(folder)
    cells, checkpoint = list(columns), comparison.grid.checkpoints[0]
    values = panel(folder, cells)
    real = grid(comparison, cells, values)
    order = ordered(real, checkpoint)
    truth = {key: pair.estimate > 0 for key, pair in real.primary.pairs.items() if pair.significant}
    rng, nearest, same, seen, reversed_ = np.random.default_rng(0), 0, 0, 0, 0
    for _ in range(grids):
        drawn = rng.permutation(len(values))[: len(values) // 2]
        half = grid(comparison, cells, values[drawn])
        names = ordered(half, checkpoint)
        nearest, same = nearest + (names[0] == order[0]), same + (names == order)
        signs = [(half.primary.pairs[key], positive) for key, positive in truth.items()]
        right = [(pair.estimate > 0) == up for pair, up in signs if pair.significant]
        seen, reversed_ = seen + sum(right), reversed_ + len(right) - sum(right)
    total = grids * max(1, len(truth))
    return {
        "nearest": nearest / grids, "order": same / grids,
        "seen": seen / total, "reversed": reversed_ / total,
    }  # fmt: skip


def coverage(
    folder: str, cells: Sequence[str], documents: int, trainings: int = 1, grids: int = GRIDS
) -> float:
    """Return how often the interval of a cell's KL, or of the ratio of two cells', holds that of
    all real documents; over several ``trainings`` each document's KL varies around the real one."""
    values = panel(folder, cells)
    sign = (1.0, -1.0)[: len(cells)]
    truth = float(np.log(values.mean(axis=0)) @ sign)
    rng, covered = np.random.default_rng([documents, trainings]), 0
    for _ in range(grids):
        drawn = values[rng.integers(0, len(values), documents)]
        if trainings == 1:
            index = {side: side for side in range(len(cells))}
            sample = Panel(values=drawn, weights=np.ones_like(drawn), index=index)
            interval = effect(sample, dict(enumerate(sign)), KL_MEAN)
        else:
            shape = (trainings, documents, len(cells))
            noise = rng.normal(-(WITHIN**2) / 2, WITHIN, shape)
            noise += rng.normal(0, BETWEEN, (trainings, 1, len(cells)))
            several = np.concatenate(list(drawn * np.exp(noise)), axis=1)
            names = [(side, each) for each in range(trainings) for side in range(len(cells))]
            index = {name: column for column, name in enumerate(names)}
            sample = Panel(values=several, weights=np.ones_like(several), index=index)
            signs = [[{(side, each): sign[side] for side in range(len(cells))}
                      for each in range(trainings)]]  # fmt: skip
            interval = over_seeds(sample, signs, KL_MEAN)
        covered += interval.low <= truth <= interval.high
    return covered / grids


def main() -> None:
    """Run all simulations and write the page."""
    percent = "{:.1f}".format
    equal = [
        (folder, ", ".join(names), f"{n:,}", percent(100 * wrong_order(folder, names, n)))
        for folder, names, n in EQUAL
    ]
    halves = [
        (folder, len(run(folder)[1]), *(percent(100 * share) for share in shares.values()))
        for folder in HALF
        for shares in [half_of_the_documents(folder)]
    ]
    covered = [
        (folder, " / ".join(cells), f"{n:,}",
         *(percent(100 * coverage(folder, cells, n, trainings)) for trainings in (1, TRAININGS)))
        for folder, *cells in INTERVALS
        for n in (20, 100, 1_000)
    ]  # fmt: skip
    parts = [
        "# The verdict on documents of real runs",
        f"`python docs/simulate.py`: {GRIDS} grids each.",
        "Equal precisions: % of grids in which one is called nearer than another.",
        table(("results", "precisions", "documents", "wrong %"), equal, align="lllr"),
        "Half of the documents, in %: the nearest precision found, the whole order found; of the "
        "real run's significant pairs those seen, and those reversed.",
        table(("results", "cells", "nearest %", "order %", "seen %", "reversed %"), halves,
              align="lrrrrr"),
        f"95 % intervals of KL and of ratios of KL: % that hold the truth, of one training and of "
        f"{TRAININGS} (ln KL of a training varies by {BETWEEN}, of its documents by {WITHIN}).",
        table(("results", "cells", "documents", "one %", "several %"), covered, align="lllrr"),
    ]  # fmt: skip
    (RESULTS / "bench" / "verdict.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
