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

from qbench.bench import cluster_stub as stub
from qbench.bench.cluster import bed, run_on, stub_plan
from qbench.cell import failed, load
from qbench.cluster.kept import Kept, artifacts_here, stages_of
from qbench.cluster.line import Line
from qbench.cluster.located import Wanted, _from_hub, located
from qbench.cluster.transfer import Transfers
from qbench.errors import UnavailableError
from qbench.machine import environment
from qbench.plan import plan
from qbench.quantizers.quantize import quantize
from qbench.recipe import Recipe
from qbench.running.grid import run_cells

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
        load(cell, planned)[0], cell.quantization, calibration=None, digest=cell.checkpoint.digest,
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


def test_a_plain_run_and_one_on_a_cluster_share_a_results_folder(tmp_path, monkeypatch):
    """Every cell is made once, by one of them, and both have all records."""
    cells, begun = stub_plan(tmp_path, 8), tmp_path / "begun"
    monkeypatch.setenv(stub.BEGUN, str(begun))
    monkeypatch.setattr("qbench.cell._run", stub._step)
    found = {}
    with bed(tmp_path, [{}]) as cluster:
        cluster.wait_for_workers(1)
        there = threading.Thread(
            target=lambda: found.update(there=run_on(cluster, cells, tmp_path / "out"))
        )
        there.start()
        cluster.wait_until_begun(1)
        found["here"] = run_cells(cells, out=tmp_path / "out")
        there.join()
    assert found["here"] == found["there"]
    assert {record.status for record in found["here"]} == {"ok"}
    marks = [path.name.split(".") for path in begun.iterdir()]
    assert Counter(mark[0] for mark in marks) == {c.name.replace("/", "_"): 1 for c in cells.cells}
    assert len({mark[1] for mark in marks}) == 2, "one of the two did nothing"


def test_what_is_too_much_to_send_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr("qbench.cluster.transfer.MOST", 2**10)
    source = tmp_path / "model.safetensors"
    source.write_bytes(bytes(2**11))
    transfers = Transfers(lambda *_: False, lambda _: None)
    wanted = Wanted("files/one", (("model.safetensors", str(source)),))
    with pytest.raises(UnavailableError, match="too much to send to host; put it on a file system"):
        transfers.send(wanted, "tcp://worker", "cache", "host")


def test_a_checkpoint_of_the_hub_comes_from_the_hub(planned, tmp_path, monkeypatch):
    """What no path and no cache has, at the commit that was planned; else it is asked for."""
    here = planned.cells[0].checkpoint
    snapshot = tmp_path / "nowhere" / "snapshots" / "abc"
    away = dataclasses.replace(here, folder=snapshot, source="owner/name")
    cells = tuple(dataclasses.replace(cell, checkpoint=away) for cell in planned.cells)
    asked = []

    def find(source, *, revision, normalizer):
        asked.append((source, revision, normalizer))
        return dataclasses.replace(here, digest=here.digest if len(asked) == 1 else "other")

    monkeypatch.setattr("qbench.cluster.located.find", find)
    away_plan = dataclasses.replace(planned, cells=cells)
    for missing in ([], [f"files/{here.digest}"]):
        _from_hub.cache_clear()
        found, _, wanted = located(away_plan, "softmax/fp32", tmp_path / "cache")
        assert [one.target for one in wanted] == missing
        assert found.cells[0].checkpoint.folder == (snapshot if missing else here.folder)
    assert asked == [("owner/name", "abc", here.normalizer)] * 2


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
