"""What a plan and a run say that cells will take, from what earlier ones took."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from small_recipe import qbench, small_recipe

from qbench.cli.run import plan_lines
from qbench.machine import hardware
from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.runner.estimates import RATES, TimeLeft, earlier, estimate, expected
from qbench.store import Store


def record(cell, hardware, seconds=10.0, documents=12):
    stages = [{"name": "load", "seconds": 1.0, "peak_memory_gib": 0.25},
              {"name": "evaluate", "seconds": seconds, "peak_memory_gib": 0.5}]  # fmt: skip
    scores = [{"task": f"t{n}", "documents": documents // 3} for n in range(3)]
    return {"status": "ok", "key_parts": dict(cell.key_parts), "stages": stages, "scores": scores,
            "environment": {"hardware": hardware}}  # fmt: skip


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    return plan(Recipe.load(small_recipe(folder)), device="cpu")  # 3 × 3 documents


def test_scoring_is_in_proportion_to_the_documents(planned):
    cell = planned.cells[0]
    found = estimate(cell, planned, [record(cell, hardware("cpu"))])
    assert (found.seconds, found.memory_gib) == (pytest.approx(1 + 10 * 9 / 12), 0.5)
    assert str(found) == "about 8 s, 0.5 GiB"


@pytest.mark.parametrize("other", ["weights", "quantizer", "hardware", "broken"])
def test_what_is_not_alike_says_nothing(planned, other):
    cell = planned.cells[0]
    one = record(cell, "another" if other == "hardware" else hardware("cpu"))
    if other in one["key_parts"]:
        one["key_parts"][other] = "another"
    if other == "broken":
        one["stages"] = None
    assert estimate(cell, planned, [one]) is None


def test_records_of_folders_beside_are_read_and_damaged_ones_skipped(tmp_path):
    for name, text in (("a", '{"status": "ok"}'), ("b", "{"), ("c", '{"status": "failed"}')):
        folder = tmp_path / name / "records" / "softmax" / "bf16"
        folder.mkdir(parents=True)
        (folder / "0123.json").write_text(text)
    assert earlier(tmp_path / "new") == [json.loads('{"status": "ok"}')]


def test_the_plan_says_it(tmp_path, planned, capfd):
    cell = planned.cell("softmax/fp32")
    folder = tmp_path / "before" / "records" / "softmax" / "fp32"
    folder.mkdir(parents=True)
    (folder / "0123.json").write_text(json.dumps(record(cell, hardware("cpu"))))
    qbench("plan", small_recipe(tmp_path), "--out", tmp_path / "out", "--device", "cpu")
    shown = capfd.readouterr().out
    assert f"to run    softmax/fp32  key {cell.key[:16]}  about 8 s, 0.5 GiB" in shown
    assert "4 of 4 cells to run take about" in shown
    assert ": 1 by earlier records of the same weights on this hardware, 3 by their shapes" in shown
    assert "checkpoint  softpick: LlamaForCausalLM, 1.31 million parameters, 0.00489 GiB" in shown


def test_without_any_record_shapes_say_it_and_what_does_not_fit(tmp_path, planned, monkeypatch):
    cell = planned.cell("softmax/rtn-4bit")
    found = expected(cell, planned, [])
    assert not found.measured
    assert 1 < found.seconds < 20
    assert 0.5 < found.memory_gib < 2
    on_the_hub = replace(planned, tasks=(replace(planned.tasks[0], documents=None),))
    assert expected(cell, on_the_hub, []) is None
    monkeypatch.setattr("qbench.cli.run.memory_gib", lambda device: 0.25)
    lines = list(plan_lines(planned, Store(tmp_path / "out"), "softmax/*"))
    assert any(line.endswith("does not fit into 0.2 GiB") for line in lines)


def test_the_documents_state_the_rates():
    text = (Path(__file__).parents[2] / "docs" / "speed.md").read_text()
    gpu, cpu = RATES["cuda"], RATES["cpu"]
    for mode in ("fast", "exact", "lm-eval"):
        rates = rf"{gpu.score[mode] / 1e9:,.0f} \| {cpu.score[mode] / 1e9:.0f} "
        row = rf"`scoring: {mode}`[^|]*\| {rates}"
        assert re.search(row, text), mode
    assert f"auditing them, seconds | {gpu.rounding:.0f} | {cpu.rounding:.0f} |" in text
    assert f"sees text, seconds | {gpu.calibrating:.0f} | {cpu.calibrating:.0f} |" in text
    assert f"seconds | {gpu.fixed:.0f} | {cpu.fixed:.0f} |" in text


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def time_left(cells, **about):
    clock = Clock()
    return clock, TimeLeft(cells, clock=clock, **about)


def test_earlier_records_say_what_is_left_before_anything_has_run():
    _, left = time_left(["a", "b"], expected={"a": 40.0, "b": 20.0})
    assert left.left() == 60
    _, left = time_left(["a", "b"], expected={"a": 40.0, "b": 20.0}, at_once=2)
    assert left.left() == 30
    _, left = time_left(["a", "b"])
    left.begin("a")
    assert left.left() is None


def test_a_finished_cell_and_one_that_was_there_count_as_what_they_are():
    clock, left = time_left(["a", "b", "c"])
    left.begin("a")
    left.end("a")  # was there already: took nothing
    assert left.left() is None
    left.begin("b")
    left.stage("b", "evaluate one")
    clock.now = 12
    left.end("b")
    assert left.left() == 12


def test_what_a_process_imports_before_its_first_cell_says_nothing_of_the_others():
    clock, left = time_left(["a", "b"], expected={"a": 2.0, "b": 2.0})
    left.begin("a")
    clock.now = 30
    left.stage("a", "prepare")
    left.stage("a", "evaluate one")
    clock.now = 33
    left.end("a")
    assert left.left() == 3


def test_finished_cells_correct_what_the_others_are_expected_to_take():
    clock, left = time_left(["a", "b", "c"], expected={"a": 3.0, "b": 6.0, "c": 9.0})
    left.begin("a")
    left.stage("a", "evaluate one")
    clock.now = 30
    left.end("a")
    assert left.left() == 60 + 90


def test_a_cell_that_is_late_needs_a_tenth_of_its_time_more():
    clock, left = time_left(["a"], expected={"a": 3.0})
    left.begin("a")
    clock.now = 2
    assert left.left() == 1
    clock.now = 50
    assert left.left() == 5


def test_weights_that_come_block_by_block_need_the_host_instead(planned):
    cell = planned.cell("softmax/rtn-4bit")
    evaluation = planned.recipe.evaluation.model_copy(update={"stream": True})
    streamed = replace(planned, recipe=planned.recipe.model_copy(update={"evaluation": evaluation}))
    resident, found = expected(cell, planned, []), expected(cell, streamed, [])
    assert found.memory_gib < resident.memory_gib
    assert found.seconds > resident.seconds
    assert found.disk_gib == pytest.approx(1.31e6 / 2 / 2**30, rel=0.01)  # 4 bits a weight
    assert found.host_gib > found.disk_gib
    assert "block by block, 0.0 GiB of host memory, 0.0 GiB of disk" in str(found)
