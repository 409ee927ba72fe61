"""The cache: listed by last use, bounded, and not pruned under a run."""

import os

import pytest
from small_recipe import DEMO, qbench, small_recipe
from test_store import CELL, OUTCOMES, make_record

from qbench.files import cache_folder, mark_used
from qbench.records import ScoringReport, TaskRecord
from qbench.runner import grid
from qbench.store import KeyedStore, Store, entries, find_cell, hold, keep_cell, prune, task_key

DAY = 86_400
NOW = 1_700_000_000


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Two artifacts and one file of hidden states, last used 3, 2 and 1 days ago, of 1 to 3 kB."""
    folder = tmp_path / "cache"
    for age, name in ((3, "aaaa/gptq-4bit-0011"), (2, "bbbb/hqq-2bit-0022")):
        made = folder / "artifacts" / name
        made.mkdir(parents=True)
        (made / "manifest.json").write_text("{}")
        (made / "weights.safetensors").write_bytes(b"x" * (4 - age) * 1000)
        for path in (*made.iterdir(), made):
            os.utime(path, (NOW - age * DAY,) * 2)
    states = folder / "distributions" / "0123456789abcdef.safetensors"
    states.parent.mkdir()
    for path in (states, states.with_name(f"{states.name}.digest")):
        path.write_bytes(b"x" * 1500)
        os.utime(path, (NOW - DAY,) * 2)
    monkeypatch.setenv("QBENCH_CACHE", str(folder))
    return folder


def test_entries_come_by_last_use_and_reading_one_is_a_use(cache):
    found = entries(cache)
    assert [(one.name, one.bytes, NOW - one.used) for one in found] == [
        ("weights aaaa/gptq-4bit-0011", 1002, 3 * DAY),
        ("weights bbbb/hqq-2bit-0022", 2002, 2 * DAY),
        ("hidden states 0123456789abcdef", 3000, DAY),
    ]
    mark_used(found[0].path)
    assert entries(cache)[-1].path == found[0].path


def test_the_least_recently_used_goes_first_and_only_as_much_as_must(cache):
    assert prune(cache, max_bytes=float("inf")).removed == []
    dry = prune(cache, max_bytes=5500, dry_run=True)
    assert [one.path.name for one in dry.removed] == ["gptq-4bit-0011"]
    assert len(entries(cache)) == 3
    assert [one.kind for one in prune(cache, max_bytes=3500).removed] == ["weights", "weights"]
    (left,) = entries(cache)
    assert left.kind == "hidden states"
    assert prune(cache, max_bytes=0).removed == [left]
    assert not list(cache.rglob("*.safetensors*"))[1:]


@pytest.mark.parametrize("index", [0, 2])
def test_what_a_run_uses_stays(cache, capsys, index):
    used = entries(cache)[index]
    with hold([used.path]), hold([used.path]):
        pruned = prune(cache, max_bytes=0)
        assert pruned.in_use == [used]
        assert len(pruned.removed) == 2
        assert qbench("cache", "prune", "--max-gib", "0") == 0
        assert f"kept {used.name}, 0.0 MiB: a run uses it" in capsys.readouterr().out
    assert entries(cache) == [used]
    assert prune(cache, max_bytes=0).removed == [used]


_run_cell = grid.run_cell


def run_cell_then_prune(plan, name, **more):
    record = _run_cell(plan, name, **more)
    if name.endswith("fp32"):
        prune(cache_folder(), max_bytes=0)
    return record


def test_pruning_during_a_run_takes_no_damage_from_it(tmp_path, monkeypatch):
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(grid, "run_cell", run_cell_then_prune)
    recipe = small_recipe(
        tmp_path, tasks=["demo_lastword"], checkpoints={"softpick": str(DEMO / "softpick")},
        quantizers=["fp32", "rtn-4bit"],
    )  # fmt: skip
    assert qbench("run", recipe, "--out", tmp_path / "out", "--device", "cpu") == 0
    _, quantized = Store(tmp_path / "out").records()
    assert quantized.damage.status == "measured"


def test_a_finished_cell_is_found_by_its_key_under_any_name(tmp_path):
    store = Store(tmp_path / "results")
    record = store.put(make_record(), OUTCOMES)
    keep_cell(tmp_path / "cache", record, store)
    asked = CELL.model_copy(update={"checkpoint": "b", "quantizer": "mine"})
    found, tables = find_cell(tmp_path / "cache", asked)
    assert found.cell == "b/mine"
    assert found.scores == record.scores
    assert tables == {"outcomes": store.payload(record, "outcomes")}
    (table,) = (tmp_path / "cache" / "cells").glob("*.parquet")
    table.write_bytes(b"damaged")
    assert find_cell(tmp_path / "cache", asked) is None


def test_a_finished_task_is_found_whatever_the_other_tasks_of_its_cell_are(tmp_path):
    parts = {"weights": "w", "tasks": {"t": "1", "u": "2"}, "few-shot": {"t": 0, "u": 0}}
    fewer = {"weights": "w", "tasks": {"t": "1"}, "few-shot": {"t": 0}, "damage against": "x"}
    key = task_key(parts, "t")
    assert task_key(fewer, "t") == key
    assert len({key, task_key(parts, "u"), task_key(parts, "t", parts)}) == 3
    tasks = KeyedStore(tmp_path, TaskRecord)
    scoring = ScoringReport(mode="exact", softmax_dtype="float32", batching="", peak_memory_gib=0)
    record = TaskRecord(
        checkpoint="a", quantizer="q", key=key, task="t", digest="1", scores=(), scoring=scoring,
        seconds=1.0,
    )  # fmt: skip
    written = tasks.put(record, OUTCOMES)
    assert tasks.get_valid(CELL.model_copy(update={"key": key})) == written
    assert tasks.outcomes(written).equals(OUTCOMES)
    assert [one.kind for one in entries(tmp_path)] == ["task"]
