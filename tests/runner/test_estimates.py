"""What a plan says that cells will take."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from small_recipe import qbench, small_recipe

from qbench.checkpoints.find import elements
from qbench.cli.run import RATES, estimate, plan_lines
from qbench.machine import GIB
from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.store import Store


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    return plan(Recipe.load(small_recipe(folder)), device="cpu")  # 3 × 3 documents


def test_the_plan_says_it(tmp_path, capfd):
    qbench("plan", small_recipe(tmp_path), "--out", tmp_path / "out", "--device", "cpu")
    shown = capfd.readouterr().out
    assert re.search(r"to run    softmax/fp32  key \w{16}  about \d+ s, 0\.\d GiB", shown)
    assert "4 of 4 cells to run take about" in shown
    assert "checkpoint  softpick: LlamaForCausalLM, 1.31 million parameters, 0.00489 GiB" in shown


def test_shapes_say_it_and_what_does_not_fit(tmp_path, planned, monkeypatch):
    cell = planned.cell("softmax/rtn-4bit")
    seconds, memory = estimate(cell, planned)
    assert 1 < seconds < 20
    original = elements(cell.checkpoint.headers) * 4 / GIB
    assert memory - estimate(planned.cell("softmax/fp32"), planned)[1] == pytest.approx(original)
    on_the_hub = replace(planned, tasks=(replace(planned.tasks[0], documents=None),))
    assert estimate(cell, on_the_hub) is None
    monkeypatch.setattr("qbench.cli.run.memory_gib", lambda device: 0.25)
    lines = list(plan_lines(planned, Store(tmp_path / "out"), "softmax/*"))
    assert any(line.endswith("does not fit into 0.2 GiB") for line in lines)
    evaluation = planned.recipe.evaluation.model_copy(update={"stream": True})
    streamed = replace(planned, recipe=planned.recipe.model_copy(update={"evaluation": evaluation}))
    lines = list(plan_lines(streamed, Store(tmp_path / "out"), "softmax/*"))
    assert any(line.endswith("as its weights come block by block") for line in lines)


def test_the_documents_state_the_rates():
    text = (Path(__file__).parents[2] / "docs" / "speed.md").read_text()
    gpu, cpu = RATES["cuda"], RATES["cpu"]
    for mode in ("fast", "exact", "lm-eval"):
        rates = rf"{gpu[mode] / 1e9:,.0f} \| {cpu[mode] / 1e9:.0f} "
        row = rf"`scoring: {mode}`[^|]*\| {rates}"
        assert re.search(row, text), mode
    for words in ("auditing them", "sees text", "computes"):
        kind = {"auditing them": "rounding", "sees text": "calibrating", "computes": "fixed"}[words]
        assert f"{words}, seconds | {gpu[kind]:.0f} | {cpu[kind]:.0f} |" in text
