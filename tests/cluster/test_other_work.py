"""What is not a run's cells, on two workers: analyses and noise. Where this host can hide a folder
from them, they see neither the checkpoints nor the text."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from small_recipe import DEMO, qbench, small_recipe

pytest.importorskip("distributed")

from qbench.analyses import Analyses, long_contexts, sensitivities
from qbench.bench.cluster import bed
from qbench.comparison.lines import read_noise
from qbench.store import Store

pytestmark = pytest.mark.usefixtures("own_cache")
ANALYZE = ("--samples", 2, "--length", 32, "--long-context", 64, "--sensitivity", "rtn-4bit",
           "--blocks", "--only", "*/fp32")  # fmt: skip


def can_hide() -> bool:
    done = subprocess.run(["unshare", "--mount", "--map-root-user", "true"], capture_output=True)
    return done.returncode == 0


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    return shutil.copytree(DEMO, tmp_path_factory.mktemp("hidden") / "demo")


@pytest.fixture(scope="module")
def workers(tmp_path_factory, hidden):
    """Two workers, each with a cache of its own."""
    settings = {"stubbed": False, **({"blind_to": hidden} if can_hide() else {})}
    with bed(tmp_path_factory.mktemp("workers"), [settings] * 2) as found:
        found.wait_for_workers(2)
        yield found


def measured(out):
    """What was measured, without when and where."""
    found = {}
    for name, analyses in (("", Analyses(out)), ("long", long_contexts(out)),
                           ("sensitivity", sensitivities(out))):  # fmt: skip
        for one in analyses.all():
            assert one.status == "ok", one.error
            content = one.model_dump(mode="json")
            for part in ("stages", "started", "finished"):
                content.pop(part)
            found[name, one.cell] = content
    return found


def test_analyses_are_those_of_one_host(tmp_path, hidden, workers, capfd):
    text = hidden / "data" / "demo_pages" / "test.jsonl"
    field = next(iter(json.loads(text.read_text().splitlines()[0])))
    path = small_recipe(tmp_path, checkpoints={"softpick": str(hidden / "softpick")})
    options = (*ANALYZE, "--text", text, "--field", field)
    assert qbench("analyze", path, "--out", tmp_path / "here", "--device", "cpu", *options) == 0
    cluster = ("--cluster", workers.address)
    assert qbench("analyze", path, "--out", tmp_path / "there", *options, *cluster) == 0
    assert "2 workers on 1 host" in capfd.readouterr().err
    expected = measured(tmp_path / "here")
    assert len(expected) == 3
    assert measured(tmp_path / "there") == expected
    tables = (tmp_path / "there" / "analysis" / "tables.md").read_text()
    assert tables == (tmp_path / "here" / "analysis" / "tables.md").read_text()
    logs = list((tmp_path / "there" / "analysis").rglob("*.log"))
    assert len(logs) == 3
    assert qbench("analyze", path, "--out", tmp_path / "there", *options, *cluster) == 0
    assert capfd.readouterr().err.count("already there") == 3


def test_an_analysis_that_fails_there_is_a_failed_record_here(tmp_path, workers, capfd):
    path = small_recipe(tmp_path, checkpoints={"softmax": str(DEMO / "softmax")})
    broken = ("--heads", "99.0", "--samples", 2, "--length", 32, "--cluster", workers.address)
    assert qbench("analyze", path, "--out", tmp_path / "out", *broken) == 1
    (one,) = Analyses(tmp_path / "out").all()
    assert one.status == "failed"
    assert "99" in one.error
    assert "softmax/fp32: failed: " in capfd.readouterr().err


def test_noise_is_that_of_one_host(tmp_path, hidden, workers, capfd):
    checkpoints = {name: str(hidden / name) for name in ("softmax", "softpick")}
    path = small_recipe(
        tmp_path, checkpoints=checkpoints, tasks=["demo_lastword"], data=str(hidden / "data")
    )
    assert qbench("noise", path, "--out", tmp_path / "here", "--device", "cpu") == 0
    assert qbench("noise", path, "--out", tmp_path / "there", "--cluster", workers.address) == 0
    assert "2 workers on 1 host" in capfd.readouterr().err
    expected, found = (read_noise(Store(tmp_path / name)) for name in ("here", "there"))
    assert found == expected
    assert set(found["cells"]) == {"softmax/fp32", "softpick/fp32"}
