"""From hidden states to log-probabilities, only for the rows that are scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch.nn import functional

LOG_PROBABILITY_BYTES = 256 * 1024**2  # the most that logits and log-probabilities take


@dataclass(frozen=True, slots=True)
class Scored:
    """What rows of log-probabilities score: one entry a scored token, int64 arrays [M].

    ``row`` is the place among the rows handed over with it (a row may serve several requests),
    ``request`` the request's number within the call of the language model, ``place`` the
    token's place among that request's scored tokens, ``token`` its id.
    """

    row: np.ndarray
    request: np.ndarray
    place: np.ndarray
    token: np.ndarray

    def between(self, first: int, last: int) -> Scored:
        """The entries whose row lies in [first, last), with rows counted from ``first``."""
        chosen = np.flatnonzero((self.row >= first) & (self.row < last))
        return Scored(
            self.row[chosen] - first, self.request[chosen], self.place[chosen], self.token[chosen]
        )


class Observer(Protocol):
    """Sees every scored row in the forward that scores it.

    ``begin`` comes before a call's rows, with its requests in order (lm-eval ``Instance``
    objects: ``task_name``, ``doc_id``, ``idx``) and how many tokens of each are scored;
    ``observe`` gets log-probabilities [R, vocabulary] on the model's device, which it may
    neither change nor keep; ``end`` comes when the call is scored. Rows come in no particular
    order. Each (request, place) comes at least once: again where a batch ran out of memory
    and was repeated, so that what is kept must be kept by place.
    """

    def begin(self, instances: Sequence[object], lengths: Sequence[int]) -> None: ...

    def observe(self, scored: Scored, log_probabilities: torch.Tensor) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RowScores:
    """Still on the device, one value a scored token: its log-probability in nats and whether
    it was the likeliest token."""

    log_probability: torch.Tensor
    likeliest: torch.Tensor


def rows_at_once(vocabulary: int, budget_bytes: int = LOG_PROBABILITY_BYTES) -> int:
    """Rows whose logits and log-probabilities (4 bytes each, one copy) fit the budget."""
    return max(16, budget_bytes // (12 * vocabulary))


def score_rows(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    scored: Scored,
    *,
    read: np.ndarray | None = None,
    softmax_dtype: torch.dtype | None,
    at_once: int,
    multiple: int = 1,
    observe: Callable[[Scored, torch.Tensor], None] | None = None,
) -> RowScores:
    """LM head and log-softmax of ``hidden`` [R, H], ``at_once`` rows at a time.

    ``read`` [M], where given, are the rows to read log-probabilities from in place of
    ``scored.row``. Rows are filled up to a ``multiple``. ``softmax_dtype`` None means the
    logits' own dtype.
    """
    read = scored.row if read is None else read
    order = np.argsort(read, kind="stable")
    rows = read[order]
    indices = to_device(
        np.stack((rows, scored.token[order], np.argsort(order), scored.row, scored.token)),
        hidden.device,
    )
    count = hidden.shape[0]
    hidden = functional.pad(hidden, (0, 0, 0, -count % multiple))
    at_once += -at_once % multiple
    picked, tops = [], []
    for first in range(0, count, at_once):
        last = min(first + at_once, hidden.shape[0])
        log_probabilities = functional.log_softmax(
            head(hidden[first:last]), dim=-1, dtype=softmax_dtype
        )
        low, high = np.searchsorted(rows, (first, last))
        picked.append(log_probabilities[indices[0, low:high] - first, indices[1, low:high]])
        tops.append(log_probabilities.argmax(dim=-1))
        if observe is not None:
            observe(scored.between(first, last), log_probabilities)
    return RowScores(torch.cat(picked)[indices[2]], torch.cat(tops)[indices[3]] == indices[4])


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy that does not wait for the work already queued on the device."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
