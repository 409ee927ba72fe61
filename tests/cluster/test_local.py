"""``--cluster local``: worker processes of this host, spread over its GPUs."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("distributed")

from qbench.cli.job import local_slots
from qbench.cluster.connect import connected
from qbench.errors import RecipeError
from qbench.machine import devices


@pytest.mark.parametrize(
    ("cluster", "gpus", "workers", "device", "slots"),
    [
        ("local:2", None, None, "cuda", [0, 1]),
        ("local:5", None, None, "cuda", [0, 1, 2, 2, 1]),
        ("local:3", "1", None, "cuda", [0, 0, 0]),
        ("local", None, None, "cuda", [0, 1, 2] * 3),
        ("local", "2", 1, "cuda", [0, 1]),
        ("local", None, None, "cpu", []),
        ("local:2", None, None, "cpu", [0, 0]),
    ],
)
def test_workers_are_spread_over_all_gpus(monkeypatch, cluster, gpus, workers, device, slots):
    monkeypatch.setattr(devices, "device_count", lambda: 3)
    assert local_slots(cluster, gpus, workers, device, cells=18) == slots


def test_the_number_of_workers_is_said_once():
    with pytest.raises(RecipeError, match="leave --workers out"):
        local_slots("local:2", None, 3, "cpu", cells=18)


def _seen(dask_worker):
    return os.environ["CUDA_VISIBLE_DEVICES"], dask_worker.state.total_resources["GPU"]


@pytest.mark.parametrize(("visible", "seen"), [(None, {"0", "1"}), ("5,7", {"5", "7"})])
def test_a_worker_sees_its_gpu_alone(monkeypatch, own_cache, visible, seen):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with connected("local:2", "cpu", slots=[0, 1]) as cluster:
        found = cluster.executor._client.run(_seen)
    assert set(found.values()) == {(gpu, 1.0) for gpu in seen}
