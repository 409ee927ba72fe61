"""What comes between: a run that is killed, stopped or held up, and files edited under it."""

import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock
from small_recipe import DEMO, run_small, small_recipe

from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.runner.grid import run_cells

ROOT = Path(__file__).parent.parent


pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_cell_that_another_run_holds_is_waited_for_not_run_twice(tmp_path, capfd):
    options, changes = ("--only", "softmax/fp32"), {"tasks": ["demo_choice"]}
    store = run_small(tmp_path, *options, **changes)
    (first,) = store.records()
    (cell,) = [one for one in store.manifest().cells if one.cell == "softmax/fp32"]
    held = threading.Event()

    def hold():
        with FileLock(store.path(cell, ".lock")):
            held.set()
            time.sleep(0.6)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(hold)
        assert held.wait(10)
        capfd.readouterr()
        run_small(tmp_path, *options, "--force", **changes)
    assert "another run computes it" in capfd.readouterr().err
    assert store.records() == [first]


def test_text_that_is_edited_under_a_run_fails_its_cells_and_leaves_no_score(tmp_path):
    """Edited when the plan is made and the first cell has not begun."""
    demo = tmp_path / "demo"
    shutil.copytree(DEMO, demo, ignore=shutil.ignore_patterns("softmax", "softpick"))
    path = small_recipe(
        tmp_path, quantizers=["fp32", {"name": "gptq-4bit", "group_size": 64}],
        tasks=["demo_lastword"], data=str(demo / "data"), definitions=str(demo / "tasks"),
        calibration={"path": str(demo / "calibration.jsonl"), "samples": 2, "length": 64},
    )  # fmt: skip
    planned = plan(Recipe.load(path), device="cpu")
    file = demo / "calibration.jsonl"
    file.write_text(file.read_text().replace("the ", "some ", 3))
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


STOPPED = "stopped; finished cells are kept; run the same command to continue"


def nobody_left(group):
    end = time.monotonic() + 10
    while alive(group) and time.monotonic() < end:
        time.sleep(0.1)
    return alive(group) == []


def started(path, out, *options):
    """A run in a pseudo terminal of its own, as a user has it; what it shows is read from there."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["COLUMNS"] = "80"
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored below `nohup`, and here
        command = ["-m", "qbench", "run", str(path), "--out", str(out), "--device", "cpu", *options]
        os.execv(sys.executable, [sys.executable, *command])
    return pid, terminal


def shown_until(terminal, word, seconds=120):
    """What the terminal shows, until ``word`` or its end."""
    shown, end = "", time.monotonic() + seconds
    while word not in shown and time.monotonic() < end:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            shown += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # its end
            break
    return shown


def test_ctrl_c_ends_a_run_with_130_in_one_line_and_leaves_no_process(tmp_path):
    """Two seconds; twice as many are allowed for a machine that is busy."""
    path = small_recipe(tmp_path, evaluation={"limit": 200}, quantizers=["fp32"])
    pid, terminal = started(path, tmp_path / "out", "--workers", "2")
    before = shown_until(terminal, "demo_choice")  # while they compute
    assert "demo_choice" in before, before
    time.sleep(0.3)  # from the word to what the command then does
    start = time.monotonic()
    os.write(terminal, b"\x03")  # Ctrl-C: the terminal sends SIGINT to every process of the group
    after = shown_until(terminal, "no such word", seconds=20)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert time.monotonic() - start < 8, after  # 2 s where nothing else runs
    assert os.waitstatus_to_exitcode(status) == 130, after
    assert "Traceback" not in after
    assert STOPPED in after
    assert nobody_left(pid)


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_no_process(tmp_path):
    """No worker, no fork server, and not the process that frees their locks."""
    path = small_recipe(tmp_path, evaluation={"limit": 200})
    pid, terminal = started(path, tmp_path / "out", "--workers", "2")
    assert "fp32: " in shown_until(terminal, "fp32: ")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert nobody_left(pid)
    os.close(terminal)


AT_ITS_END = """
import os, signal, sys, threading
sys.argv = ["qbench", *sys.argv[1:]]
threading.Thread(target=threading.Event().wait).start()  # as a library's that nobody ends
import atexit; atexit.register(print, "cleaned up")
atexit.register(os.kill, os.getpid(), signal.SIGINT)  # a second Ctrl-C
from qbench.__main__ import main
main()
"""


def test_a_command_ends_whatever_threads_its_libraries_left(tmp_path):
    """Python would wait for them, and C++ abort the process."""
    done = subprocess.run([sys.executable, "-c", AT_ITS_END, "--version"], cwd=ROOT,
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0].startswith("qbench ")
    assert done.stdout.splitlines()[1] == "cleaned up"


@pytest.mark.parametrize("closed", ["", " >&-", " 2>&-"])
def test_closed_and_latin_1_output_is_no_error(closed):
    command = f"{shlex.quote(sys.executable)} -m qbench list quantizers{closed}"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, timeout=60,
                          env={**os.environ, "PYTHONIOENCODING": "latin-1"})  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert bool(done.stdout) == (closed != " >&-")
