"""Coverage of intervals in samples of documents of real runs."""

from pathlib import Path

import numpy as np
import pytest

from qbench.comparison.changes import read_columns
from qbench.comparison.losses import kl_column
from qbench.statistics import LOG_MEAN, Panel, effect
from qbench.store import Store

RESULTS = Path(__file__).parents[2] / "results"
LAMBADA = ("lambada_openai", "perplexity")
SIMULATIONS = 400
LEAST = 0.935 - 2 * (0.935 * 0.065 / SIMULATIONS) ** 0.5


def records(folder):
    store = Store(RESULTS / folder)
    return store, {record.cell: record for record in store.records()}


def coverage(panel, signs, aggregation, documents, simulations=SIMULATIONS):
    """Return how often the interval of documents drawn from ``panel`` holds the panel's own
    effect."""
    rng = np.random.default_rng(documents)
    truth = effect(panel, signs, aggregation).estimate
    covered = 0
    for _ in range(simulations):
        drawn = rng.integers(0, panel.documents, documents)
        sample = Panel(values=panel.values[drawn], weights=panel.weights[drawn], index=panel.index)
        interval = effect(sample, signs, aggregation).interval
        covered += interval.low <= truth <= interval.high
    return covered / simulations


@pytest.mark.slow
@pytest.mark.parametrize("documents", [20, 100, 1_000])
@pytest.mark.parametrize("quantizer", ["gptq-3bit", "hqq-2bit"])
def test_of_lambadas_perplexity(quantizer, documents):
    """Student's t covered 92.7 of 100 with 20 documents."""
    store, found = records("pair-27m")
    columns = {
        name: read_columns(store, found[f"softmax/{name}"], [LAMBADA])[LAMBADA]
        for name in (quantizer, "bf16")
    }
    signs = {quantizer: 1, "bf16": -1}
    assert coverage(Panel.of(columns), signs, "perplexity", documents) >= LEAST


@pytest.mark.slow
@pytest.mark.parametrize("documents", [20, 100, 1_000])
@pytest.mark.parametrize(
    "signs", [{"Q8_0": 1}, {"Q4_K_M": 1}, {"Q4_0": 1, "Q3_K_M": -1}], ids=lambda of: "-".join(of)
)
def test_of_kl_and_of_the_ratio_of_two_precisions(signs, documents):
    """The mean ± 1.96 standard errors covered 71 to 95 of 100."""
    store, found = records("published-27m-gguf")
    panel = Panel.of({name: kl_column(store, found[f"softmax/{name}"]) for name in signs})
    assert coverage(panel, signs, LOG_MEAN, documents, 200) >= LEAST - 0.01
