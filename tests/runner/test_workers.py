"""Worker processes: one that dies breaks its own call, and whoever ends leaves nobody behind."""

import atexit
import gc
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor
from multiprocessing import forkserver

import pytest

from qbench.__main__ import main
from qbench.machine import SELDOM
from qbench.progress import SilentProgress
from qbench.runner import workers
from qbench.runner.progress import listening
from qbench.runner.workers import Workers, _Slot, drop_early, start_early

PATIENCE = 120  # seconds that make a hang: processes wait for what is imported for all of them


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def talk(progress, cell):
    """A cell that does nothing but tell, in long and short messages."""
    progress.begin(cell)
    while True:
        progress.stage(cell, "step " * 2_000, total=1)
        progress.log(f"pid {os.getpid()}")


class Heard(SilentProgress):
    """What a cell said."""

    def __init__(self):
        self.pid = 0

    def log(self, line, style=""):
        self.pid = int(line.removeprefix("pid "))


@pytest.mark.parametrize("kills", [2, pytest.param(7, marks=pytest.mark.slow)])
def test_a_process_killed_at_any_moment_breaks_its_own_call_and_hangs_nobody(kills):
    draw, heard, killed = random.Random(0), Heard(), set()
    executor = Workers([0, 0], device="cpu")
    try:
        with listening(heard) as remote:
            for kill in range(kills):
                cell = f"cell-{kill}"
                call = executor.submit(talk, remote, cell)
                wait_until(lambda: heard.pid and heard.pid not in killed)
                beside = executor.submit(time.sleep, 0.3)
                time.sleep(draw.uniform(0, 0.1))
                os.kill(heard.pid, signal.SIGKILL)
                killed.add(heard.pid)
                with pytest.raises(BrokenExecutor):
                    call.result(timeout=PATIENCE)
                assert beside.result(timeout=PATIENCE) is None
        remote.log("where nobody listens any more")  # is no reason for a cell to fail
        assert executor.submit(os.getpid).result(timeout=PATIENCE) not in killed
    finally:
        executor.shutdown(cancel_futures=True)


def new_pages():
    """Pages that a process takes to make arrays of 64 MiB again."""
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        arrays = [bytearray(2**20) for _ in range(64)]
        del arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_a_worker_keeps_the_memory_of_tensors_for_the_next_and_looks_for_garbage_seldom():
    with Workers([0], device="cpu") as executor:
        assert executor.submit(gc.get_threshold).result(timeout=PATIENCE)[0] == SELDOM
        assert executor.submit(new_pages).result(timeout=PATIENCE) < 1000


def test_what_the_first_call_leaves_is_looked_through_for_garbage_once():
    with Workers([0], device="cpu") as executor:
        counts = [executor.submit(gc.get_freeze_count).result(timeout=PATIENCE) for _ in range(3)]
    assert counts[0] < counts[2] <= counts[1]  # some of them are dropped


def break_device():
    from qbench import machine

    machine._broken_device = "CUDA error"
    return os.getpid()


def test_a_process_whose_gpu_is_broken_gets_no_further_call():
    with Workers([0], device="cpu") as executor:
        first = executor.submit(break_device).result(timeout=PATIENCE)
        assert executor.submit(os.getpid).result(timeout=PATIENCE) != first


def test_a_fork_server_that_dies_while_a_process_starts_breaks_that_call_alone(monkeypatch):
    with Workers([0], device="cpu") as executor:
        with monkeypatch.context() as patch:
            patch.setattr(_Slot, "_start", lambda slot: (_ for _ in ()).throw(EOFError()))
            with pytest.raises(BrokenExecutor, match="a worker process cannot be started: EOFErr"):
                executor.submit(os.getpid).result(timeout=PATIENCE)
        assert executor.submit(os.getpid).result(timeout=PATIENCE)


