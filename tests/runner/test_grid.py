"""Cells through executors: any of ``concurrent.futures``, and processes that are really killed."""

import io
import re
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from threading import Event
from types import SimpleNamespace

import pytest
from filelock import FileLock
from quick_cells import Quick
from small_recipe import DEMO, blocks, qbench, small_recipe

from qbench import store as module
from qbench.cell_tasks import Evaluation
from qbench.checkpoints.find import elements
from qbench.cli.run import HELD, estimate, plan_lines
from qbench.comparison.compare import compare
from qbench.machine import GIB
from qbench.plan import plan
from qbench.progress import SilentProgress
from qbench.recipe import Recipe
from qbench.runner.grid import _GridRun, run, run_cell, run_cells
from qbench.runner.progress import Display
from qbench.runner.workers import LostExecutorError, Workers
from qbench.store import Store

TASKS = ["demo_lastword"]
TEXT = {"path": str(DEMO / "calibration.jsonl"), "samples": 2, "length": 32}


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def one():
    """One checkpoint."""
    return blocks("softpick")


def planned(folder, **changes):
    return plan(Recipe.load(small_recipe(folder, **{"tasks": TASKS, **changes})), device="cpu")


def workers():
    return Workers([0, 0], device="cpu")


def test_cells_in_a_thread_have_the_scores_and_the_damage_of_cells_here(tmp_path, monkeypatch, one):
    looked_through, require = [], module.require_no_links
    monkeypatch.setattr(
        module, "require_no_links", lambda folder: looked_through.append(folder) or require(folder)
    )
    shown, plan_ = io.StringIO(), planned(tmp_path, checkpoints=one)
    here = run_cells(plan_, out=tmp_path / "here", cache=tmp_path / "another cache")
    assert looked_through.count(tmp_path / "here") == 1  # not once per cell
    with ThreadPoolExecutor(1) as executor, Display(shown, 2) as display:
        records = run_cells(plan_, out=tmp_path / "out", executor=executor, progress=display)
    assert looked_through.count(tmp_path / "out") == 1
    assert {r.cell: r.scores for r in records} == {r.cell: r.scores for r in here}
    assert shown.getvalue().count(": done (") == 2
    assert "softpick/rtn-4bit: evaluate demo_lastword" in shown.getvalue()
    assert all(record.damage.tasks for record in records if record.quantized)


def test_an_audit_is_the_same_against_a_copy_of_the_original(tmp_path, monkeypatch, one):
    from qbench import cell

    plan_ = planned(
        tmp_path, checkpoints=one, quantizers=["fp32", "gptq-4bit+int8-token+rotation"],
        calibration=TEXT,
    )  # fmt: skip

    def audits(name):
        records = run_cells(plan_, out=tmp_path / name, cache=tmp_path / f"{name} cache")
        assert all(record.audit.passed for record in records)
        return {record.cell: record.audit for record in records if record.quantized}

    read_again, load, loaded = audits("read"), cell.load_original, []

    def load_original(*arguments, **settings):
        loaded.append(settings)
        return load(*arguments, **settings)

    monkeypatch.setattr(cell, "load_original", load_original)
    monkeypatch.setattr(cell, "_copy_of_original", lambda of, model: deepcopy(model))
    assert audits("copied") == read_again
    assert loaded == [{}, {}]  # by the cells, with the unquantized one


def test_a_line_is_shown_as_it_is():
    """Not as rich's markup, nor as its emoji."""
    shown = io.StringIO()
    with Display(shown, 1) as display:
        display.log("[bold]a:-1:b:smile:")
    assert shown.getvalue() == "[bold]a:-1:b:smile:\n"


def test_without_damage_no_cell_waits_for_another(tmp_path):
    cells = planned(tmp_path, evaluation={"limit": 3, "damage": False}).cells
    assert {cell.base for cell in cells} == {None}


