"""Runs of one model against itself, by answers that SmolLM2 drew: how often a difference is marked.

answer_samples.csv has the lengths of 32 answers to each of 200 prompts (the questions of
ARC-easy, at temperature 0.7, at most 96 tokens), and whether they stopped by themselves.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qbench.metrics import LOG_MEAN
from qbench.statistics import Column, Panel, adjust, drawing_error, effect
from qbench.statistics.effect import Effect

SAMPLES = Path(__file__).with_name("answer_samples.csv")
METRICS = {"length": LOG_MEAN, "stops": "mean"}
MOST = 0.02


def sham_alarms(runs: int, samples: int, shift: float = 0.0) -> float:
    """Return the share of runs with a mark: 200 prompts drawn with replacement, ``samples`` answers
    to each on both sides; the other side's answers are longer by the factor 1 + ``shift``."""
    drawn = pd.read_csv(SAMPLES).set_index(["prompt", "sample"])
    values = {name: drawn[name].unstack().to_numpy(float) for name in METRICS}
    draw, alarms = np.random.default_rng(samples), 0
    for _ in range(runs):
        prompts = draw.integers(0, 200, 200)
        order = draw.permuted(np.tile(np.arange(32), (200, 1)), axis=1)[:, : 2 * samples]
        effects = []
        for name, aggregation in METRICS.items():
            picked = np.take_along_axis(values[name][prompts], order, axis=1)
            sides = picked[:, :samples], picked[:, samples:] * (1 + shift * (name == "length"))
            columns = [Column.of(np.arange(200), side.mean(1), np.ones(200)) for side in sides]
            found = effect(Panel.of(dict(enumerate(columns))), {1: 1, 0: -1}, aggregation)
            spread = [
                Column.of(np.arange(200), side.var(1, ddof=1) / samples, np.ones(200))
                if samples > 1 else None
                for side in sides
            ]  # fmt: skip
            if isinstance(found, Effect):
                error = drawing_error(columns, spread, aggregation)
                effects.append(dataclasses.replace(found, drawn=error))
        alarms += any(one.significant for one in adjust(effects))
    return alarms / runs


@pytest.mark.slow
@pytest.mark.parametrize("samples", [2, 4, 8])
def test_a_model_against_itself_is_marked_in_at_most_two_runs_in_a_hundred(samples):
    assert sham_alarms(1_000, samples) <= MOST


def test_longer_answers_are_found_and_none_where_nothing_changed():
    assert sham_alarms(10, 8) <= 0.1
    assert sham_alarms(10, 8, shift=0.2) == 1
