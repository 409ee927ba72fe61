"""A reason that several share is said once."""

import io

import pytest

from qbench.errors import shown
from qbench.runner.progress import Display
from qbench.text import duration, group_by_reason, number


def test_lines_of_one_reason_become_one():
    found = [("a/x", "failed: no room"), ("b/x", "missing"), ("c/x", "failed: no room")]
    assert group_by_reason(found) == ["a/x, c/x: failed: no room", "b/x: missing"]


def test_many_names_are_counted():
    (line,) = group_by_reason((f"c{number}", "no") for number in range(32))
    assert line == "c0, c1, c2, c3, c4, c5, c6, c7 and 24 more: no"


def test_progress_says_a_failure_once():
    stream = io.StringIO()
    with Display(stream, 3) as display:
        for cell in ("a/x", "b/x", "c/x"):
            display.log(f"{cell}: FAILED: no room", "bold red")
    assert stream.getvalue().splitlines() == [
        "a/x: FAILED: no room", "b/x: FAILED, as a/x", "c/x: FAILED, as a/x"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"),
    [([1, "a", {"b": None}], "[1, 'a', {'b': None}]"), ("x" * 10**6, "'" + "x" * 78 + "…")],
    ids=["small", "long"],
)
def test_a_value_in_a_message_is_short(value, text):
    assert shown(value) == text


@pytest.mark.parametrize(
    ("value", "told"),
    [(3e227, "3e227"), (1e9, "1e9"), (123456.789, "123456.79"), (-0.001, "0.00")],
)
def test_a_perplexity_beyond_all_bounds_takes_one_cell(value, told):
    assert number(value, percent=False) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0, "1 s"), (17.2, "17 s"), (300, "5 min"), (11_520, "3.2 h"), (12 * 86_400, "12 days")],
)
def test_a_time_is_in_the_unit_that_a_person_would_say(seconds, told):
    assert duration(seconds) == told
