"""Scores within a stated tolerance, from packs of shared contexts without padding.

The difference from exact scoring is measured on a sample of each call's documents and is part
of the report. It is judged in nats per scored token: a rolling window's log-likelihood is a sum
over thousands of them, so that its own difference says nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from qbench.errors import EvaluationError
from qbench.evaluation.scoring.backend import Answer
from qbench.evaluation.scoring.check import Check
from qbench.evaluation.scoring.exact import ExactLM
from qbench.evaluation.scoring.memory import free_cached_memory, is_out_of_memory
from qbench.evaluation.scoring.packed_attention import (
    Layout,
    check_model,
    lay_blocks,
    lay_segments,
    packed,
    takes_segments,
)
from qbench.evaluation.scoring.packing import Pack, Tree, halve, lay, pack
from qbench.evaluation.scoring.requests import Request
from qbench.evaluation.scoring.rows import RowScores, Scored, score_rows, to_device
from qbench.evaluation.scoring.side_by_side import packs_at_once, side_by_side
from qbench.record import ScoringReport

WINDOWS = 2  # rolling windows of the sample; one has up to max_length scored tokens


class FastLM(ExactLM):
    """An lm-eval language model with shared contexts and packed batches."""

    _misread = False  # the sample is compared with what is right

    def __init__(self, model: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        check_model(model)
        super().__init__(model, *arguments, **options)
        self._check = Check(self.settings.tolerance)
        self._fused = False
        self._lock = threading.Lock()  # of what packs side by side change
        self._stopped = threading.Event()  # they are to end

    def report(self) -> ScoringReport:
        return (
            super()
            .report()
            .model_copy(
                update={"fused_steps": self._fused, "difference_from_exact": self._check.report()}
            )
        )

    def _score(self, requests: Sequence[Request]) -> list[Answer]:
        answers = self._score_packs(requests)
        chosen = self._check.draw(
            [self._document(r.owner) for r in requests], self.settings.sample, self.settings.seed
        )
        with self._aside():
            exact = self._score_batches([requests[i] for i in chosen], self.settings.batch_size)
        self._compare(requests, answers, chosen, exact)
        return answers

    def _score_windows(self, windows: Sequence[Request]) -> list[Answer]:
        answers = self._score_packs(windows)
        # Of few windows just one: each costs as much to score exactly as it does fast.
        count = min(WINDOWS, self.settings.sample, max(1, len(windows) // 20))
        chosen = self._check.draw(list(range(len(windows))), count, self.settings.seed)
        with self._aside():
            exact = self._score_batches([windows[i] for i in chosen], 1)
        self._compare(windows, answers, chosen, exact)
        return answers

    def _compare(
        self,
        requests: Sequence[Request],
        answers: Sequence[Answer],
        chosen: Sequence[int],
        exact: Sequence[Answer],
    ) -> None:
        self._check.add(
            documents=[self._document(requests[i].owner) for i in chosen],
            tokens=[requests[i].scored for i in chosen],
            fast=[answers[i] for i in chosen],
            exact=exact,
        )

    @contextlib.contextmanager
    def _aside(self) -> Iterator[None]:
        """The sample's exact forwards are seen by no observer and counted nowhere."""
        kept = self._observer, self._progress, self._counts
        self._observer, self._progress, self._counts = None, None, dict(self._counts)
        try:
            yield
        finally:
            self._observer, self._progress, self._counts = kept

    def _score_packs(self, requests: Sequence[Request]) -> list[Answer]:
        if not requests:
            return []
        results: list[tuple[Pack, RowScores]] = []
        self._stopped = threading.Event()
        with (
            packed(self.model) as attention,
            self._small_steps() as self._fused,
            side_by_side(self.device, self._stopped) as each,
        ):
            assert self.settings.batch_tokens is not None
            packs = pack(
                requests,
                batch_tokens=self.settings.batch_tokens,
                max_length=self.max_length,
                shuffle=self.settings.shuffle,
            )
            scores = each(lambda trees: self._run_pack(trees, requests, attention), packs)
            for trees, found in zip(packs, scores, strict=True):
                results += found
                self._advance(sum(len(tree.members) for tree in trees))
        return _collect_packs(results, len(requests))

    @property
    def _observe(self) -> Callable[[Scored, torch.Tensor], None] | None:
        return None if self._observer is None else self._observe_alone

    def _observe_alone(self, scored: Scored, log_probabilities: torch.Tensor) -> None:
        assert self._observer is not None
        with self._lock:
            self._observer.observe(scored, log_probabilities)

    def _small_steps(self) -> contextlib.AbstractContextManager[bool]:
        """Kernels for what stands between a Llama's matrix products, on CUDA."""
        if self.device.type != "cuda":
            return contextlib.nullcontext(False)
        from qbench.evaluation.scoring.fused import fused  # needs Triton

        return fused(self.model)

    def _run_pack(
        self, trees: list[Tree], requests: Sequence[Request], attention: str
    ) -> list[tuple[Pack, RowScores]]:
        """Scores on the device; a pack that does not fit is halved."""
        row = lay(trees, requests)
        try:
            result = self._forward_pack(row, attention)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(trees) == 1:
                raise EvaluationError(
                    f"out of memory on one document of {trees[0].tokens} tokens; "
                    "lower evaluation.max_length or use a larger device"
                ) from error
        else:
            with self._lock:
                self._counts["batches"] += 1
                self._counts["tokens"] += len(row.ids)
            return [(row, result)]
        # Outside the handler: there the traceback would keep the failed forward's tensors.
        free_cached_memory(self.device)
        with self._lock:
            self._counts["halvings"] += 1
        return [
            scores for half in halve(trees) for scores in self._run_pack(half, requests, attention)
        ]

    def _forward_pack(self, row: Pack, attention: str) -> RowScores:
        if takes_segments(attention):
            layout: Layout = lay_segments(row, self.device)
        else:
            layout = lay_blocks(row, self.device, self._stopped)
        with torch.no_grad():
            hidden = self._decoder(
                to_device(row.ids[None], self.device),
                position_ids=to_device(row.positions[None], self.device),
                use_cache=False,
                qbench_layout=layout,
                qbench_attention=attention,
            )[0]
            return score_rows(
                self._head,
                hidden[0].index_select(0, to_device(row.rows, self.device)),
                row.scored,
                softmax_dtype=self.softmax_dtype,
                at_once=self._rows_at_once // packs_at_once(self.device),
                observe=self._observe,
            )


def _collect_packs(results: Sequence[tuple[Pack, RowScores]], count: int) -> list[Answer]:
    """To host memory in one copy, summed per request in float64, in input order."""
    values = torch.cat([scores.log_probability.float() for _, scores in results]).cpu().numpy()
    likeliest = torch.cat([scores.likeliest for _, scores in results]).cpu().numpy()
    members = np.concatenate([row.members for row, _ in results])
    counts = np.concatenate([row.counts for row, _ in results])
    firsts = np.cumsum(counts) - counts
    sums = np.add.reduceat(values.astype(np.float64), firsts)
    greedy = np.logical_and.reduceat(likeliest, firsts)
    answers: list[Answer | None] = [None] * count
    for i, total, all_likeliest in zip(
        members.tolist(), sums.tolist(), greedy.tolist(), strict=True
    ):
        answers[i] = (total, all_likeliest)
    assert all(answer is not None for answer in answers)
    return answers  # type: ignore[return-value]
