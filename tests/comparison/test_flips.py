"""Answers that quantization changed are counted from the outcomes of two cells."""

import pytest
from synthetic import make_store

from qbench.comparison.compare import compare
from qbench.comparison.outcomes import cell_flips, count_flips, read_columns
from qbench.records import Flips, Unavailable
from qbench.statistics import Column


def outcomes(values, metric="acc", weights=None):
    weights = [1.0] * len(values) if weights is None else weights
    return {("t", metric): Column.of(range(len(values)), values, weights)}


@pytest.mark.parametrize(
    ("before", "after", "counts"),
    [
        (outcomes([1, 1, 0, 0, 1]), outcomes([0, 0, 1, 0, 1]), (5, 2, 1)),
        (outcomes([0.5, 1, 0]), outcomes([1, 1, 0]), None),  # partly right
        (outcomes([-9.5, -3.25], "ppl"), outcomes([-9.0, -3.0], "ppl"), None),
    ],
)
def test_flips_are_counted_in_both_directions(before, after, counts):
    result = count_flips(before, after)
    if counts is None:
        assert result == {}
        return
    names = ("documents", "right_to_wrong", "wrong_to_right")
    (metrics,) = result.values()
    assert list(metrics.values()) == [Flips(**dict(zip(names, counts, strict=True)))]


def test_they_need_no_cache_and_no_divergence(tmp_path):
    """A cell whose divergence could not be measured has flips all the same."""
    store = make_store(tmp_path / "r", quantizers=("bf16", "hqq-4bit"), sizes={"arc_easy": 60})
    for cell in store.manifest().cells:
        record = store.get(cell)
        lost = Unavailable(reason="hidden states are gone", retry=True)
        store.put(record.model_copy(update={"damage": lost}), store.outcomes(record))
    comparison = compare(store)
    base, quantized = (store.get(cell) for cell in store.manifest().cells[:2])
    expected = count_flips(read_columns(store, base), read_columns(store, quantized))
    assert expected["arc_easy"]["acc"].documents == 60
    assert comparison.flips[quantized.cell] == expected
    parts = quantized.key_parts | {"damage against": base.key}
    assert cell_flips(store, quantized.model_copy(update={"key_parts": parts})) == expected
    assert cell_flips(store, base) == {}
