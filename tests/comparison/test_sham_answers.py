"""Runs of one model against itself, by answers that SmolLM2 drew: how often a table marks a
difference, or the gate fails.

answer_samples.csv has the lengths of 32 answers to each of 200 prompts (the questions of
ARC-easy, at temperature 0.7, at most 96 tokens), and whether they stopped by themselves.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from gate.conftest import answered, gate_of

from qbench.gate.check import changes
from qbench.statistics import adjust
from qbench.statistics.effect import Effect

SAMPLES = Path(__file__).with_name("answer_samples.csv")
METRICS = ("length", "stops")
PROMPTS = 200
MOST = 0.02


def side(metric, values):
    """Return one run's results of ``metric``, of answers [prompts, samples]."""
    return answered(metric, values.mean(axis=1), values.var(axis=1, ddof=1) / values.shape[1])


def sham_runs(runs, samples, shift=0.0):
    """Yield both sides of a run, by metric: 200 prompts drawn with replacement, other ``samples``
    answers to each on either side; the other side's are longer by the factor 1 + ``shift``."""
    drawn = pd.read_csv(SAMPLES).set_index(["prompt", "sample"])
    values = {name: drawn[name].unstack().to_numpy(float) for name in METRICS}
    draw = np.random.default_rng(samples)
    for _ in range(runs):
        prompts = draw.integers(0, PROMPTS, PROMPTS)
        order = draw.permuted(np.tile(np.arange(32), (PROMPTS, 1)), axis=1)[:, : 2 * samples]
        picked = {m: np.take_along_axis(values[m][prompts], order, axis=1) for m in METRICS}
        picked["length"][:, samples:] *= 1 + shift
        yield {m: (side(m, v[:, :samples]), side(m, v[:, samples:])) for m, v in picked.items()}


def marks(runs, samples, shift=0.0):
    """Return the share of runs in which a table marks a difference."""
    alarms = 0
    for sides in sham_runs(runs, samples, shift):
        effects = [
            line.effect for both in sides.values() for line in changes({"a/b": both}).values()
        ]
        tested = adjust([each for each in effects if isinstance(each, Effect)])
        alarms += any(each.significant for each in tested)
    return alarms / runs


def gates(runs, samples, given, shift=0.0):
    """Return the gate's results, those of a run together."""
    for sides in sham_runs(runs, samples, shift):
        yield [gate_of(metric, *both, given, lines=len(METRICS)) for metric, both in sides.items()]


@pytest.mark.slow
@pytest.mark.parametrize("samples", [2, 4, 8])
def test_a_model_against_itself_is_marked_in_at_most_two_runs_in_a_hundred(samples):
    assert marks(1_000, samples) <= MOST


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"length": 5.0, "stops": 1.0}], ids=["default", "given"])
@pytest.mark.parametrize("samples", [2, 4, 8])
def test_the_gate_fails_at_most_two_in_a_hundred_runs_of_a_model_against_itself(samples, given):
    """With margins of its own 995 of 1,000 runs were inconclusive, and with given ones 26 failed,
    of two samples."""
    outcomes = [[gate.outcome for gate in run] for run in gates(1_000, samples, given)]
    assert sum("fail" in run for run in outcomes) / 1_000 <= MOST
    if not given:
        assert sum({*run} == {"pass"} for run in outcomes) / 1_000 >= 0.95 - 0.02


def test_longer_answers_are_found_and_none_where_nothing_changed():
    assert marks(10, 8) <= 0.1
    assert marks(10, 8, shift=0.2) == 1
    longer = [[gate.outcome for gate in run] for run in gates(10, 8, {"length": 5.0}, shift=0.2)]
    assert all(run[0] == "fail" for run in longer)
