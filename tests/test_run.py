"""A recipe end to end on the bundled pair: records, resumption, failures, exit codes."""

import contextlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import yaml

from qbench.cli import app
from qbench.commands.running import make_job
from qbench.errors import RecipeError
from qbench.overrides import Overrides
from qbench.running import executors
from qbench.running.grid import run_if_needed
from qbench.running.progress import Display
from qbench.store import Store

ROOT = Path(__file__).parent.parent
DEMO = ROOT / "recipes" / "demo"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))


def recipe(folder, **changes):
    content = {
        "name": "small",
        "checkpoints": {"softmax": str(DEMO / "softmax"), "softpick": str(DEMO / "softpick")},
        "compute_dtype": "float32",
        "quantizers": ["fp32", {"name": "rtn-4bit", "group_size": 64}],
        "tasks": ["demo_choice", "demo_lastword", "demo_pages"],
        "definitions": str(DEMO / "tasks"),
        "data": str(DEMO / "data"),
        "evaluation": {"limit": 3},
        **changes,
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def qbench(*arguments):
    """Exit code of a command run in this process."""
    return app([str(a) for a in arguments], standalone_mode=False) or 0


def test_a_run_writes_records_tables_and_the_second_run_computes_nothing(tmp_path, capfd):
    path, out = recipe(tmp_path), tmp_path / "out"
    assert qbench("run", path, "--out", out, "--device", "cpu") == 0
    store = Store(out)
    records = store.records()
    assert [record.cell for record in records] == [
        "softmax/fp32", "softmax/rtn-4bit", "softpick/fp32", "softpick/rtn-4bit",
    ]  # fmt: skip
    quantized = records[3]
    assert quantized.attention == "softpick/reference"
    assert quantized.audit.passed
    assert quantized.audit.coverage == 1.0
    assert 4 < quantized.audit.bits_per_weight < 5
    assert {stage.name for stage in quantized.stages} == {"load", "quantize", "audit", "evaluate"}
    assert {score.metric for score in quantized.scores} >= {"acc", "acc_norm", "perplexity"}
    outcomes = store.outcomes(quantized)
    assert set(outcomes["task"]) == {"demo_choice", "demo_lastword", "demo_pages"}
    means = outcomes[(outcomes["task"] == "demo_choice") & (outcomes["metric"] == "acc")]["value"]
    (acc,) = [s for s in quantized.scores if s.task == "demo_choice" and s.metric == "acc"]
    assert acc.value == pytest.approx(means.mean())
    shown = capfd.readouterr()
    assert "| demo_choice" in shown.out
    assert "Δ" in (out / "tables.md").read_text()
    before = {record.cell: record.finished for record in records}
    assert qbench("run", path, "--out", out, "--device", "cpu") == 0
    assert {record.cell: record.finished for record in store.records()} == before
    assert capfd.readouterr().err.count("already there") == 4


def test_force_runs_a_good_cell_again_and_only_picks_cells(tmp_path):
    path, out = recipe(tmp_path), tmp_path / "out"
    options = ("--out", out, "--device", "cpu", "--only", "softmax/rtn-*")
    qbench("run", path, *options)
    (first,) = Store(out).records()
    qbench("run", path, *options, "--force")
    (second,) = Store(out).records()
    assert second.finished > first.finished
    assert second.scores == first.scores
    assert "artifact reused" in {s.name: s.detail for s in second.stages}["quantize"]


def test_only_that_matches_nothing_names_the_cells(tmp_path):
    with pytest.raises(RecipeError, match="the cells are softmax/fp32"):
        qbench("run", recipe(tmp_path), "--out", tmp_path / "out", "--only", "softpik/*")


def test_a_failed_cell_is_recorded_shown_and_retried_while_the_others_go_on(tmp_path, capfd):
    quantizers = [{"name": "rtn-4bit", "group_size": 48}, "fp32"]  # no width is a multiple of 48
    path, out = recipe(tmp_path, quantizers=quantizers), tmp_path / "out"
    options = ("run", path, "--out", out, "--device", "cpu", "--only", "softmax/*")
    assert qbench(*options) == 1
    records = {record.cell: record for record in Store(out).records()}
    assert records["softmax/fp32"].status == "ok"
    broken = records["softmax/rtn-4bit"]
    assert broken.status == "failed"
    assert "48" in broken.error
    shown = capfd.readouterr()
    assert "failed" in shown.out
    assert "softmax/rtn-4bit: failed" in shown.err
    assert qbench(*options) == 1
    retried = {record.cell: record for record in Store(out).records()}["softmax/rtn-4bit"]
    assert retried.finished > broken.finished


def test_a_run_killed_while_it_scores_goes_on_and_loses_no_finished_cell(tmp_path):
    path, out = recipe(tmp_path, evaluation={"limit": 20}), tmp_path / "out"
    command = [sys.executable, "-m", "qbench", "run", path, "--out", out, "--device", "cpu"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    for line in process.stderr:
        if "softmax/rtn-4bit: evaluate" in line:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    process.stderr.close()
    (finished,) = Store(out).records()
    assert finished.cell == "softmax/fp32"
    assert qbench("run", path, "--out", out, "--device", "cpu") == 0
    records = Store(out).records()
    assert len(records) == 4
    assert records[0] == finished


HOLDER = """
import sys, time
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(3)
"""


def test_a_cell_that_another_run_holds_is_waited_for_not_run_twice(tmp_path, capfd):
    path, out = recipe(tmp_path), tmp_path / "out"
    options = ("run", path, "--out", out, "--device", "cpu", "--only", "softmax/fp32")
    qbench(*options)
    store = Store(out)
    (first,) = store.records()
    (place,) = [cell for cell in store.grid().cells if cell.cell == "softmax/fp32"]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, store.lock_file(place)], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        capfd.readouterr()
        assert qbench(*options, "--force") == 0
    assert "another run is at work on it" in capfd.readouterr().err
    assert store.records() == [first]


def test_worker_processes_give_the_scores_of_one_process(tmp_path):
    path = recipe(tmp_path)
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    qbench("run", path, "--out", alone, "--device", "cpu", "--only", "softpick/*")
    qbench("run", path, "--out", beside, "--device", "cpu", "--only", "softpick/*",
           "--workers", "2")  # fmt: skip
    scores = [[record.scores for record in Store(out).records()] for out in (alone, beside)]
    assert scores[0] == scores[1]
    assert len(scores[0]) == 2


def test_plan_runs_nothing_and_says_what_is_there(tmp_path, capfd):
    path, out = recipe(tmp_path), tmp_path / "out"
    qbench("plan", path, "--out", out, "--device", "cpu")
    shown = capfd.readouterr().out
    assert "to run    softpick/rtn-4bit" in shown
    assert "demo_choice: 3 of" in shown
    assert not (out / "records").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "nowhere.yaml"], "nowhere.yaml: no such recipe"),
        (["run", "recipes/appendix-1.8b.yaml"], "--checkpoint softmax="),
        (["plan", "recipes/demo.yaml", "--checkpoint", "softmax"], "NAME=PATH"),
        (["tables", "nowhere"], "no grid.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words):
    command = [sys.executable, "-m", "qbench", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_the_record_says_exactly_what_its_key_is_the_hash_of(tmp_path):
    from qbench.plan import content_key

    path, out = recipe(tmp_path), tmp_path / "out"
    qbench("run", path, "--out", out, "--device", "cpu", "--only", "softpick/rtn-4bit")
    (record,) = Store(out).records()
    assert content_key(json.loads(json.dumps(record.key_parts))) == record.key


def test_damage_that_had_no_base_is_measured_once_there_is_one(tmp_path):
    path, out = recipe(tmp_path), tmp_path / "out"
    options = ("run", path, "--out", out, "--device", "cpu", "--only")
    qbench(*options, "softpick/rtn-*")
    (alone,) = Store(out).records()
    assert "run it, then this again" in alone.damage.reason
    qbench(*options, "softpick/*")
    records = {record.cell: record for record in Store(out).records()}
    assert set(records["softpick/rtn-4bit"].damage.tasks) == {
        "demo_choice", "demo_lastword", "demo_pages",
    }  # fmt: skip


def _die_on_rtn(name, force, wait):
    if name.startswith("softmax/rtn"):
        os.kill(os.getpid(), signal.SIGKILL)
    return GRID["work"](name, force, wait)


GRID = {}


def test_a_worker_that_is_killed_fails_its_own_cell_only(tmp_path, monkeypatch):
    """The others' good records stay and the cells that waited are run."""
    path, out = recipe(tmp_path), tmp_path / "out"
    qbench("run", path, "--out", out, "--device", "cpu", "--only", "softpick/fp32")
    job = make_job(path, Overrides(), out=out, device="cpu")
    planned, store = job.plan(), Store(out)
    named = {cell.name: cell for cell in planned.cells}
    sink = Display(io.StringIO(), 4)
    GRID["work"] = lambda name, force, wait: run_if_needed(
        named[name], planned, store, Display(io.StringIO(), 4), force=force, wait=wait
    )

    @contextlib.contextmanager
    def pool(job, slots, sink):
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(len(slots), mp_context=context) as executor:
            yield executor, _die_on_rtn

    monkeypatch.setattr(executors, "processes", pool)
    records = executors.run_cells(
        planned, job, sink, cells=planned.cells, slots=[0, 0], force=False
    )
    status = {record.cell: record.status for record in records}
    assert status == {
        "softmax/fp32": "ok", "softmax/rtn-4bit": "failed",
        "softpick/fp32": "ok", "softpick/rtn-4bit": "ok",
    }  # fmt: skip
    assert "killed" in {r.cell: r.error for r in records}["softmax/rtn-4bit"]


def test_noise_is_measured_on_the_unquantized_cells_and_the_tables_take_it_up(tmp_path, capfd):
    path, out = recipe(tmp_path, tasks=["demo_lastword"]), tmp_path / "out"
    options = (path, "--out", out, "--device", "cpu", "--limit", 6, "--scoring", "fast")
    assert qbench("run", *options) == 0
    assert "≈" not in (out / "tables.md").read_text()
    assert qbench("noise", *options) == 0
    measured = json.loads((out / "noise.json").read_text())["cells"]
    keys = {record.cell: record.key for record in Store(out).records()}
    assert {cell: one["key"] for cell, one in measured.items()} == {
        cell: key for cell, key in keys.items() if cell.endswith("fp32")
    }
    assert "another order" in capfd.readouterr().out
    assert qbench("tables", out) == 0
    assert "than what another batch order and size moved" in (out / "tables.md").read_text()
