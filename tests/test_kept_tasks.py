"""The unit of work that is kept is one task of one cell."""

import time

import pandas as pd
import pytest
from small_recipe import blocks, run_small, small_recipe

import qbench.cell_tasks
from qbench.evaluation import kl_observer
from qbench.evaluation.scoring import scorer
from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.runner.grid import run_cells
from qbench.store import Store

TASKS = ("demo_choice", "demo_lastword", "demo_pages")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run tasks in a cache; return the records and the (cell, task) pairs that were scored."""
    scored = []
    ask = qbench.cell_tasks.ask

    def counting(model, task, settings):
        scored.append(task.name)
        if task.name == run_tasks.killed:
            raise KeyboardInterrupt
        return ask(model, task, settings)

    monkeypatch.setattr(qbench.cell_tasks, "ask", counting)

    def run_tasks(*tasks, out="out", cache="cache", killed=None, **settings):
        run_tasks.killed = killed
        scored.clear()
        recipe = small_recipe(
            tmp_path, tasks=list(tasks), checkpoints={"a": blocks("softpick")["softpick"]},
            evaluation={"limit": 2}, quantizers=["fp32", "rtn-4bit"],
        )  # fmt: skip
        planned = plan(Recipe.load(recipe), device="cpu")
        records = run_cells(planned, out=tmp_path / out, cache=tmp_path / cache, **settings)
        return records, list(scored)

    return run_tasks


def assert_same(records, store, others, other_store):
    for one, other in zip(records, others, strict=True):
        for name in ("scores", "damage", "documents", "audit", "groups"):
            assert getattr(one, name) == getattr(other, name), name
        assert one.scoring.requests == other.scoring.requests
        for table in one.files:
            pd.testing.assert_frame_equal(
                getattr(store, table)(one), getattr(other_store, table)(other)
            )


def test_a_task_that_is_added_is_scored_alone_and_gives_what_a_fresh_run_gives(run, tmp_path):
    """A run that is killed keeps the tasks that are done; one that is forced or damaged is scored
    again."""
    assert run(TASKS[0])[1] == [TASKS[0]] * 2
    with pytest.raises(KeyboardInterrupt):
        run(*TASKS, out="more", killed=TASKS[2])
    records, scored = run(*TASKS, out="more")
    assert scored == [TASKS[2], *TASKS[1:]]
    fresh, scored = run(*TASKS, out="fresh", cache="other")
    assert scored == [*TASKS] * 2
    assert records[1].damage.tasks[TASKS[2]].distributions.kl.mean > 0
    assert_same(records, Store(tmp_path / "more"), fresh, Store(tmp_path / "fresh"))
    assert run(TASKS[0], out="more", force=True)[1] == [TASKS[0]] * 2
    for path in (tmp_path / "cache" / "tasks").glob("*.outcomes.parquet"):
        path.write_bytes(b"damaged")
    assert run(*TASKS[:2], out="again")[1] == [*TASKS[:2]] * 2


def test_tasks_that_wait_for_a_slow_device_give_the_same(run, tmp_path, monkeypatch):
    """The next ones are begun meanwhile."""
    records, _ = run(*TASKS)
    copy = scorer.to_host

    def slow(*tensors):
        wait = copy(*tensors)
        return lambda: time.sleep(0.2) or wait()

    for module in (scorer, kl_observer):
        monkeypatch.setattr(module, "to_host", slow)
    others, _ = run(*TASKS, out="slow", cache="other")
    assert_same(records, Store(tmp_path / "out"), others, Store(tmp_path / "slow"))


@pytest.mark.usefixtures("own_cache")
def test_tasks_of_a_cell_whose_key_another_folder_has_are_not_scored_again(tmp_path, capfd):
    """Under another name of the checkpoint and of its precision too."""
    one, last = blocks("softpick"), {"tasks": ["demo_lastword"]}
    run_small(tmp_path, "--out", tmp_path / "first", checkpoints=one, **last)
    quantizers = ["fp32", {"name": "rtn-4bit", "group_size": 64, "label": "other"}]
    mine = {"mine": one["softpick"]}
    run_small(
        tmp_path, "--out", tmp_path / "second", checkpoints=mine, quantizers=quantizers, **last
    )
    assert "mine/other: demo_lastword is taken from the cache" in capfd.readouterr().err
    stores = [Store(tmp_path / name) for name in ("first", "second")]
    theirs, ours = (store.records()[-2:] for store in stores)
    assert ours[1].key == theirs[1].key
    assert ours[1].files.keys() == {"outcomes", "responses", "divergences"}
    assert_same(ours, stores[1], theirs, stores[0])
