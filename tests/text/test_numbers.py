"""Numbers as people read them."""

import pytest

from qbench.text import duration, number


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
