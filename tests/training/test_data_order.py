"""Which sequences a step takes: all of them once an epoch, by the seed alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qbench.training.data import Sequences, dataloader, sample_indices
from qbench.training.model import learning_rate
from qbench.training.training_recipe import Schedule, TrainingRecipe

TOKENS = np.arange(1000, dtype=np.uint16)


def test_rows_follow_one_another_without_a_gap():
    rows = Sequences(tokens=TOKENS, context=10, bos=None)
    assert len(rows) == 99
    assert rows.rows([0, 98]).tolist() == [list(range(11)), list(range(980, 991))]


def test_with_bos_first_every_row_begins_with_it():
    rows = Sequences(tokens=TOKENS, context=10, bos=7)
    assert len(rows) == 100
    assert rows.rows([99]).tolist() == [[7, *range(990, 1000)]]


def test_an_epoch_takes_every_sequence_once_in_an_order_of_its_own():
    taken = np.concatenate([sample_indices(step, rows=5, of=23, seed=1) for step in range(23)])
    epochs = [taken[start : start + 23] for start in range(0, 115, 23)]
    assert all(sorted(epoch) == list(range(23)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5


def test_any_step_is_had_without_those_before_it_by_the_seed_alone():
    steps = [sample_indices(step, rows=4, of=11, seed=3).tolist() for step in range(12)]
    for step in (11, 0, 7):
        assert sample_indices(step, rows=4, of=11, seed=3).tolist() == steps[step]
        assert sample_indices(step, rows=4, of=11, seed=4).tolist() != steps[step]


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("sequences", [1, 2])
def test_a_step_has_the_same_rows_however_they_are_shared(processes, sequences):
    source = Sequences(tokens=TOKENS, context=8, bos=None)
    recipe = TrainingRecipe.model_validate({
        "name": "order", "normalizers": ["softmax"], "data": {"tokens": "none"},
        "model": {"hidden": 8, "layers": 1, "heads": 1, "vocabulary": 8, "context": 8},
        "tokens": 5 * 64, "batch": {"tokens": 64, "sequences": sequences},
        "optimizer": {"learning_rate": 1.0}, "schedule": {"warmup_steps": 0},
        "watch": {"length": 8},
    })  # fmt: skip
    found, passes = [], 8 // (sequences * processes)
    for index in range(processes):
        one = SimpleNamespace(
            device=torch.device("cpu"), process_index=index, num_processes=processes
        )
        made = list(dataloader(source, recipe, one, first=3, seed=2))
        assert len(made) == 2 * passes
        found += [row.tolist() for batch in made[:passes] for row in batch]
    expected = source.rows(sample_indices(3, rows=8, of=len(source), seed=2)).tolist()
    assert sorted(found) == sorted(expected)


def test_the_learning_rate_warms_up_and_falls_to_the_floor():
    schedule = Schedule(warmup_steps=10, floor=0.1)
    rates = [learning_rate(step, 110, schedule) for step in range(111)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1
    assert rates[60] == pytest.approx(0.55)
    assert rates[110] == pytest.approx(0.1)
    assert learning_rate(50, 110, Schedule(warmup_steps=10, decay="none")) == 1