def test_processes_start_where_the_path_of_temporary_files_is_long(monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", "/tmp/" + "x" * 120)
    with Workers([0], device="cpu") as executor:
        assert executor.submit(abs, -3).result(timeout=PATIENCE) == 3


def test_processes_that_are_told_to_end_do_so_in_whatever_they_do():
    executor = Workers([0, 0], device="cpu")
    pid = executor.submit(os.getpid).result(timeout=PATIENCE)
    busy = [executor.submit(time.sleep, 600) for _ in range(3)]
    time.sleep(0.3)
    begun = time.monotonic()
    executor.shutdown(cancel_futures=True)
    for call in busy[:2]:
        with pytest.raises(BrokenExecutor):
            call.result(timeout=10)
    assert busy[2].cancelled()
    assert time.monotonic() - begun < 2
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
    with pytest.raises(RuntimeError):
        executor.submit(os.getpid)


def fail(message):
    raise ValueError(message)


def own_random_number(_):
    import numpy as np

    return np.random.random(), os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES")


def test_processes_share_the_cores_draw_their_own_numbers_and_keep_their_errors(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    with Workers([1, 0], device="cuda") as executor:  # no GPU is asked for
        with pytest.raises(ValueError, match="of the call"):
            executor.submit(fail, "of the call").result(timeout=PATIENCE)
        found = [executor.submit(own_random_number, n) for n in range(2)]
        numbers, threads, gpus = zip(*(one.result(timeout=PATIENCE) for one in found), strict=True)
    assert set(gpus) <= {"0", "1"}
    assert set(threads) == {"8"}
    assert "OMP_NUM_THREADS" not in os.environ
    assert len(set(numbers)) == 2


def test_more_processes_share_a_gpu_whose_memory_holds_more_cells(monkeypatch):
    monkeypatch.setattr("qbench.runner.workers.cells_per_gpu", lambda gib, gpus: 2 * gpus)
    with Workers([0, 1], device="cuda") as executor:  # no GPU is asked for
        executor.grow(8.0, at_most=3)
        calls = [executor.submit(time.sleep, 600) for _ in range(3)]
        wait_until(lambda: all(call.running() for call in calls))
        executor.shutdown(cancel_futures=True)


@pytest.fixture
def early(monkeypatch):
    monkeypatch.setattr(workers, "visible_gpus", lambda: ["a GPU"])
    start_early(["run"])
    [slot] = workers._early
    yield {process.pid for process in slot._processes}
    drop_early()


def test_a_process_that_was_started_early_is_the_first_of_a_run(early):
    with Workers([0, 0], device="cuda") as executor:  # no GPU is asked for
        assert not workers._early
        assert {executor.submit(os.getpid).result(timeout=PATIENCE) for _ in range(2)} > early


def test_one_that_no_run_takes_is_ended(early):
    with Workers([0], device="cpu") as executor:
        assert executor.submit(os.getpid).result(timeout=PATIENCE) not in early
    drop_early()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in early))


@pytest.mark.parametrize(("flags", "printed"), [(["-P"], "None False 1"), ([], "None True 0")])
def test_processes_import_from_the_current_folder_only_if_the_command_does(
    tmp_path, flags, printed
):
    """A user's own queue.py there would stand for Python's. What they start is left alone."""
    (tmp_path / "queue_of_mine.py").write_text("open('imported', 'w').close()")
    code = (
        "import os, subprocess\n"
        "from qbench.machine import python_module\n"
        "from qbench.runner import workers\n"
        "workers.PRELOAD = 'queue_of_mine'\n"
        "with workers.Workers([0, 0], device='cpu') as executor:\n"
        "    safe_path = executor.submit(os.getenv, 'PYTHONSAFEPATH').result()\n"
        "imported = os.path.exists('imported')\n"
        "print(safe_path, imported, subprocess.run(python_module('queue_of_mine')).returncode)"
    )
    path = os.pathsep.join(filter(None, sys.path))
    run = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.strip() == printed


@pytest.mark.parametrize("words", ["--device cpu --workers=2", "--workers 3"])
def test_the_fork_server_of_as_many_processes_is_started_early(monkeypatch, words):
    forkserver._forkserver._stop()
    monkeypatch.setattr(workers, "visible_gpus", tuple)
    start_early(["run", *words.split()])
    server = forkserver._forkserver._forkserver_pid
    with Workers([0, 0], device="cpu") as executor:
        assert executor.submit(os.getppid).result(timeout=PATIENCE) != os.getpid()
        assert (forkserver._forkserver._forkserver_pid == server) == words.endswith("2")
    start_early(["run", "--workers", "1"])
    assert not workers._shares
    start_early(["run", "--workers", "2"])
    drop_early()  # no run takes it
    assert forkserver._forkserver._forkserver_pid is None


def test_a_run_that_is_refused_leaves_no_process_to_wait_for(early, monkeypatch, tmp_path):
    """The interpreter's end would wait until the process has imported all that cells need."""
    monkeypatch.setattr(sys, "argv", ["qbench", "run", str(tmp_path / "gone.yaml")])
    monkeypatch.setattr(atexit, "_run_exitfuncs", list)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Ctrl-C ends pytest as before
    with pytest.raises(SystemExit, match="2"):
        main()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in early))
