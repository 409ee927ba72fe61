"""``--cluster``: cells on Dask's workers, which are killed, and whose client is killed."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("distributed")

from distributed import LocalCluster
from quick_cells import Quick
from small_recipe import qbench, small_recipe

from qbench import machine
from qbench.errors import RecipeError, UnavailableError
from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.runner.dask import connected, require_fit, requirements
from qbench.runner.grid import run_cells
from qbench.runner.progress import Display
from qbench.store import Store

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def running():
    """A scheduler with two workers of one thread, in processes of this host."""
    with LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs="CRITICAL"
    ) as running:
        yield running


@pytest.fixture
def cluster(running):
    running.wait_for_workers(2)  # those of an earlier test may have ended
    return running.scheduler_address


def _break_device():
    machine._broken_device = "CUDA error: an illegal memory access was encountered"
    return os.getpid()


def test_a_worker_whose_gpu_failed_ends_and_the_next_cells_get_other_processes(tmp_path, cluster):
    with connected(cluster, "cpu", folders=[tmp_path]) as executor:
        broken = executor.submit(_break_device).result(60)
        others = [executor.submit(os.getpid) for _ in range(4)]
        assert broken not in [future.result(60) for future in others]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"access to /results": False}, "access to /results False, the run needs True; install"),
        ({"threads": 4}, "threads 4, the run needs 1"),
        ({"qbench's code": "d"}, "qbench's code d, the run needs"),
        ({"torch": "1"}, "torch 1, the run needs"),
        ({"GPU": "L4"}, "GPU L4, the run needs None"),
    ],
)
def test_a_worker_that_does_not_fit_ends_the_run_in_one_line(changes, said):
    needed = requirements(["/results/token"], None)
    if said is None:
        require_fit("tcp://w:1", needed, needed)
        return
    with pytest.raises(UnavailableError, match=f"worker tcp://w:1 has {said}"):
        require_fit("tcp://w:1", needed | changes, needed)


@pytest.mark.parametrize(
    ("address", "content"),
    [("nowhere.json", None), ("tcp://127.0.0.1:9", None), ("local:2", None), ("file.json", "x"),
     ("file.json", '{"address": 5}')],
)  # fmt: skip
def test_a_cluster_that_is_not_there_is_one_line(tmp_path, monkeypatch, address, content):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("qbench.runner.dask.SECONDS_TO_CONNECT", 1.0)
    if content is not None:
        Path(address).write_text(content)
    words = f"--cluster {address}: " + "(not a scheduler file|no scheduler)" * (content is not None)
    with pytest.raises((RecipeError, UnavailableError), match=words):
        qbench("run", small_recipe(tmp_path), "--out", tmp_path / "o", "--cluster", address)
    assert not (tmp_path / "o" / "grid.json").exists()


@pytest.mark.parametrize("deaths", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 9))])
def test_cells_whose_workers_are_killed_run_again_and_a_killer_fails_alone(
    tmp_path, cluster, deaths
):
    planned = plan(Recipe.load(small_recipe(tmp_path, tasks=["demo_lastword"])), device="cpu")
    shown, out = io.StringIO(), tmp_path / "out"
    killer = "softmax/rtn-4bit"
    with (
        connected(cluster, "cpu", folders=[out, tmp_path / "cache"]) as inner,
        Display(shown, 4) as display,
    ):
        assert ": 2 workers; " in inner.description
        executor = Quick(inner, tmp_path / "marks", {killer}, times=deaths)
        executor.listen = inner.listen
        records = {
            record.cell: record
            for record in run_cells(planned, out=out, executor=executor, progress=display)
        }
    failed = {cell for cell, record in records.items() if record.status == "failed"}
    assert failed == (set() if deaths < 9 else {killer})
    assert {record.cell: record for record in Store(out).records()} == records
    # a worker may die with a result that nobody has fetched yet: that cell is done twice
    done = set(re.findall(r"^(\S+): done \(", shown.getvalue(), re.MULTILINE))
    assert done == set(records) - failed
    assert not list(out.glob(".*.tmp"))


@pytest.mark.slow
def test_a_run_whose_client_is_killed_goes_on_from_its_records(tmp_path):
    """On a scheduler and a worker that stay, with the client in another folder than theirs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "QBENCH_CACHE": str(tmp_path / "cache")}
    quiet = {"env": environment, "cwd": tmp_path, "stdout": subprocess.DEVNULL,
             "stderr": subprocess.DEVNULL}  # fmt: skip
    file, out = tmp_path / "scheduler.json", tmp_path / "out"
    start = "from distributed.cli.dask_{0} import main; main()"
    without = f"import sys; sys.modules['qbench'] = None; {start}"  # Dask alone is enough there
    dask = [
        [sys.executable, "-W", "ignore", "-c", code.format(what), "--scheduler-file", file]
        for what, code in (("scheduler", without), ("worker", start))
    ]
    scheduler = subprocess.Popen([*dask[0], "--dashboard-address", ":0", "--port", "0"], **quiet)
    worker = subprocess.Popen([*dask[1], "--nthreads", "1", "--no-dashboard"], **quiet)
    path = small_recipe(tmp_path, tasks=["demo_lastword"], evaluation={"limit": 20})
    command = [sys.executable, "-m", "qbench", "run", path, "--cluster", file, "--out", out,
               "--only", "softmax/*"]  # fmt: skip
    try:
        end = time.monotonic() + 60
        while not file.exists() and time.monotonic() < end:
            time.sleep(0.1)
        client = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE,
                                  stdout=subprocess.DEVNULL, text=True)  # fmt: skip
        for line in client.stderr:
            if "softmax/rtn-4bit: " in line:
                client.send_signal(signal.SIGKILL)
                break
        client.communicate()
        assert client.returncode == -signal.SIGKILL
        (finished, *_) = Store(out).records()
        assert (finished.cell, finished.status) == ("softmax/fp32", "ok")
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True,
                              timeout=200)  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "softmax/fp32: already finished" in done.stderr
        first, second = Store(out).records()
        assert first == finished
        assert (second.status, second.damage.status) == ("ok", "measured")
    finally:
        for process in (worker, scheduler):
            process.terminate()
            process.wait(30)
