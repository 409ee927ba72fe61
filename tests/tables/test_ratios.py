"""Perplexities are compared by their ratio, and damage stands below each delta table."""

import csv
import io
import math
import re

import pytest

from qbench.tables import render


def of_perplexities(row):
    return row["metric"].endswith("perplexity")


def test_perplexities_have_no_interval_error_or_damage_on_the_raw_scale_in_the_csv(tested):
    rows = list(csv.DictReader(io.StringIO(render(tested, format="csv"))))
    asked = [row for row in rows if row["delta_p"] or row["damage_p"]]
    raw = [f"{question}{part}" for question in ("delta", "damage", "did")
           for part in ("_stderr", "_low", "_high")] + ["damage", "did"]  # fmt: skip
    perplexities = [row for row in asked if of_perplexities(row)]
    assert len(perplexities) > 10
    assert {row[column] for row in perplexities for column in raw} == {""}
    others = [row for row in asked if not of_perplexities(row)]
    assert {row["did_log_ratio"] for row in others} == {""}
    for row in perplexities:
        if row["delta"]:
            ends = [float(row[f"delta_log_ratio{end}"]) for end in ("_low", "", "_high")]
            assert ends == sorted(ends)
            base = next(
                r for r in rows if r["checkpoint"] == "softmax"
                and all(r[name] == row[name] for name in ("task", "metric", "quantizer"))
            )  # fmt: skip
            assert float(row["delta"]) == float(row["value"]) - float(base["value"])
            ratio = float(row["value"]) / float(base["value"])
            assert ends[1] == pytest.approx(math.log(ratio), abs=1e-9)


def test_damage_and_its_difference_stand_below_each_delta_table_as_ratios(tested):
    text = render(tested)
    assert "Records: ." not in text
    assert "softpick’s − softmax’s" in text
    line = next(line for line in tested.lines if line.metric == "word_perplexity" and line.damages)
    shown = [float(number) for number in re.findall(r"\d+\.\d+", text)]
    for effect in (*line.damages.values(), *line.differences.values()):
        for value in (effect.estimate, effect.interval.low, effect.interval.high):
            assert any(number == pytest.approx(math.exp(value), abs=6e-4) for number in shown)
    assert "× [" in text
    accuracy = next(line for line in tested.lines if line.differences and line.percent)
    told = f"{100 * accuracy.differences['softpick'].estimate:+.2f}".replace("-", "−")
    assert told in text
