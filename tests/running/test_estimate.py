"""Time that is left of a run: known from its beginning where cells were run before."""

from __future__ import annotations

import io

import pytest

from qbench.running.estimate import Estimate, in_words
from qbench.running.progress import Display


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def estimate(cells, **about):
    clock = Clock()
    return clock, Estimate(cells, clock=clock, **about)


def test_earlier_records_say_it_before_anything_has_run():
    _, left = estimate(["a", "b"], earlier={"a": 40.0, "b": 20.0})
    assert left.left() == 60
    _, left = estimate(["a", "b"], earlier={"a": 40.0, "b": 20.0}, at_once=2)
    assert left.left() == 30


def test_nothing_is_said_where_nothing_is_known():
    _, left = estimate(["a", "b"])
    left.begin("a")
    assert left.left() is None


def test_the_first_batches_say_it_where_no_record_does():
    clock, left = estimate(["a", "b"], tasks=2)
    left.begin("a")
    clock.now = 10
    left.stage("a", "evaluate one")
    clock.now = 15
    left.advance("a", 50, 100)  # a quarter of all in 5 s: 30 s in all
    assert left.left() == pytest.approx(15 + 30)
    left.advance("a", 100, 100)
    left.stage("a", "evaluate two")
    clock.now = 20
    left.advance("a", 0, 100)  # half of it in 10 s
    assert left.left() == pytest.approx(10 + 30)


def test_a_cell_that_has_ended_says_which_tasks_are_long():
    """As WikiText is beside four tasks of short questions."""
    clock, left = estimate(["a", "b"], tasks=3)
    for cell in "ab":
        left.begin(cell)
        for task, seconds in (("one", 5), ("two", 5), ("long", 90)):
            left.stage(cell, f"evaluate {task}")
            if (cell, task) == ("b", "long"):  # a tenth of it in 10 s, not two thirds
                assert left.left() == pytest.approx(90)
            clock.now += seconds
        left.end(cell)


def test_what_a_cell_waits_for_another_is_no_work_of_its_own():
    clock, left = estimate(["a", "b", "c"], tasks=2)
    left.begin("a")
    clock.now = 10
    left.stage("a", "waits for base")
    clock.now = 50
    left.stage("a", "evaluate one")
    clock.now = 60
    left.advance("a", 100, 100)  # half of its scoring in 10 s, after 10 s of other work
    for now in (60, 90):
        clock.now = now
        left.stage("a", "waits for base")
        assert left.left() == pytest.approx(10 + 30 + 30)
    left.stage("a", "evaluate two")
    clock.now = 100
    left.stage("a", "waits for base")
    clock.now = 500
    left.end("a")
    assert left.left() == pytest.approx(30 + 30)


def test_a_finished_cell_and_one_that_was_there_count_as_what_they_are():
    clock, left = estimate(["a", "b", "c"], tasks=1)
    left.begin("a")
    left.end("a")  # was there already: took nothing
    assert left.left() is None
    left.begin("b")
    left.stage("b", "evaluate one")
    clock.now = 12
    left.end("b")
    assert left.left() == 12


def test_lines_without_a_terminal_say_it_too():
    shown = io.StringIO()
    with Display(shown, 1, Estimate(["a/fp32"], earlier={"a/fp32": 300.0})) as display:
        display.begin("a/fp32")
        display.stage("a/fp32", "load")
    assert shown.getvalue().endswith("[1/1] a/fp32: load (about 5 min left)\n")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.1, "about 1 s left"), (89, "about 89 s left"), (130, "about 2 min left"),
     (9000, "about 2.5 h left")],
)  # fmt: skip
def test_words(seconds, words):
    assert in_words(seconds) == words
