"""Packs side by side on a CPU's cores: the same bits, and an error ends the others."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from scoring_models import choices, llama, scorer

from qbench.attention.transformers import attend
from qbench.evaluation.scoring import side_by_side
from qbench.evaluation.scoring.forward import Stopped


def packed_scorer(**changes):
    model = llama()
    attend(model, normalizer="softpick")
    return scorer(model, "fast", sample=0, batch_tokens=100, **changes)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    assert threads_of_a_new_thread() == 2
    torch.set_num_threads(before)


def threads_of_a_new_thread():
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


class Rows:
    """An observer that keeps what it sees, by request and index."""

    def __init__(self):
        self.seen = {}

    def begin(self, instances, lengths, head):
        pass

    def end(self):
        pass

    def batch(self, scored, hidden, projection):
        def keep(part):
            for entry in zip(scored.row, scored.request, scored.index, strict=True):
                row, request, index = map(int, entry)
                if part.first <= row < part.last:
                    values = part.log_probabilities[row - part.first]
                    self.seen[request, index] = values.tolist(), hidden[row].tolist()

        return keep


class Planned:
    """Batching that keeps its plan; the forward in its way is ``instead``(batch, its index or
    None for a half of one, the real forward)."""

    def __init__(self, scorer, instead):
        self.batching, self.forward = scorer.way.batching, scorer.way.forward
        self.packs, self.instead = [], instead
        self.ready, self.fused_steps = self.forward.ready, False
        scorer.way = dataclasses.replace(scorer.way, batching=self, forward=self)

    def plan(self, requests, *, windows):
        self.packs = self.batching.plan(requests, windows=windows)
        return self.packs

    def __call__(self, batch):
        self.forward.stopped = self.stopped
        indexes = (i for i, pack in enumerate(self.packs) if pack.groups is batch.groups)
        return self.instead(batch, next(indexes, None), self.forward)


def test_packs_side_by_side_give_the_same_bits_as_one_by_one(two_threads, monkeypatch):
    """One by one means on one core: more cores add up a matrix product in another order."""
    found, threads = {}, set()

    def some_do_not_fit(batch, index, forward):
        threads.add(threading.get_ident())
        if index is not None and index > 2 and len(batch.groups) > 1:
            raise torch.OutOfMemoryError("out of memory")
        return forward(batch)

    for packs in (1, 2):
        monkeypatch.setattr(side_by_side, "PACKS", packs)
        torch.set_num_threads(packs)
        rows = Rows()
        fast = packed_scorer(observer=rows)
        Planned(fast, some_do_not_fit)
        answers = fast.loglikelihood(choices(23, seed=3), disable_tqdm=True)
        report = fast.report()
        assert report.batches > 8
        assert report.halvings > 0
        found[packs] = answers, rows.seen, report.halvings
    assert found[1] == found[2]
    assert len(threads) == 3  # ours, and two of the pool


def test_an_error_in_a_pack_ends_those_beside_it(two_threads):
    fast = packed_scorer()
    ended, begun = [], threading.Event()

    def second_fails(batch, index, forward):
        if index == 1:
            assert begun.wait(10)
            raise ValueError("the second")
        if index == 2:
            begun.set()
            assert forward.stopped.wait(10)
        try:
            return forward(batch)
        except Stopped:
            ended.append(index)
            raise

    Planned(fast, second_fails)
    with pytest.raises(ValueError, match="the second"):
        fast.loglikelihood(choices(23, seed=3), disable_tqdm=True)
    assert 2 in ended  # and the one that was begun in the place of the second, if any
