"""Tables beside table 4: stretches, sensitivity and its correlation."""

import math

import numpy as np
import pytest
from scipy import stats
from small_recipe import qbench
from synthetic import make_store

from qbench.errors import RecipeError
from qbench.records import Ratio, Sensitivity, UnitSensitivity
from qbench.store import Analyses
from qbench.tables.analyses import (
    all_sections,
    beside_paper,
    correlation,
    outliers_and_damage,
)
from qbench.tables.analysis_results import AnalysisResults, load_analyses


def some(count, noise, seed=0):
    draw = np.random.default_rng(seed)
    x = draw.lognormal(size=count)
    y = x * np.exp(noise * draw.normal(size=count))
    return list(zip(x, y, strict=True))


def test_the_rank_correlation_is_scipys_and_its_interval_holds_it():
    found = correlation(some(84, 1.0))
    x, y = zip(*some(84, 1.0), strict=True)
    assert found[0] == pytest.approx(stats.spearmanr(x, y).statistic)
    assert found[1] < found[0] < found[2]
    assert correlation(some(4, 1.0)) is None
    assert correlation([(1.0, float(i)) for i in range(9)]) is None
    assert correlation(some(9, 0.0))[0] == pytest.approx(1.0)


def test_the_interval_covers_the_truth_about_95_times_of_100():
    """Of a bivariate normal with Spearman's ρ known: 6/π · asin(r/2)."""
    draw = np.random.default_rng(3)
    r, hits, tries = 0.6, 0, 400
    truth = 6 / math.pi * math.asin(r / 2)
    for _ in range(tries):
        x = draw.normal(size=60)
        y = r * x + math.sqrt(1 - r * r) * draw.normal(size=60)
        _, low, high = correlation(list(zip(x, y, strict=True)))
        hits += low <= truth <= high
    assert 0.91 < hits / tries < 0.985


def test_a_papers_tables_stand_above_ours_and_ask_for_what_is_missing(tmp_path):
    store = make_store(tmp_path, quantizers=["bf16"], sizes={"wikitext": 12})
    (four,) = beside_paper(load_analyses(store), "softpick-340m")
    assert four.rows[0] == (
        "340M Softmax (paper)", "68.28", "63.41", "33510.81", "−207.55", "240.27", "4.53*",
    )  # fmt: skip
    assert [row[0] for row in four.rows] == ["340M Softmax (paper)", "340M Softpick (paper)"]
    assert "none; run `qbench analyze`" in four.notes[1]
    assert "*: zeros of softmax by underflow" in four.notes[0]
    (large,) = beside_paper(load_analyses(store), "softpick-1.8b")
    assert large.rows[1][3] == "2193.27"
    with pytest.raises(RecipeError, match="--published nothing: unknown"):
        beside_paper(load_analyses(store), "nothing")
    assert qbench("tables", tmp_path, "--published", "softpick-340m") == 0
    text = (tmp_path / "tables.md").read_text()
    assert "340M Softpick (paper)" in text


def test_outliers_are_those_of_the_unquantized_model_and_a_layers_are_its_most(analyzed):
    cells = Analyses(analyzed[1]).records()
    names = [f"model.layers.{index}" for index in range(4)]
    units = tuple(
        UnitSensitivity(
            name=name, layer=index, kl=Ratio(value=0.1 + index, stderr=None, documents=1),
            ln_perplexity_ratio=Ratio(value=0.0, stderr=None, documents=1),
        )
        for index, name in enumerate(names)
    )  # fmt: skip
    one = Sensitivity.model_construct(
        checkpoint="softmax", quantizer="rtn-4bit", unit="block", units=units
    )
    inputs = {i.name: i.largest_to_rms for i in cells[0].measured.inputs}
    found = outliers_and_damage(one, cells)
    assert len(found) == len(names)
    for unit, (outliers, _) in zip(one.units, found, strict=True):
        inside = [v for name, v in inputs.items() if name.startswith(f"{unit.name}.")]
        assert outliers == max(inside)
    assert outliers_and_damage(one.model_copy(update={"checkpoint": "other"}), cells) == []
    why = AnalysisResults(cells=tuple(cells), long=(), sensitivities=(), records=(), problems=())
    assert [section.title.split(":")[0] for section in all_sections(why)] == [
        "Sinks, hidden states, sparsity", "Other definitions", "Heads", "Inputs of linear layers",
        "Along the text",
    ]  # fmt: skip
