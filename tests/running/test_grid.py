"""Cells through executors: any of ``concurrent.futures``, and processes that are really killed."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from datetime import UTC, datetime
from multiprocessing import get_context

import pandas as pd
import pytest
from filelock import FileLock
from small_recipe import small_recipe

from qbench.cell import run
from qbench.plan import plan
from qbench.progress import SilentProgress
from qbench.recipe import Recipe
from qbench.records import OUTCOME_COLUMNS, RESPONSE_COLUMNS
from qbench.running.executors import Processes, SerialExecutor
from qbench.running.grid import run_cells
from qbench.running.progress import Display
from qbench.running.work import give_up
from qbench.store import Store

TASKS = ["demo_lastword"]


pytestmark = pytest.mark.usefixtures("own_cache")


def planned(folder, **changes):
    return plan(Recipe.load(small_recipe(folder, **{"tasks": TASKS, **changes})), device="cpu")


def test_a_plan_can_be_pickled_and_planning_imports_no_torch(tmp_path):
    path = small_recipe(tmp_path)
    code = (
        "import pickle, sys; from pathlib import Path; from qbench.plan import plan; "
        f"from qbench.recipe import Recipe; p = plan(Recipe.load(Path({str(path)!r})), "
        "device='cpu'); assert pickle.loads(pickle.dumps(p)) == p; "
        "print({'torch', 'transformers', 'lm_eval', 'datasets'} & set(sys.modules), len(p.cells))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["set()", "4"]


def spawned():
    return ProcessPoolExecutor(2, mp_context=get_context("spawn"))


def processes():
    return Processes([0, 0], device="cpu", idle_ends=True)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected")
    records = run_cells(planned(folder), out=folder / "out", cache=folder / "cache")
    return {record.cell: record.scores for record in records}


def test_cells_in_a_thread_have_the_scores_and_the_damage_of_cells_here(tmp_path, expected):
    shown = io.StringIO()
    with ThreadPoolExecutor(1) as executor, Display(shown, 4) as display:
        records = run_cells(planned(tmp_path), out=tmp_path / "out", executor=executor,
                            progress=display)  # fmt: skip
    assert {record.cell: record.scores for record in records} == expected
    assert shown.getvalue().count(": done (") == 4
    assert "softpick/rtn-4bit: evaluate demo_lastword" in shown.getvalue()
    assert all(record.damage.tasks for record in records if record.quantized)


class BreaksOnce(SerialExecutor):
    """Breaks when it is first given the cell ``name``."""

    def __init__(self, name):
        self.broken = {name}

    def submit(self, fn, name, **settings):
        if name in self.broken:
            self.broken.remove(name)
            raise BrokenExecutor
        return super().submit(fn, name, **settings)


def test_cells_beside_an_unquantized_one_that_died_are_measured_when_it_is_there(
    tmp_path, expected
):
    records = run_cells(
        planned(tmp_path), out=tmp_path / "out", executor=BreaksOnce("softmax/fp32")
    )
    assert {record.cell: record.scores for record in records} == expected
    assert {record.damage.status for record in records if record.quantized} == {"measured"}


def test_a_cell_that_begins_again_keeps_its_number():
    shown = io.StringIO()
    with Display(shown, 2) as display:
        for cell in ("a/fp32", "b/fp32", "a/fp32"):
            display.begin(cell)
            display.stage(cell, "load")
            display.end(cell)
    assert [line.split("s ", 1)[1] for line in shown.getvalue().splitlines()] == [
        "[1/2] a/fp32: load", "[2/2] b/fp32: load", "[1/2] a/fp32: load",
    ]  # fmt: skip


# What follows is about processes, locks and records. So that no process has to import torch, what
# runs in a cell is one step; all else is real: processes, kills, locks, connections, files.


class Quick(Executor):
    """Sends quick cells on. The process of the cells ``doomed`` is killed in the middle of them,
    each time or the first ``times`` times."""

    def __init__(self, inner, marks, doomed=(), times=99):
        self.inner, self.marks, self.doomed, self.times = inner, marks, doomed, times

    def submit(self, fn, name, **settings):
        return self.inner.submit(
            quickly, fn, name, self.marks, self.times if name in self.doomed else 0, **settings
        )


def quickly(fn, name, marks, deaths, **settings):
    """In a worker process: a cell of one step, in which the process is killed while there are
    fewer marks than ``deaths``."""
    import qbench.cell

    def step(cell, plan, store, result, progress, cache):
        progress.stage(cell.name, "step")
        marks.mkdir(exist_ok=True)
        if len(list(marks.iterdir())) < deaths:
            (marks / str(time.monotonic_ns())).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        result.outcomes = [pd.DataFrame(columns=list(OUTCOME_COLUMNS))]
        result.responses = [pd.DataFrame(columns=list(RESPONSE_COLUMNS))]

    qbench.cell._run = step
    return fn(name, **settings)


def run_quickly(folder, inner, doomed=(), times=99, **settings):
    shown, out = io.StringIO(), folder / "out"
    with inner, Display(shown, 4) as display:
        executor = Quick(inner, folder / "marks", doomed, times)
        records = run_cells(
            planned(folder), out=out, executor=executor, progress=display, **settings
        )
    return {record.cell: record for record in records}, shown.getvalue(), Store(out)


@pytest.mark.parametrize("make", [spawned, processes], ids=["spawned", "processes"])
def test_processes_give_back_records_and_progress(tmp_path, make):
    records, shown, store = run_quickly(tmp_path, make())
    assert {record.cell: record for record in store.records()} == records
    assert {record.status for record in records.values()} == {"ok"}
    assert shown.count(": done (") == 4
    assert shown.count(": step\n") == 4
    _, shown, _ = run_quickly(tmp_path, make())
    assert shown.count("already there") == 4


@pytest.mark.parametrize("slots", [[0], [0, 0]])
def test_a_cell_that_kills_its_process_fails_alone(tmp_path, slots):
    inner = Processes(slots, device="cpu", idle_ends=True)
    records, shown, store = run_quickly(tmp_path, inner, {"softmax/rtn-4bit"})
    assert {cell: record.status for cell, record in records.items()} == {
        "softmax/fp32": "ok", "softmax/rtn-4bit": "failed",
        "softpick/fp32": "ok", "softpick/rtn-4bit": "ok",
    }  # fmt: skip
    assert "its process was killed" in records["softmax/rtn-4bit"].error
    assert [r.cell for r in store.records() if r.status == "failed"] == ["softmax/rtn-4bit"]
    assert shown.count(": done (") == 3


class Together(Quick):
    """The first cell to begin is killed while the second is at work, which goes on after that."""

    def submit(self, fn, name, **settings):
        return self.inner.submit(beside_another, fn, name, self.marks, **settings)


def beside_another(fn, name, marks, **settings):
    """In a worker process: waits until two cells are at work, then the first of them dies."""
    import qbench.cell

    def wait_for(condition):
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.05)

    def step(cell, plan, store, result, progress, cache):
        progress.stage(cell.name, "step")
        marks.mkdir(exist_ok=True)
        begun, died = marks / str(time.monotonic_ns()), marks / "died"
        if not died.exists():
            begun.touch()
            wait_for(lambda: len(list(marks.iterdir())) >= 2)
            if begun == min(marks.iterdir()):
                time.sleep(0.5)  # so that the other one has said that it began
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            wait_for(died.exists)
            time.sleep(1)
        result.outcomes = [pd.DataFrame(columns=list(OUTCOME_COLUMNS))]
        result.responses = [pd.DataFrame(columns=list(RESPONSE_COLUMNS))]

    qbench.cell._run = step
    return fn(name, **settings)


def test_a_cell_that_dies_beside_another_is_tried_again_alone(tmp_path):
    """It may have been the other one that took all the memory."""
    shown, inner = io.StringIO(), processes()
    with inner, Display(shown, 4) as display:
        records = run_cells(planned(tmp_path), out=tmp_path / "out", progress=display,
                            executor=Together(inner, tmp_path / "marks"))  # fmt: skip
    assert [record.status for record in records] == ["ok"] * 4
    assert shown.getvalue().count("its process died; once more, alone") == 1


@pytest.mark.parametrize("slots", [[0], [0, 0]])
def test_a_good_record_is_never_replaced_by_one_of_a_killed_process(tmp_path, slots):
    first, _, _ = run_quickly(tmp_path, processes())
    doomed = {"softmax/rtn-4bit"}
    inner = Processes(slots, device="cpu", idle_ends=True)
    second, _, store = run_quickly(tmp_path, inner, doomed, force=True)
    kept = {record.cell: record for record in store.records()}
    assert kept["softmax/rtn-4bit"] == first["softmax/rtn-4bit"]
    assert second["softmax/rtn-4bit"].status == "failed"
    assert kept["softmax/fp32"] == second["softmax/fp32"] != first["softmax/fp32"]


def test_what_another_run_makes_while_this_ones_process_dies_is_taken(tmp_path):
    """The process dies; before that is recorded, another run makes the cell."""
    plan_, out = planned(tmp_path), tmp_path / "out"
    name = "softmax/rtn-4bit"
    begun = datetime.now(UTC)
    lock = FileLock(Store(out).lock_file(plan_.cell(name).grid_cell))
    with ThreadPoolExecutor(1) as late, lock:
        giving_up = late.submit(give_up, plan_, name, "killed", out=out, progress=SilentProgress(),
                                begun=begun, force=False)  # fmt: skip
        time.sleep(0.2)
        made = run(plan_.cell(name), plan_, Store(out), SilentProgress(), tmp_path / "cache")
        assert made.status == "ok"
    assert giving_up.result() == made == Store(out).get(plan_.cell(name).grid_cell)


def test_a_broken_executor_of_another_kind_ends_with_the_cells_that_were_not_run(tmp_path):
    inner = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    records, _, _ = run_quickly(tmp_path, inner, {"softmax/fp32"})
    assert {record.status for record in records.values()} == {"failed"}
    assert "its process was killed" in records["softmax/fp32"].error
    assert "before it began" in records["softpick/rtn-4bit"].error
    again, _, _ = run_quickly(tmp_path, processes())
    assert {record.status for record in again.values()} == {"ok"}
