"""Records on disk: whole or not there, whatever happens meanwhile."""

import multiprocessing
from datetime import UTC, datetime

import pandas as pd

from qbench.records import (
    OUTCOME_COLUMNS,
    RESPONSE_COLUMNS,
    Environment,
    GridCell,
    Part,
    Precision,
    Record,
    RunManifest,
    ScoringReport,
    TaskRecord,
)
from qbench.store import Store, TaskStore, task_key

PRECISION = Precision(weights=Part(bits=4, scheme="int4 in groups of 128"))
CELL = GridCell(
    checkpoint="a", quantizer="rtn-4bit", method="rtn", title="RTN", precision=PRECISION,
    key="0" * 64,
)  # fmt: skip
OUTCOMES = pd.DataFrame([("t", 0, "acc", 1.0, 1.0)], columns=list(OUTCOME_COLUMNS))
RESPONSES = pd.DataFrame([("t", 0, 0, -1.5, True, None, None, 0)], columns=list(RESPONSE_COLUMNS))


GRID = RunManifest(
    name="g", checkpoints=("a",), quantizers=("rtn-4bit",), tasks=("t",), cells=(CELL,)
)  # fmt: skip


def make_record(status: str = "ok", key: str = CELL.key) -> Record:
    now = datetime.now(UTC)
    environment = Environment(
        python="3", platform="p", device="cpu", hardware="h", versions={}, git_revision=None,
        qbench="0",
    )  # fmt: skip
    return Record(
        key=key, key_parts={"weights": "w"}, checkpoint="a", quantizer="rtn-4bit", method="rtn",
        title="RTN", precision=PRECISION, normalizer="softmax", attention="softmax/reference",
        status=status,
        environment=environment, started=now, finished=now,
    )  # fmt: skip


def test_a_record_comes_back_as_it_went_in(tmp_path):
    store, record = Store(tmp_path), make_record()
    written = store.put(record, OUTCOMES, RESPONSES)
    assert written.model_copy(update={"files": {}}) == record
    assert store.get(CELL) == written
    assert store.get_valid(CELL) == written
    pd.testing.assert_frame_equal(store.outcomes(written), OUTCOMES)
    pd.testing.assert_frame_equal(store.responses(written), RESPONSES)


def test_a_record_under_another_key_is_not_the_cells(tmp_path):
    store = Store(tmp_path)
    store.put(make_record(key="1" * 64), OUTCOMES, RESPONSES)
    assert store.get(CELL) is None


def _put_many(folder: str, worker: int) -> None:
    store = Store(folder)
    for number in range(20):
        outcomes = OUTCOMES.assign(value=float(worker))
        store.put(make_record(key=f"{number:016d}" + "0" * 48), outcomes, RESPONSES)
        store.put_manifest(GRID.model_copy(update={"name": str(worker)}))


def test_two_processes_on_one_folder_do_not_damage_each_other(tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_put_many, args=(str(tmp_path), n)) for n in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    store = Store(tmp_path)
    assert store.manifest().name in "01"
    for number in range(20):
        record = store.get_valid(CELL.model_copy(update={"key": f"{number:016d}" + "0" * 48}))
        assert record is not None
        assert len(store.outcomes(record)) == 1
    assert not list(tmp_path.rglob(".*.tmp")), "temporary files were left"


def test_a_finished_task_is_found_whatever_the_other_tasks_of_its_cell_are(tmp_path):
    parts = {"weights": "w", "tasks": {"t": "1", "u": "2"}, "few-shot": {"t": 0, "u": 0}}
    fewer = {"weights": "w", "tasks": {"t": "1"}, "few-shot": {"t": 0}, "damage against": "x"}
    key = task_key(parts, "t")
    assert task_key(fewer, "t") == key
    assert len({key, task_key(parts, "u"), task_key(parts, "t", parts)}) == 3
    tasks = TaskStore(tmp_path)
    scoring = ScoringReport(mode="exact", softmax_dtype="float32", batching="", peak_memory_gib=0)
    record = TaskRecord(
        checkpoint="a", quantizer="q", key=key, task="t", digest="1", scores=(), scoring=scoring,
        seconds=1.0,
    )  # fmt: skip
    written = tasks.put(record, OUTCOMES)
    assert tasks.get_valid(CELL.model_copy(update={"key": key})) == written
    assert tasks.outcomes(written).equals(OUTCOMES)
