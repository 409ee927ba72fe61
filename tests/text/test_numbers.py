"""Numbers as people read them."""

import pytest

from qbench.text import number


@pytest.mark.parametrize(
    ("value", "told"),
    [(3e227, "3e227"), (1e9, "1e9"), (123456.789, "123456.79"), (-0.001, "0.00")],
)
def test_a_perplexity_beyond_all_bounds_takes_one_cell(value, told):
    assert number(value, percent=False) == told
