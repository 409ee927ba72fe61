"""What several cells need is made once on a cluster, and what one host has reaches another."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from contextlib import nullcontext

import pytest
from small_recipe import DEMO, small_recipe

pytest.importorskip("distributed")

from qbench.bench.cluster import bed, run_on
from qbench.cluster.kept import Kept, artifacts_here, stages_of
from qbench.cluster.line import Line
from qbench.machine import environment
from qbench.plan import plan
from qbench.quantizers.quantization import quantize
from qbench.recipe import Recipe
from qbench.run import failed, load

pytestmark = pytest.mark.usefixtures("own_cache")
WEIGHTS = {"name": "rtn-4bit", "group_size": 64}


@pytest.fixture
def planned(tmp_path):
    recipe = small_recipe(
        tmp_path,
        checkpoints={"softmax": str(DEMO / "softmax")},
        quantizers=[
            "fp32",
            WEIGHTS,
            {"weights": WEIGHTS, "activations": "int8-token", "label": "w4a8"},
            {"weights": WEIGHTS, "kv": "int8-token", "label": "w4kv8"},
        ],
        tasks=["demo_lastword"],
    )
    return plan(Recipe.load(recipe), device="cpu")


def test_cells_with_the_same_weights_name_them_alike(planned, tmp_path):
    """And as the cache does: the names are found there again."""
    stages = {cell.label: stages_of(cell, planned) for cell in planned.cells}
    assert stages["fp32"] == ()
    assert stages["rtn-4bit"] == stages["w4a8"] == stages["w4kv8"]
    cell = planned.cell("softmax/w4a8")
    quantize(
        load(cell, planned)[0], cell.quantizer, calibration=None, digest=cell.checkpoint.digest,
        artifacts=tmp_path / "cache" / "artifacts",
    )  # fmt: skip
    found = artifacts_here(cell.checkpoint.digest)
    assert tuple(found) == stages["w4a8"]
    assert [len(folders) for folders in found.values()] == [1]


def test_two_hosts_never_quantize_the_same_weights(planned, tmp_path):
    """Three cells share them; each host has a cache of its own."""
    (tmp_path / "bed").mkdir()
    with bed(tmp_path / "bed", [{"stubbed": False}] * 2) as cluster:
        cluster.wait_for_workers(2)
        records = run_on(cluster, planned, tmp_path / "out")
    assert [record.status for record in records] == ["ok"] * 4
    details = [stage.detail for record in records for stage in record.stages
               if stage.name == "quantize" and record.quantized]  # fmt: skip
    made = Counter("reused" if "artifact reused" in one else "made" for one in details)
    assert made == {"made": 1, "reused": 2}, details


def test_a_worker_is_asked_for_what_another_learned_only_when_that_is_gone(planned):
    cell, asked, there = planned.cell("softmax/rtn-4bit"), [], {"a", "b"}

    def ask_all(function, *arguments):
        asked.append(function.__name__)
        answers = {"artifacts_here": {}, "rows_here": "files/rows"}
        return dict.fromkeys(sorted(there), answers[function.__name__])

    kept = Kept(ask_all, lambda worker: worker in there)
    stages = stages_of(cell, planned)
    for _ in range(3):
        assert kept.artifacts(cell, stages, anew=False) == ()
    assert asked == ["artifacts_here"]
    kept.learn({stages[0]: ["artifacts/one"]})
    assert kept.artifacts(cell, stages, anew=False) == ("artifacts/one",)
    kept.lost("artifacts/one")
    assert kept.artifacts(cell, stages, anew=True) == ()
    assert kept.rows("key") == kept.rows("key") == ("a", "files/rows")
    there.discard("a")
    assert kept.rows("key") == ("b", "files/rows")
    assert asked == ["artifacts_here", "artifacts_here", "rows_here", "rows_here"]


def test_workers_are_given_in_the_order_of_asking(monkeypatch):
    room, order, stop = [1], [], []

    def check():
        if stop:
            raise BrokenPipeError("ended")

    line = Line(lambda: room[0], check)

    def work(number):
        with pytest.raises(BrokenPipeError) if number == 9 else nullcontext(), line.turn():
            order.append(number)

    with line.turn():
        threads = []
        for number in range(5):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            while len(line._waiting) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]
    room[0] = 0
    last = threading.Thread(target=work, args=(9,))
    last.start()
    while not line._waiting:
        time.sleep(0.001)
    stop.append(True)
    line.wake()
    last.join(2)
    assert not last.is_alive()
    assert not line._waiting
    assert order == [0, 1, 2, 3, 4]


def test_a_cell_that_failed_on_a_gpu_is_written_by_a_host_without_one(planned, monkeypatch):
    def no_driver(*_):
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(environment, "device_name", no_driver)
    environment.hardware.cache_clear()
    there = dataclasses.replace(planned, device="cuda", hardware="NVIDIA H200")
    record = failed(there.cells[0], there, "its worker died")
    assert record.environment.hardware == "NVIDIA H200"
