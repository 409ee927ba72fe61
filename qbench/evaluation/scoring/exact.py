"""HFLM's scores to the bit, without what does not change them.

The order, padding, grouping and batch size are HFLM's, since scores depend on them. Left out:
the LM head and log-softmax of rows that nobody scores, the KV cache, a [B, L, V] tensor, one
tokenizer call a request, and two waits for the device a request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from qbench.errors import EvaluationError
from qbench.evaluation.scoring.backend import Answer, Backend
from qbench.evaluation.scoring.memory import free_cached_memory, is_out_of_memory
from qbench.evaluation.scoring.requests import Group, Request, batches, group, shuffled
from qbench.evaluation.scoring.rows import RowScores, Scored, score_rows, to_device


class ExactLM(Backend):
    """An lm-eval language model with HFLM's scores; ``report()`` says how it ran."""

    _misread = True  # requests whose log-probability HFLM reads from the wrong rows

    def _score(self, requests: Sequence[Request]) -> list[Answer]:
        return self._score_batches(requests, self.settings.batch_size)

    def _score_windows(self, windows: Sequence[Request]) -> list[Answer]:
        """HFLM takes rolling windows in batches of input order and sorts each by itself."""
        size = self.settings.window_batch_size
        answers: list[Answer] = []
        for first in range(0, len(windows), size):
            answers += self._score_batches(windows[first : first + size], size)
        return answers

    def _score_batches(self, requests: Sequence[Request], size: int) -> list[Answer]:
        results: list[tuple[Sequence[Group], RowScores]] = []
        groups = shuffled(group(requests), self.settings.shuffle)
        for batch in batches(groups, size):
            length = max(len(g.longest.inputs(self.max_length)) for g in batch)
            results += self._run(batch, requests, length)
            self._advance(sum(len(g.members) for g in batch))
        return _collect(results, requests)

    def _run(
        self, batch: Sequence[Group], requests: Sequence[Request], length: int
    ) -> list[tuple[Sequence[Group], RowScores]]:
        """Scores on the device. A batch that does not fit is halved, its padding kept."""
        try:
            result = self._forward(batch, requests, length)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(batch) == 1:
                raise EvaluationError(
                    f"out of memory on one sequence of {length} tokens; "
                    "lower evaluation.max_length or use a larger device"
                ) from error
        else:
            self._counts["batches"] += 1
            self._counts["tokens"] += len(batch) * length
            return [(batch, result)]
        # Outside the handler: there the traceback would keep the failed forward's tensors.
        free_cached_memory(self.device)
        self._counts["halvings"] += 1
        half = (len(batch) + 1) // 2
        return self._run(batch[:half], requests, length) + self._run(batch[half:], requests, length)

    def _forward(
        self, batch: Sequence[Group], requests: Sequence[Request], length: int
    ) -> RowScores:
        ids = np.zeros((len(batch), length), dtype=np.int64)  # HFLM pads with id 0 on the right
        firsts = np.empty(len(batch), dtype=np.int64)
        for i, g in enumerate(batch):
            inputs = g.longest.inputs(self.max_length)
            ids[i, : len(inputs)] = inputs
            firsts[i] = i * length + len(inputs) - g.longest.scored
        counts = np.array([g.longest.scored for g in batch])
        chosen = np.concatenate(
            [np.arange(first, first + n) for n, first in zip(counts, firsts, strict=True)]
        )
        scored, read = _entries(batch, requests, np.cumsum(counts) - counts)
        with torch.no_grad():
            hidden = self._decoder(to_device(ids, self.device), use_cache=False)[0].flatten(0, 1)
            whole = self._product.whole(ids.size, self._vocabulary * hidden.element_size())
            rows = (self._head(hidden) if whole else hidden)[to_device(chosen, self.device)]
            return score_rows(
                torch.nn.Identity() if whole else self._head,
                rows,
                scored,
                read=read if self._misread else None,
                softmax_dtype=self.softmax_dtype,
                at_once=self._rows_at_once,
                multiple=1 if whole else self._product.multiple,
                observe=self._observe,
            )


def _entries(
    batch: Sequence[Group], requests: Sequence[Request], firsts: np.ndarray
) -> tuple[Scored, np.ndarray]:
    """One entry a scored token, and the row [M] that HFLM reads its log-probability from.

    ``firsts`` holds the row of each group's first scored token. Where requests with one input
    split it differently, the shorter continuation belongs to the last rows of the longer;
    lm-eval 0.4.13 reads its log-probability from the first rows (and its greediness from the
    last). ``Scored.row`` is the right row, the second result HFLM's.
    """
    right, read, owner, place, token = [], [], [], [], []
    for g, first in zip(batch, firsts, strict=True):
        for i in g.members:
            request = requests[i]
            steps = np.arange(request.scored)
            right.append(first + g.longest.scored - request.scored + steps)
            read.append(first + steps)
            owner.append(np.full(request.scored, request.owner))
            place.append(request.place + steps)
            token.append(np.asarray(request.tokens[request.context :]))
    scored = Scored(*(np.concatenate(part) for part in (right, owner, place, token)))
    return scored, np.concatenate(read)


def _collect(
    results: Sequence[tuple[Sequence[Group], RowScores]], requests: Sequence[Request]
) -> list[Answer]:
    """To host memory in one copy, and back into input order."""
    if not results:
        return []
    values = torch.cat([scores.log_probability for _, scores in results]).cpu()
    likeliest = torch.cat([scores.likeliest for _, scores in results]).cpu().numpy()
    answers: list[Answer | None] = [None] * len(requests)
    first = 0
    for batch, _ in results:
        for i in (i for g in batch for i in g.members):
            last = first + requests[i].scored
            # torch's own sum, in the dtype of the log-probabilities: HFLM's rounding.
            answers[i] = (float(values[first:last].sum()), bool(likeliest[first:last].all()))
            first = last
    assert all(answer is not None for answer in answers)
    return answers  # type: ignore[return-value]