def test_a_long_step_says_how_far_it_is_though_no_step_begins(monkeypatch):
    monkeypatch.setattr("qbench.runner.progress.SECONDS_OF_SILENCE", 0.05)
    shown = io.StringIO()
    with Display(shown, 1) as display:
        display.begin("a/fp32")
        display.stage("a/fp32", "evaluate wikitext", 2000)
        display.advance("a/fp32", 100)
        time.sleep(0.1)
        display.advance("a/fp32", 340)
        time.sleep(0.4)
        lines = shown.getvalue().splitlines()
        display.stage("a/fp32", "evaluate piqa")
        time.sleep(0.2)
    assert shown.getvalue().splitlines()[-1].endswith("a/fp32: evaluate piqa")
    assert 3 <= len(lines) <= 12
    said = r"s \[1/1\] a/fp32: evaluate wikitext, 340 of 2,000, about \d+ s left$"
    assert re.search(said, lines[-1])


# What follows is about processes, locks and records. So that no process has to import torch, what
# runs in a cell is one step; all else is real: processes, kills, locks, connections, files.


def run_quickly(folder, inner, doomed=(), times=99, **settings):
    shown, out = io.StringIO(), folder / "out"
    with inner, Display(shown, 4) as display:
        executor = Quick(inner, folder / "marks", doomed, times)
        records = run_cells(
            planned(folder), out=out, executor=executor, progress=display, **settings
        )
    return {record.cell: record for record in records}, shown.getvalue(), Store(out)


@pytest.mark.parametrize("slots", [[0], [0, 0]])
def test_a_cell_that_kills_its_process_fails_alone(tmp_path, slots):
    inner = Workers(slots, device="cpu")
    records, shown, store = run_quickly(tmp_path, inner, {"softmax/rtn-4bit"})
    assert {cell: record.status for cell, record in records.items()} == {
        "softmax/fp32": "ok", "softmax/rtn-4bit": "failed",
        "softpick/fp32": "ok", "softpick/rtn-4bit": "ok",
    }  # fmt: skip
    assert "its process was killed" in records["softmax/rtn-4bit"].error
    assert [r.cell for r in store.records() if r.status == "failed"] == ["softmax/rtn-4bit"]
    assert shown.count(": done (") == 3


def test_processes_give_back_good_records_that_none_of_a_killed_process_replaces(tmp_path):
    first, shown, store = run_quickly(tmp_path, workers())
    assert {record.cell: record for record in store.records()} == first
    assert {record.status for record in first.values()} == {"ok"}
    assert shown.count(": done (") == shown.count(": step\n") == 4
    _, shown, _ = run_quickly(tmp_path, workers())
    assert shown.count("already finished") == 4
    doomed = {"softmax/rtn-4bit"}
    second, _, store = run_quickly(tmp_path, workers(), doomed, force=True)
    kept = {record.cell: record for record in store.records()}
    assert kept["softmax/rtn-4bit"] == first["softmax/rtn-4bit"]
    assert second["softmax/rtn-4bit"].status == "failed"
    assert kept["softmax/fp32"] == second["softmax/fp32"] != first["softmax/fp32"]


def test_what_another_run_makes_while_this_ones_process_dies_is_taken(tmp_path):
    """The process dies; before that is recorded, another run makes the cell."""
    plan_, store = planned(tmp_path), Store(tmp_path / "out")
    cell, cache = plan_.cell("softmax/rtn-4bit"), tmp_path / "cache"
    grid = _GridRun(plan_, store, SilentProgress(), cache, force=False)
    with ThreadPoolExecutor(1) as late, FileLock(store.path(cell.grid_cell, ".lock")):
        giving_up = late.submit(grid.give_up, cell, "died")
        time.sleep(0.2)
        made = run(cell, plan_, store, SilentProgress(), cache)
        assert made.status == "ok"
    assert giving_up.result() == made == store.get(cell.grid_cell)


class Lost(Executor):
    """As a cluster whose scheduler has died."""

    def submit(self, fn, name, **settings):
        raise LostExecutorError("the cluster was lost; start it")


def test_cells_of_an_executor_that_is_lost_fail_at_once_and_say_so(tmp_path):
    shown = io.StringIO()
    with Display(shown, 4) as display:
        records = run_cells(planned(tmp_path), out=tmp_path / "out", executor=Lost(),
                            progress=display)  # fmt: skip
    assert {record.error for record in records} == {"the cluster was lost; start it"}


