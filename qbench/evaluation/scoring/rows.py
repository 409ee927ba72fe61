"""From hidden states to log-probabilities, only for the rows that are scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from qbench.evaluation.scoring.head import Projection
from qbench.evaluation.scoring.requests import Scored

LOG_PROBABILITY_BYTES = 256 * 1024**2  # the most that logits and log-probabilities take


@dataclass(frozen=True, slots=True)
class Part:
    """Rows ``first`` to ``last`` of a batch's: ``logits`` and ``log_probabilities``
    [last − first, vocabulary] on the model's device, to be neither changed nor kept."""

    first: int
    last: int
    logits: Tensor
    log_probabilities: Tensor


class Observer(Protocol):
    """Sees every scored row in the forward that scores it.

    ``begin`` comes before a call's rows, with its requests in order (lm-eval ``Instance``
    objects: ``task_name``, ``doc_id``, ``idx``), how many tokens of each are scored, and the LM
    head; ``end`` comes when the call is scored.

    ``batch`` comes once a forward: ``hidden`` [R, H] are the LM head's input rows, still being
    computed where the device is asynchronous, ``projection`` how they go through it. What it
    returns is called with each part of their logits.

    Rows come in no particular order, on CPUs from several threads at once. Each (request, index)
    comes at least once: again where a batch ran out of memory and was repeated, so that what is
    kept must be kept by index.
    """

    def begin(
        self, instances: Sequence[object], lengths: Sequence[int], head: torch.nn.Module
    ) -> None: ...

    def batch(
        self, scored: Scored, hidden: Tensor, projection: Projection
    ) -> Callable[[Part], None] | None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RowScores:
    """Still on the device, one value a scored token: its log-probability in nats and whether
    it was the likeliest token."""

    log_probability: Tensor
    likeliest: Tensor


def rows_at_once(vocabulary: int, budget_bytes: int = LOG_PROBABILITY_BYTES) -> int:
    """Rows whose logits and log-probabilities (4 bytes each, one copy) fit the budget."""
    return max(16, budget_bytes // (12 * vocabulary))


def score_rows(
    head: torch.nn.Module,
    hidden: Tensor,
    scored: Scored,
    projection: Projection,
    *,
    read: np.ndarray | None,
    softmax_dtype: torch.dtype | None,
    at_once: int,
    observer: Observer | None,
) -> RowScores:
    """LM head and log-softmax of ``hidden`` [R, H], ``at_once`` rows at a time.

    ``read`` [M], where given, are the rows to read log-probabilities from in place of
    ``scored.row``. ``softmax_dtype`` None means the logits' own dtype.
    """
    watch = None if observer is None else observer.batch(scored, hidden, projection)
    read = scored.row if read is None else read
    order = np.argsort(read, kind="stable")
    rows = read[order]
    indices = to_device(
        np.stack((rows, scored.token[order], np.argsort(order), scored.row, scored.token)),
        hidden.device,
    )
    count, logits_of = len(hidden), projection.of(head, hidden)
    picked, tops = [], []
    for first, last in projection.parts(count, at_once):
        logits = logits_of(first, last)
        log_probabilities = functional.log_softmax(logits, dim=-1, dtype=softmax_dtype)
        low, high = np.searchsorted(rows, (first, last))
        picked.append(log_probabilities[indices[0, low:high] - first, indices[1, low:high]])
        tops.append(log_probabilities.argmax(dim=-1))
        if watch is not None:
            watch(Part(first, last, logits, log_probabilities))
    return RowScores(torch.cat(picked)[indices[2]], torch.cat(tops)[indices[3]] == indices[4])


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy that does not wait for the work already queued on the device."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
