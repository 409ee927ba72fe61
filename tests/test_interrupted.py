"""What comes between: a run that is killed, stopped or held up, and files edited under it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_recipe import DEMO, qbench, small_recipe

from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.running.grid import run_cells
from qbench.store import Store

ROOT = Path(__file__).parent.parent


pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_run_killed_while_it_scores_goes_on_and_loses_no_finished_cell(tmp_path):
    path, out = small_recipe(tmp_path, evaluation={"limit": 20}), tmp_path / "out"
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
    path, out = small_recipe(tmp_path), tmp_path / "out"
    options = ("run", path, "--out", out, "--device", "cpu", "--only", "softmax/fp32")
    qbench(*options)
    store = Store(out)
    (first,) = store.records()
    (cell,) = [one for one in store.grid().cells if one.cell == "softmax/fp32"]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, store.lock_file(cell)], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        capfd.readouterr()
        assert qbench(*options, "--force") == 0
    assert "another run is at work on it" in capfd.readouterr().err
    assert store.records() == [first]


@pytest.mark.parametrize("edited", ["data", "calibration", "definition"])
def test_what_is_edited_under_a_run_fails_its_cells_and_leaves_no_score(tmp_path, edited):
    """Edited when the plan is made and the first cell has not begun."""
    demo = tmp_path / "demo"
    shutil.copytree(DEMO, demo, ignore=shutil.ignore_patterns("softmax", "softpick"))
    path = small_recipe(
        tmp_path, quantizers=["fp32", {"name": "gptq-4bit", "group_size": 64}],
        tasks=["demo_lastword"], data=str(demo / "data"), definitions=str(demo / "tasks"),
        calibration={"path": str(demo / "calibration.jsonl"), "samples": 2, "length": 64},
    )  # fmt: skip
    planned = plan(Recipe.load(path), device="cpu")
    file = {
        "data": demo / "data" / "demo_lastword" / "test.jsonl",
        "calibration": demo / "calibration.jsonl",
        "definition": demo / "tasks" / "demo_lastword.yaml",
    }[edited]
    old, new = ("' '+text", "'  '+text") if edited == "definition" else ("the ", "some ")
    file.write_text(file.read_text().replace(old, new, 3))
    cell = planned.cell("softmax/gptq-4bit")
    (record,) = run_cells(planned, out=tmp_path / "out", cells=[cell], cache=tmp_path / "cache")
    assert record.status == "failed"
    assert "changed after this run began; run again" in record.error
    assert record.scores == ()
    assert plan(Recipe.load(path), device="cpu").cell(cell.name).key != cell.key


def test_a_cell_is_not_run_by_other_code_than_its_key_names(tmp_path, monkeypatch):
    """As where the package is edited while cells wait: worker processes import it later."""
    planned = plan(Recipe.load(small_recipe(tmp_path)), device="cpu")
    monkeypatch.setattr("qbench.cell.code_digest", lambda: "0" * 64)
    (record,) = run_cells(planned, out=tmp_path / "out", cells=planned.cells[:1])
    assert record.status == "failed"
    assert record.error == "qbench's own code changed after this run began; run again"


def alive(group):
    """Commands of the processes of a process group, those left out that nobody has waited for."""
    shown = subprocess.run(["ps", "-eo", "pgid,stat,args"], capture_output=True, text=True,
                           check=True).stdout  # fmt: skip
    lines = [line.split(maxsplit=2) for line in shown.splitlines()[1:]]
    return [line for line in lines if line[0] == str(group) and not line[1].startswith("Z")]


# The interpreter's own start is not ours: who interrupts that sees what Python says.
BEGUN = "from qbench.__main__ import main; print('begun', flush=True); main()"


SWALLOWED = """
import hashlib, sys, time
from qbench.machine.interrupt import settle_interrupts
settle_interrupts()
print("begun", flush=True)
while True:
    try:
        {wait}
    except BaseException:
        pass
"""
WAITS = {
    "in Python": "time.sleep(0.01)",
    "in a long step": "hashlib.pbkdf2_hmac('sha256', b'a', b'b', 10**9)",
}


def swallowing(wait):
    """A process that goes on after Ctrl-C."""
    return subprocess.Popen([sys.executable, "-c", SWALLOWED.format(wait=wait)], cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_ctrl_c_that_is_swallowed_ends_the_process_all_the_same(wait):
    """In two seconds; twice as many are allowed for a machine that is busy."""
    process = swallowing(wait)
    assert process.stdout.readline() == "begun\n"
    time.sleep(0.2)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=30)
    assert time.monotonic() - start < 4
    assert process.returncode == 130
    assert complaints.splitlines()[-1].startswith("stopped; finished cells are kept")


def test_ctrl_c_twice_ends_at_once():
    process = swallowing("time.sleep(0.01)")
    assert process.stdout.readline() == "begun\n"
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    process.communicate(timeout=1)
    assert process.returncode in (130, -signal.SIGINT)


def test_ctrl_c_while_a_run_starts_is_one_line_and_leaves_no_process(tmp_path):
    settings = [
        {"name": "rtn-4bit", "label": f"g{size}", "group_size": size} for size in (16, 32, 64)
    ]
    changes = {"quantizers": ["fp32", *settings], "evaluation": {"limit": 40}}
    path, out = small_recipe(tmp_path, **changes), tmp_path / "out"
    command = [sys.executable, "-c", BEGUN, "run", path, "--out", out, "--device", "cpu",
               "--workers", "2"]  # fmt: skip
    for delay in (0.05, 0.5, 1.5, 4.0):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True,
                                   stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
        assert process.stdout.readline() == "begun\n"
        time.sleep(delay)
        start = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the group
        shown, complaints = process.communicate(timeout=30)
        assert time.monotonic() - start < 4  # two seconds, on a machine that is busy twice as many
        assert process.returncode == 130, (delay, complaints)
        assert complaints.strip().splitlines()[-1] == (
            "stopped; finished cells are kept, run the same command to go on"
        )
        assert "Traceback" not in complaints
        assert shown == ""
        end = time.monotonic() + 10
        while alive(process.pid) and time.monotonic() < end:
            time.sleep(0.1)
        assert alive(process.pid) == []


HOLDING = """
import ctypes, os, signal, sys
from qbench.machine.interrupt import settle_interrupts
settle_interrupts()
signal.siginterrupt(signal.SIGINT, False)  # the call below goes on after the signal
print("ready", flush=True)
ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
"""


def test_ctrl_c_ends_what_lets_no_thread_run(tmp_path):
    """As a large library that is mapped: a call that holds Python's lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDING], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    try:
        said = process.communicate(timeout=10)[1]
    finally:
        process.kill()
    assert time.monotonic() - begun < 2.5
    assert said == "stopped; finished cells are kept, run the same command to go on\n"


def test_a_command_that_ends_leaves_nobody_behind(tmp_path):
    """Who stands by for Ctrl-C holds no output open, and ends with the command."""
    command = [sys.executable, "-m", "qbench", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    process = subprocess.Popen([sys.executable, "-c", HOLDING], cwd=ROOT, stdout=subprocess.PIPE,
                               text=True)  # fmt: skip
    process.stdout.readline()
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    for _ in range(100):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"{child} is still there")