def test_of_the_cells_that_are_ready_when_a_process_is_free_the_longest_begins(tmp_path):
    """Not those that were ready first."""
    names = ["fp32", "int8-tensor", "rtn-4bit", "gptq-4bit"]
    plan_ = planned(
        tmp_path, quantizers=names, calibration=TEXT, evaluation={"limit": 3, "scoring": "fast"}
    )
    order = [f"{of}/{name}" for name in names for of in ("softmax", "softpick")]
    store = Store(tmp_path / "out")
    grid = _GridRun(plan_, store, SilentProgress(), tmp_path / "cache", force=False, at_once=2)
    futures = {name: Future() for name in order}
    begun = []

    def submit(name, **_):
        begun.append(name)
        return futures[name]

    with ThreadPoolExecutor(1) as thread:
        cells = [plan_.cell(name) for name in order]
        running = thread.submit(grid._side_by_side, cells, submit)
        for name in ("softmax/fp32", "softpick/fp32", *order[2:]):
            time.sleep(0.1)
            futures[name].set_result(SimpleNamespace(key=plan_.cell(name).key))
        running.result()
    assert begun == order


def test_no_cell_is_run_in_a_process_whose_gpu_is_broken(tmp_path, monkeypatch):
    monkeypatch.setattr("qbench.machine._broken_device", "CUDA error")
    records = run_cells(planned(tmp_path), out=tmp_path / "out")
    assert {record.status for record in records} == {"failed"}
    assert "an earlier cell left the GPU unusable (CUDA error)" in records[0].error


def test_the_longest_cell_begins_whether_its_unquantized_one_is_done_or_at_work(tmp_path):
    plan_ = planned(tmp_path)
    order = ["softmax/fp32", "softpick/fp32", "softpick/rtn-4bit", "softmax/rtn-4bit"]
    store, futures, begun = Store(tmp_path / "out"), {name: Future() for name in order}, {}
    grid = _GridRun(plan_, store, SilentProgress(), tmp_path, force=False, at_once=2, early=True)

    def submit(name, base_at_work, **_):
        begun[name] = base_at_work is not None and base_at_work.exists()
        for each in ["softmax/fp32"] * (len(begun) == 2) + order[1:] * (len(begun) == 3):
            futures[each].set_result(SimpleNamespace(key=plan_.cell(each).key))
        return futures[name]

    grid._side_by_side([plan_.cell(name) for name in order], submit)
    assert [*begun] == order
    assert [*begun.values()] == [False, False, True, False]


@pytest.mark.parametrize("ends", [False, True])
def test_a_cell_waits_for_the_hidden_states_of_the_unquantized_one(
    tmp_path, monkeypatch, ends, one
):
    """They are there before its record. If it ends without them, damage is not measured."""
    plan_, at_work = planned(tmp_path, checkpoints=one), tmp_path / "at work"
    base, cell = plan_.cells
    store, others = Store(tmp_path / "out"), Store(tmp_path / "another out")
    at_work.touch()
    looked = []

    def works(evaluation):
        looked.append(evaluation)
        if len(looked) == 3:  # it waits
            at_work.unlink() if ends else run(base, plan_, others, SilentProgress(), tmp_path)
        return at_work.exists()

    monkeypatch.setattr("qbench.cell_tasks.Evaluation._base_works", works)
    record = run(cell, plan_, store, SilentProgress(), tmp_path, base_at_work=at_work)
    assert [stage.name for stage in record.stages][-2:] == ["wait", "evaluate"]
    if ends:
        assert record.damage.reason.startswith("softpick/fp32 has no finished record")
        assert record.damage.retry
    else:
        after = run(cell, plan_, others, SilentProgress(), tmp_path, reuse=False)
        assert record.damage == after.damage


def test_kl_of_some_tasks_is_not_shown_if_the_unquantized_cell_ends_before_the_others(
    tmp_path, monkeypatch, one
):
    plan_ = planned(tmp_path, checkpoints=one, tasks=["demo_lastword", "demo_choice"])
    base, cell = plan_.cells
    store, at_work = Store(tmp_path / "out"), tmp_path / "at work"
    run(base, plan_, Store(tmp_path / "another out"), SilentProgress(), tmp_path)
    module.baseline_file(tmp_path, module.task_key(base.key_parts, "demo_choice")).unlink()
    at_work.touch()
    judged, judge, sleep = Event(), Evaluation._judge, time.sleep
    monkeypatch.setattr(Evaluation, "_judge", lambda *a: (judge(*a), judged.set())[0])

    def wait(seconds):
        if judged.wait(0):
            at_work.unlink()  # it dies
        sleep(seconds)

    # cells' alone: threads of libraries sleep too
    monkeypatch.setattr("qbench.cell_tasks.time", SimpleNamespace(**{**vars(time), "sleep": wait}))
    record = run(cell, plan_, store, SilentProgress(), tmp_path, base_at_work=at_work)
    assert record.damage.retry
    assert {score.task for score in record.scores} == {"demo_lastword", "demo_choice"}
    store.put_manifest(plan_.manifest())
    assert not compare(store).kl.means


