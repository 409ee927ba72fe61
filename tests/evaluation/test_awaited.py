"""A quantized cell takes the unquantized cell's rows task by task, while that is still at work."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_recipe import DEMO, qbench, small_recipe

from qbench.cache import entries, prune
from qbench.plan import plan
from qbench.progress import SilentProgress
from qbench.recipe import Recipe
from qbench.records import Unavailable
from qbench.running.work import run_cell
from qbench.store import Store

ROOT = Path(__file__).parents[2]
BASE, CELL = "softpick/fp32", "softpick/rtn-4bit"

# The unquantized cell, which stops before its last task until the file ``go`` is there.
AT_WORK = """
import os, sys, time
from pathlib import Path
from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.running.work import run_cell
from qbench.progress import SilentProgress

recipe, out, go, then = sys.argv[1:]
planned = plan(Recipe.load(Path(recipe)), device="cpu")

class Stops(SilentProgress):
    def stage(self, cell, name, total=None, unit=""):
        if name == f"evaluate {planned.tasks[-1].name}":
            Path(go).with_name("last").touch()
            deadline = time.monotonic() + 60
            while not Path(go).exists():
                assert time.monotonic() < deadline, "nobody was at work on another cell"
                time.sleep(0.01)
            if then == "dies":
                os._exit(1)
            assert then != "fails", "as where memory runs out"

run_cell(planned, "softpick/fp32", out=Path(out), progress=Stops())
"""


class Goes(SilentProgress):
    """Lets the unquantized cell go on at a step of the quantized one, whose steps it keeps."""

    def __init__(self, go: Path, at: str) -> None:
        self.go, self.at = go, at
        self.steps: list[str] = []

    def stage(self, cell, name, total=None, unit=""):
        self.steps.append(name)
        if name == self.at:
            self.go.touch()


@pytest.fixture
def small(tmp_path):
    path = small_recipe(
        tmp_path, checkpoints={"softpick": str(DEMO / "softpick")},
        tasks=["demo_choice", "passkey_256", "demo_pages", "demo_lastword"],
    )  # fmt: skip
    return path, plan(Recipe.load(path), device="cpu")


@pytest.fixture
def serial(tmp_path, small, monkeypatch):
    """The records of a run of one cell after the other, by name, and the rows that it left."""
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "serial"))
    found = {name: run_cell(small[1], name, out=tmp_path / "whole", progress=SilentProgress())
             for name in (BASE, CELL)}  # fmt: skip
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    return found, kept(tmp_path / "serial")


def kept(cache):
    folder = cache / "distributions"
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


def beside(tmp_path, path, planned, then, at):
    """The quantized cell's record, made while the unquantized one is at work in a process of its
    own, that process's exit code, and the steps that the quantized cell told of."""
    out, go = tmp_path / "out", tmp_path / "go"
    command = [sys.executable, "-c", AT_WORK, path, out, go, then]
    with subprocess.Popen(command, cwd=ROOT) as process:
        while process.poll() is None and not (tmp_path / "last").exists():
            time.sleep(0.01)
        progress = Goes(go, at)
        record = run_cell(planned, CELL, out=out, progress=progress)
    return record, process.returncode, progress.steps


def test_tasks_are_scored_before_the_unquantized_cell_is_done_to_the_same_bits(
    tmp_path, small, serial
):
    """The unquantized cell begins its last task only once the quantized one is at its third."""
    (path, planned), (whole, rows) = small, serial
    record, code, _ = beside(tmp_path, path, planned, "goes on", at="evaluate demo_pages")
    assert code == 0
    assert record.damage == whole[CELL].damage
    assert record.scores == whole[CELL].scores
    assert {name: stored.sha256 for name, stored in record.files.items()} == {
        name: stored.sha256 for name, stored in whole[CELL].files.items()
    }
    assert set(record.damage.tasks) == {task.name for task in planned.tasks}
    assert kept(tmp_path / "cache") == rows
    assert not list((tmp_path / "out").rglob("*.rows"))


def test_a_cell_that_waits_says_for_whom_and_then_which_task_it_scores(tmp_path, small):
    """The unquantized cell begins its last task only once the quantized one says that it waits."""
    path, planned = small
    record, _, steps = beside(tmp_path, path, planned, "goes on", at=f"waits for {BASE}")
    assert record.damage.status == "measured"
    assert steps[-3:] == ["evaluate demo_pages", f"waits for {BASE}", "evaluate demo_lastword"]


@pytest.mark.parametrize("then", ["dies", "fails"])
def test_an_unquantized_cell_that_ends_midway_costs_damage_alone_and_a_rerun_mends_it(
    tmp_path, small, serial, then
):
    (path, planned), (whole, rows) = small, serial
    record, code, _ = beside(tmp_path, path, planned, then, at="evaluate demo_choice")
    assert (code != 0) == (then == "dies")
    assert record.status == "ok"
    assert record.scores == whole[CELL].scores
    assert isinstance(record.damage, Unavailable)
    assert record.damage.retry
    assert record.damage.reason == f"{BASE} has no good record; run it, then this again"
    assert not set(kept(tmp_path / "cache")) >= set(rows)
    out = tmp_path / "out"
    assert qbench("run", path, "--out", out, "--device", "cpu") == 0
    (again,) = (one for one in Store(out).records() if one.cell == CELL)
    assert again.damage == whole[CELL].damage
    assert kept(tmp_path / "cache") == rows
    assert not list(out.rglob("*.rows"))


def test_what_an_unquantized_cell_at_work_has_kept_is_not_pruned(tmp_path, small, serial):
    path, rows = small[0], serial[1]
    out, go, cache = tmp_path / "out", tmp_path / "go", tmp_path / "cache"
    command = [sys.executable, "-c", AT_WORK, path, out, go, "goes on"]
    with subprocess.Popen(command, cwd=ROOT) as process:
        while process.poll() is None and not (tmp_path / "last").exists():
            time.sleep(0.01)
        there, (removed, _) = entries(cache), prune(cache, max_bytes=0)
        go.touch()
    assert there
    assert removed == []
    assert process.returncode == 0
    assert kept(cache) == rows
    assert len(prune(cache, max_bytes=0)[0]) == 1


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git checkout")
def test_what_a_killed_unquantized_cell_handed_over_is_not_committed(small):
    cell = small[1].cell(BASE).grid_cell
    path = Store(Path("results/27m")).handed_over(cell)
    assert subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT).returncode == 0
