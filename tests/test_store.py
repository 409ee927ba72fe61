"""Records on disk: whole or not there, whatever happens meanwhile."""

import multiprocessing

import pandas as pd
import pytest
from synthetic import make_record, make_store

from qbench.records import OUTCOME_COLUMNS, RESPONSE_COLUMNS, ScoringReport, TaskRecord
from qbench.store import Store, TaskStore, task_key

OUTCOMES = pd.DataFrame([("t", 0, "acc", 1.0, 1.0)], columns=list(OUTCOME_COLUMNS))
RESPONSES = pd.DataFrame([("t", 0, 0, -1.5, True, None, None, 0)], columns=list(RESPONSE_COLUMNS))


def cells_of(store):
    """Twenty cells under keys of their own."""
    (cell,) = store.manifest().cells
    return [cell.model_copy(update={"key": f"{n:016d}" + "0" * 48}) for n in range(20)]


def _put_many(folder: str, worker: int) -> None:
    store = Store(folder)
    for cell in cells_of(store):
        store.put(make_record(cell, ()), OUTCOMES.assign(value=float(worker)), RESPONSES)
        store.put_manifest(store.manifest().model_copy(update={"name": str(worker)}))


def test_two_processes_on_one_folder_do_not_damage_each_other(tmp_path):
    make_store(tmp_path, checkpoints=("a",), quantizers=("rtn-4bit",), missing=("a/rtn-4bit",))
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_put_many, args=(str(tmp_path), n)) for n in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    store = Store(tmp_path)
    assert store.manifest().name in "01"
    for cell in cells_of(store):
        record = store.get_valid(cell)
        assert record.model_copy(update={"files": {}}) == make_record(cell, ())
        assert store.outcomes(record)["value"].item() in (0.0, 1.0)
        pd.testing.assert_frame_equal(store.responses(record), RESPONSES)
    assert store.get(cell.model_copy(update={"key": "1" * 64})) is None  # of another key
    assert not list(tmp_path.rglob(".*.tmp")), "temporary files were left"


def test_a_finished_task_is_found_whatever_the_other_tasks_of_its_cell_are(tmp_path):
    parts = {"weights": "w", "tasks": {"t": "1", "u": "2"}, "few-shot": {"t": 0, "u": 0}}
    fewer = {"weights": "w", "tasks": {"t": "1"}, "few-shot": {"t": 0}, "damage against": "x"}
    key = task_key(parts, "t")
    assert task_key(fewer, "t") == key
    assert len({key, task_key(parts, "u"), task_key(parts, "t", parts)}) == 3
    scoring = ScoringReport(mode="exact", softmax_dtype="float32", batching="", peak_memory_gib=0)
    record = TaskRecord(
        checkpoint="a", quantizer="q", key=key, task="t", digest="1", scores=(), scoring=scoring,
        seconds=1.0,
    )  # fmt: skip
    tasks = TaskStore(tmp_path / "tasks")
    written = tasks.put(record, OUTCOMES)
    store = make_store(
        tmp_path / "grid", checkpoints=("a",), quantizers=("bf16",), sizes={"piqa": 5}
    )
    (cell,) = store.manifest().cells
    assert tasks.get_valid(cell.model_copy(update={"key": key})) == written
    assert tasks.outcomes(written).equals(OUTCOMES)


def test_arrays_of_outcomes_are_those_of_the_table_in_any_order_of_rows(tmp_path, monkeypatch):
    store = make_store(tmp_path, checkpoints=("mine",), quantizers=("bf16",), sizes={"sciq": 30})
    (record,) = store.records()
    table = store.outcomes(record)
    for mixed in (table, table.sort_values("document", ascending=False, kind="stable")):
        mixed = mixed.assign(value=mixed["value"].mask(mixed["document"] == 3))  # not a number
        with monkeypatch.context() as patch:  # earlier versions wrote rows as they came
            patch.setattr(pd.DataFrame, "sort_values", lambda table, *_, **__: table)
            written = store.put(record, mixed)
        read = store.outcome_arrays(written)
        groups = mixed.groupby(["task", "metric"], sort=False)
        assert [*read] == [name for name, _ in groups]
        for name, group in groups:
            group = group.sort_values("document")
            for array, column in zip(read[name], ("document", "value", "weight"), strict=True):
                assert array.tolist() == pytest.approx(group[column].tolist(), nan_ok=True)
