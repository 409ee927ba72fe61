"""A run makes damaged cells again, and nothing else: the bundled pair, end to end."""

import json
import shutil

import pytest
from small_recipe import blocks, small_recipe

from qbench.store import Store


@pytest.fixture
def qbench(tmp_path, command, monkeypatch, capfd):
    """Runs a command on the results folder; its exit code and what it said."""
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    alone = {"checkpoints": blocks("softpick"), "tasks": ["demo_lastword"]}
    path = small_recipe(tmp_path, **alone, evaluation={"limit": 3})

    def call(name: str, *more: str) -> tuple[int | str | None, str]:
        # kept tasks would give back what a folder lost
        shutil.rmtree(tmp_path / "cache" / "tasks", ignore_errors=True)
        code = command(name, path, "--out", f"{tmp_path}/out", "--device", "cpu", *more)
        said = capfd.readouterr()
        return code, said.out + said.err

    return call


def test_damaged_files_are_told_of_and_made_again_and_the_others_stay(qbench, tmp_path):
    assert qbench("run")[0] == 0
    store = Store(tmp_path / "out")
    tables = (store.directory / "tables.md").read_bytes()
    (whole,) = store.directory.glob("records/softpick/fp32/*.json")
    (record,) = store.directory.glob("records/softpick/rtn-4bit/*.json")
    (outcomes,) = store.directory.glob("records/softpick/rtn-4bit/*.outcomes.parquet")
    left = whole.stat().st_mtime_ns
    for damaged in ([record], [outcomes, store.directory / "grid.json"]):
        for path in damaged:
            path.write_bytes(path.read_bytes()[:-7])
        if record in damaged:
            code, said = qbench("plan")
            assert code == 0
            assert "to run    softpick/rtn-4bit" in said
            assert "finished  softpick/fp32" in said
        code, said = qbench("run")
        assert code == 0, said
        for path in damaged:
            assert f"{path.name}: damaged" in said
        assert "softpick/fp32: already finished" in said
        assert "softpick/rtn-4bit: made again" in said
        assert (store.directory / "tables.md").read_bytes() == tables
        assert whole.stat().st_mtime_ns == left
        assert len(store.records()) == 2
    damage = json.loads(record.read_bytes())["damage"]
    rows = min(
        tmp_path.glob("cache/distributions/*.safetensors"), key=lambda path: path.stat().st_size
    )
    rows.write_bytes(rows.read_bytes()[:-1] + b"x")
    record.unlink()
    code, said = qbench("run")
    assert code == 0
    assert f"fp32: made again, since softpick/rtn-4bit needs it: {rows}: its content" in said
    assert json.loads(record.read_bytes())["damage"] == damage


def test_a_plan_says_that_a_cell_without_damage_is_run_after_the_one_it_needs(qbench, tmp_path):
    """And, under a tightened tolerance, what is run again."""
    recipe = tmp_path / "small.yaml"
    text = recipe.read_text().replace("limit: 3", "limit: 3\n  scoring: fast")
    recipe.write_text(text)
    assert qbench("run", "--only", "*/rtn-4bit")[0] == 0
    (alone,) = Store(tmp_path / "out").records()
    assert "run that cell first, then this one" in alone.damage.reason
    planned = qbench("plan")[1]
    assert "to run    softpick/fp32" in planned
    assert "to retry  softpick/rtn-4bit" in planned
    assert "finished  softpick/rtn-4bit" in qbench("plan", "--only", "*/rtn-4bit")[1]
    assert "2 of 2 cells were run" in qbench("run")[1]
    assert set(Store(tmp_path / "out").records()[1].damage.tasks) == {"demo_lastword"}
    assert qbench("plan")[1].count("finished  softpick/") == 2
    recipe.write_text(text.replace("limit: 3", "limit: 3\n  tolerance: {mean: 1.0e-12}"))
    assert qbench("plan")[1].count("to retry  softpick/") == 2


def test_a_cache_that_cannot_be_written_to_is_refused_before_work_begins(
    qbench, tmp_path, monkeypatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "file" / "cache"))
    code, said = qbench("run")
    assert code == 2
    assert f"$QBENCH_CACHE {tmp_path}/file/cache: cannot be written to" in said
    assert not (tmp_path / "out").exists()