def test_damage_is_added_to_a_cell_that_begins_beside_the_unquantized_one(
    tmp_path, monkeypatch, one
):
    plan_ = planned(tmp_path, checkpoints=one)
    store, cell, begun = Store(tmp_path / "out"), plan_.cells[1], []
    [record] = run_cells(plan_, out=tmp_path / "out", cells=[cell], cache=tmp_path)
    assert record.damage.retry
    monkeypatch.setattr("qbench.runner.grid.run", lambda *_, **how: begun.append(how) or record)
    for base in (tmp_path / "none", tmp_path):  # of a cell that is not at work, and of one that is
        run_cell(
            plan_, cell.name, store=store, cache=tmp_path, progress=SilentProgress(),
            base_at_work=base,
        )  # fmt: skip
    assert [how["base_at_work"] for how in begun] == [tmp_path]


# What a plan says that cells will take.


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    return plan(Recipe.load(small_recipe(folder)), device="cpu")  # 3 × 3 documents


def test_the_plan_says_it(tmp_path, capfd):
    qbench("plan", small_recipe(tmp_path), "--out", tmp_path / "out", "--device", "cpu")
    shown = capfd.readouterr().out
    assert re.search(r"to run    softmax/fp32  key \w{16}  about \d+ s, 0\.\d GiB", shown)
    assert "4 of 4 cells to run take about" in shown
    assert "checkpoint  softpick: LlamaForCausalLM, 1.31 million parameters, 0.00489 GiB" in shown


def test_shapes_say_it_and_what_does_not_fit(tmp_path, small, monkeypatch):
    cell = small.cell("softmax/rtn-4bit")
    seconds, memory = estimate(cell, small)
    assert 1 < seconds < 20
    original = elements(cell.checkpoint.headers) * 4 / GIB
    assert memory - estimate(small.cell("softmax/fp32"), small)[1] == pytest.approx(original)
    on_the_hub = replace(small, tasks=(replace(small.tasks[0], documents=None),))
    assert estimate(cell, on_the_hub) is None
    monkeypatch.setattr("qbench.cli.run.memory_gib", lambda device: 0.25)
    lines = list(plan_lines(small, Store(tmp_path / "out"), "softmax/*"))
    assert any(line.endswith("does not fit into 0.2 GiB") for line in lines)
    evaluation = small.recipe.evaluation.model_copy(update={"stream": True})
    streamed = replace(small, recipe=small.recipe.model_copy(update={"evaluation": evaluation}))
    lines = list(plan_lines(streamed, Store(tmp_path / "out"), "softmax/*"))
    assert any(line.endswith("as its weights come block by block") for line in lines)


def test_inputs_that_wait_for_a_hessian_count_while_half_of_the_memory_holds_them(
    tmp_path, monkeypatch
):
    recipe = small_recipe(
        tmp_path, quantizers=["fp32", "rtn-4bit", "gptq-4bit"],
        calibration={"path": str(DEMO / "calibration.jsonl"), "samples": 32, "length": 512},
    )  # fmt: skip
    planned = plan(Recipe.load(recipe), device="cpu")
    cells = [planned.cell(f"softmax/{name}") for name in ("rtn-4bit", "gptq-4bit")]

    def more() -> float:
        """Return what GPTQ takes more, in hidden states of the calibration text."""
        rounded, calibrated = (estimate(cell, planned)[1] for cell in cells)
        return (calibrated - rounded) * GIB / (32 * 512 * 128 * 4)

    hidden, widest = 128, 512
    assert more() == pytest.approx(1 + HELD["cpu"] * (4 + 2 * widest / hidden))
    monkeypatch.setattr("qbench.cli.run.memory_gib", lambda device: 0.1)
    assert more() == pytest.approx(1)  # each Hessian takes a forward of its own
