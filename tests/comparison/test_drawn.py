"""The bootstrap's draws: what is counted at once changes no bit."""

import numpy as np
import pytest

from qbench.statistics import panel


@pytest.mark.parametrize("documents", [61, 1_839, 50_001])
def test_counts_are_those_of_all_rounds_drawn_at_once(documents):
    rounds = 101
    drawn = np.random.default_rng(0).integers(
        0, documents, size=(rounds, documents), dtype=np.int32
    )
    expected = [np.bincount(one, minlength=documents) for one in drawn]
    found = panel._counts(documents, rounds, np.random.default_rng(0))
    assert np.array_equal(found, expected)
