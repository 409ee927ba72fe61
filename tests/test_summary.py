"""What the report says in short is counted, ties apart."""

from __future__ import annotations

import pandas as pd
from synthetic import make_record, make_store, scores

from qbench.comparison.compare import compare
from qbench.viewer.summary import answers, count, summary

# Right answers of 49: softmax and softpick, each at bf16 and hqq-2bit. Fractions of 49 are no
# binary fractions, so that a − b − c + d of them is ±1e-16 where the counts cancel.
RIGHT = {
    "arc_easy": {"softmax": (30, 25), "softpick": (29, 24)},  # the same damage: a tie
    "piqa": {"softmax": (33, 30), "softpick": (26, 23)},  # likewise
    "sciq": {"softmax": (30, 20), "softpick": (30, 25)},  # softpick is hurt less
    "boolq": {"softmax": (30, 28), "softpick": (30, 24)},  # and more
}


def grid(folder):
    store = make_store(
        folder, sizes=dict.fromkeys(RIGHT, 1), quantizers=("bf16", "hqq-2bit")
    )  # fmt: skip
    for cell in store.grid().cells:
        frames = []
        for task, right in RIGHT.items():
            many = right[cell.checkpoint][cell.quantizer != "bf16"]
            frames.append(
                pd.DataFrame({"task": task, "document": range(49), "metric": "acc",
                              "value": [float(i < many) for i in range(49)], "weight": 1.0})
            )  # fmt: skip
        table = pd.concat(frames, ignore_index=True)
        store.put(make_record(cell, scores(table)), table, None)
    return compare(store)


def test_equal_damages_are_ties_and_neither_wins_nor_losses(tmp_path):
    found = count(answers(grid(tmp_path), "differences", "softpick"))
    assert (found.asked, found.better, found.worse, found.tied) == (4, 1, 1, 2)


def test_the_summary_tells_wins_losses_and_ties(tmp_path):
    told = "\n".join(summary(grid(tmp_path)))
    assert (
        "Quantization costs softpick less than softmax in 1 of 4 comparisons (0 significantly), "
        "more in 1 (0 significantly) and just as much in 2, by the difference of their damages."
    ) in told
    assert "Unquantized, softpick is better than softmax in 0 of 4 scores (0 significantly), is "
    assert "is worse in 2 (0 significantly) and equal in 2." in told
