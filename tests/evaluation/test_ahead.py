"""What is made of tasks while the model is loaded: the same requests and ids, made once."""

from __future__ import annotations

import shutil
import sys
import threading

import pytest
from small_recipe import DEMO, small_recipe

from qbench.errors import DataError
from qbench.evaluation import ahead
from qbench.evaluation.ahead import Ahead
from qbench.evaluation.scoring import asked, scorer
from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.running.grid import run_cells

MAIN = threading.main_thread().name
pytestmark = pytest.mark.usefixtures("own_cache")


def planned(folder, **changes):
    return plan(Recipe.load(small_recipe(folder, **changes)), device="cpu")


@pytest.fixture
def encoded_by(monkeypatch):
    """The names of the threads that encoded requests: by ``encode_pairs`` and ``encode_texts``."""
    found = []
    for module in (asked, scorer):
        for name in ("encode_pairs", "encode_texts"):
            usual = getattr(module, name)

            def noted(*arguments, usual=usual, **settings):
                found.append(threading.current_thread().name)
                return usual(*arguments, **settings)

            monkeypatch.setattr(module, name, noted)
    return found


def scores(folder, out, **changes):
    one = planned(folder, **changes)
    return [
        (record.scores, record.documents, record.error)
        for record in run_cells(one, out=folder / out, cells=one.cells[:1])
    ]


def test_requests_are_encoded_once_and_scores_are_the_same_to_the_bit(
    tmp_path, monkeypatch, encoded_by
):
    tasks = ["demo_choice", "demo_lastword", "demo_pages"]
    found = scores(tmp_path, "ahead", tasks=tasks)
    assert found[0][2] is None
    assert len(encoded_by) == 3
    assert MAIN not in encoded_by
    monkeypatch.setattr(Ahead, "_work", lambda self: self._loaded.set())
    encoded_by.clear()
    assert scores(tmp_path, "alone", tasks=tasks) == found
    assert encoded_by == [MAIN] * 3


def test_tasks_with_examples_are_built_for_each_model_anew(tmp_path, encoded_by):
    """Their examples are drawn by a generator that goes on."""
    found = scores(tmp_path, "out", tasks=[{"name": "demo_choice", "num_fewshot": 1}])
    assert found[0][2] is None
    assert encoded_by == [MAIN]


def test_what_fails_beside_is_said_where_it_is_asked_for(tmp_path):
    data = shutil.copytree(DEMO / "data", tmp_path / "data")
    one = planned(tmp_path, data=str(data))
    cell, file = one.cells[0], one.tasks[0].files[0].path
    file.write_bytes(file.read_bytes() + b"\n{}")
    with Ahead(one.tasks, cell.scoring, cell.checkpoint).at_work() as work:
        with pytest.raises(DataError, match="changed after this run began"):
            work.documents()
        work.finish()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_the_turns_of_threads_are_as_before_whatever_happens(tmp_path, error):
    one, usual = planned(tmp_path), sys.getswitchinterval()
    with pytest.raises(error):
        _fail(one, error)
    assert sys.getswitchinterval() == usual


def _fail(one, error):
    with Ahead(one.tasks, one.cells[0].scoring, one.cells[0].checkpoint).at_work():
        assert sys.getswitchinterval() == pytest.approx(ahead.SECONDS_A_TURN, rel=0.01)
        raise error


@pytest.mark.parametrize(
    ("error", "waits"), [(ZeroDivisionError, True), (KeyboardInterrupt, False)]
)
def test_ctrl_c_waits_for_nothing_and_a_cell_that_fails_leaves_nobody_at_work(
    tmp_path, monkeypatch, error, waits
):
    one, ended = planned(tmp_path), threading.Event()

    def work(self):
        self._stopped.wait(60)
        ended.wait(1)
        ended.set()

    monkeypatch.setattr(Ahead, "_work", work)
    with pytest.raises(error):
        _fail(one, error)
    assert ended.is_set() == waits
    ended.set()
