"""Cells on a cluster of processes of this host: the same records as without one."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_recipe import DEMO, qbench, small_recipe

pytest.importorskip("distributed")

from qbench.bench.cluster import bed, run_on
from qbench.cluster.executor import ClusterExecutor
from qbench.cluster.located import WHOLE, located
from qbench.errors import RecipeError, UnavailableError
from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.running.grid import run_cells

pytestmark = pytest.mark.usefixtures("own_cache")


def planned(folder: Path, **changes):
    path = small_recipe(folder, **{"tasks": ["demo_lastword"], **changes})
    return plan(Recipe.load(path), device="cpu")


def can_hide() -> bool:
    done = subprocess.run(["unshare", "--mount", "--map-root-user", "true"], capture_output=True)
    return done.returncode == 0


@pytest.mark.skipif(not can_hide(), reason="no mount namespaces here to hide a folder with")
def test_hosts_without_a_shared_file_system_give_the_records_of_one_host(tmp_path):
    """Every file of the plan is hidden from the workers: they ask for what they lack."""
    expected = {
        record.cell: (record.scores, record.damage)
        for record in run_cells(planned(tmp_path), out=tmp_path / "expected")
    }
    hidden = shutil.copytree(DEMO, tmp_path / "hidden")
    changes = {
        "checkpoints": {name: str(hidden / name) for name in ("softmax", "softpick")},
        "definitions": str(hidden / "tasks"),
        "data": str(hidden / "data"),
    }
    (tmp_path / "bed").mkdir()
    with bed(tmp_path / "bed", [{"stubbed": False, "blind_to": hidden}] * 2) as cluster:
        records = run_on(cluster, planned(tmp_path, **changes), tmp_path / "out")
        caches = sorted((tmp_path / "bed").glob("cache-*"))
    assert {record.cell: (record.scores, record.damage) for record in records} == expected
    assert all(record.damage.tasks for record in records if record.quantized)
    for cache in caches:
        assert len(list((cache / "files").glob(f"*/{WHOLE}"))) >= 2, "a host got nothing"
        assert not list((cache / "cells" / "records").rglob("*.log")), "nothing stays behind"


def test_what_a_host_has_is_not_asked_for(tmp_path):
    whole = planned(tmp_path)
    found, texts, missing = located(whole, "softmax/fp32", tmp_path)
    assert (found, texts, missing) == (whole, {}, [])


def test_a_changed_checkpoint_on_another_host_is_asked_for(tmp_path):
    copy = shutil.copytree(DEMO / "softmax", tmp_path / "softmax")
    whole = planned(tmp_path, checkpoints={"softmax": str(copy)})
    with (copy / "config.json").open("a") as file:
        file.write("\n")
    _, _, missing = located(whole, "softmax/fp32", tmp_path / "cache")
    assert [one.target for one in missing] == [f"files/{whole.cells[0].checkpoint.digest}"]


def test_the_command_says_where_it_ran_and_finds_its_records_again(tmp_path, capfd):
    path = small_recipe(tmp_path, tasks=["demo_lastword"])
    arguments = ("run", path, "--out", tmp_path / "out", "--cluster", "local:1", "--only", "*/fp32")
    assert qbench(*arguments) == 0
    said = capfd.readouterr().err
    assert "cluster tcp://127.0.0.1:" in said
    assert "1 worker on 1 host; dashboard http://" in said
    assert said.count(": done (") == 2
    assert qbench(*arguments) == 0
    assert capfd.readouterr().err.count("already there") == 2


@pytest.mark.parametrize(
    ("address", "kind", "said"),
    [
        ("local:0", RecipeError, "from 1 to 1024"),
        ("nowhere.json", RecipeError, "no such scheduler file"),
        ("tcp://127.0.0.1:9", UnavailableError, "no scheduler answers there"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_line(tmp_path, monkeypatch, address, kind, said):
    monkeypatch.setattr("qbench.cluster.connect.SECONDS_TO_CONNECT", 1.0)
    with pytest.raises(kind, match=said):
        qbench("run", small_recipe(tmp_path), "--cluster", address, "--out", tmp_path / "out")


def test_a_worker_that_could_give_other_scores_is_not_used(tmp_path):
    from qbench.cluster.workers import problem_of

    mine = _host()
    assert problem_of(mine, mine, device="cpu", gpus=set()) is None
    changes = {
        "it has 4 threads; start it with --nthreads 1": {"threads": 4},
        "its qbench has other code than this one": {"code": "0"},
        "it has torch 1.0, this host 2.0": {"versions": {"torch": "1.0"}},
    }
    for expected, change in changes.items():
        other = dataclasses.replace(mine, **change)
        assert problem_of(other, mine, device="cpu", gpus=set()) == expected
    assert problem_of(mine, mine, device="cuda", gpus=set()) == "it has no GPU"
    other = dataclasses.replace(mine, gpu="B")
    assert "another kind of GPU" in problem_of(other, mine, device="cuda", gpus={"A"})


def _host():
    from qbench.cluster.remote import Host

    return Host(name="one", cache="", threads=1, gpu=None, code="1", versions={"torch": "2.0"})


def test_a_plan_that_is_gone_is_never_taken_for_another():
    """One executor may have the cells of several plans, one after the other; CPython puts a new
    object where the last one was."""

    def submit(function, data, *, key):
        return key

    executor = ClusterExecutor(
        SimpleNamespace(submit=submit), SimpleNamespace(ask=None, ask_all=None, there=None)
    )
    sent = {
        executor._plan(SimpleNamespace(plan=SimpleNamespace(plugins=(), number=number)))
        for number in range(100)
    }
    assert len(sent) == 100
