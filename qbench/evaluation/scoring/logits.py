"""Turn hidden states into log-likelihoods of requests, only for the rows that are scored.

A matrix product adds up in an order that depends on its number of rows and on a row's index in it:
CPU libraries give a thread's last few rows to another kernel. Which sizes that concerns differs by
processor: 1–3 rows on one AMD EPYC, up to 15 on an Intel Xeon, and there any row of a 32,000-wide
head with two threads. So trials on the LM head itself find the rows that it must take to round as
HFLM's whole product does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from qbench.evaluation.scoring.batching import Batch, Scored

WHOLE_BYTES = 2**30  # the most that a batch's whole logits may take; beyond, rows are taken out
SIZES = (65, 71, 100, 131, 160, 193)  # rows of products whose first rows are compared
PARTS = ((1, 1), (3, 2), (17, 1), (45, 3), (101, 1))  # first row, multiples of ``multiple``


@dataclass(frozen=True, slots=True)
class MatmulRounding:
    """How the LM head's product rounds, as ``probe_matmul`` measured it. Rows may be taken out of
    batches of more than ``rows`` rows, filled up to a ``multiple``; never if ``stable`` is False.
    """

    rows: int
    multiple: int
    stable: bool

    def projection(self, total: int, chosen: Tensor, row_bytes: int) -> Projection:
        """Return how the rows ``chosen`` [R] of a batch of ``total`` rows go through the head:
        alone, padded, or as part of the whole. ``row_bytes``: size of one row of logits."""
        few = 0 < total <= self.rows
        if (few or not self.stable) and total * row_bytes <= WHOLE_BYTES:
            return Projection(total=total, chosen=chosen)
        return Projection(multiple=self.multiple)


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """How rows [R, H] go through an LM head: filled up to a ``multiple``, or, if ``chosen`` [R] is
    given, at these indexes of a product of ``total`` rows.
    """

    multiple: int = 1
    total: int = 0
    chosen: Tensor | None = None

    def of(self, head: Callable[[Tensor], Tensor], rows: Tensor) -> Callable[[int, int], Tensor]:
        """Return a function (first, last) that gives the logits [last − first, vocabulary] of these
        of the ``rows`` [R, H], by ``head``. The product's shape depends only on the part, so that
        two heads round alike."""
        if self.chosen is not None:
            inputs = rows.new_zeros(self.total, rows.shape[1]).index_copy_(0, self.chosen, rows)
            logits = head(inputs)[self.chosen]
            return lambda first, last: logits[first:last]
        missing = -len(rows) % self.multiple
        filled = functional.pad(rows, (0, 0, 0, missing)) if missing else rows

        def part(first: int, last: int) -> Tensor:
            end = last + (first - last) % self.multiple
            return head(filled[first:end])[: last - first]

        return part


def probe_matmul(head: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> MatmulRounding:
    """Measure how many rows the head's product in ``dtype`` needs to round as a full product does:
    compare parts of a product of 200 or more random rows with the same rows of the whole. On a GPU
    nothing is measured: rows are taken out freely."""
    if device.type != "cpu":  # no claim to the bit there
        return MatmulRounding(rows=0, multiple=1, stable=True)
    width = getattr(head, "in_features", None) or head.weight.shape[-1]
    threads = torch.get_num_threads()
    multiple = 16 * threads
    generator = torch.Generator().manual_seed(0)
    longest = max(200, PARTS[-1][0] + max(n for _, n in PARTS) * multiple)
    x = torch.randn(longest, width, generator=generator).to(dtype)
    with torch.no_grad():
        product = head(x)
        stable = all(torch.equal(head(x[:n]), product[:n]) for n in SIZES) and all(
            torch.equal(head(x[i : i + n * multiple]), product[i : i + n * multiple])
            for i, n in PARTS
        )
    return MatmulRounding(rows=max(64, 4 * threads**2), multiple=multiple, stable=stable)


LOG_PROBABILITY_BYTES = 256 * 1024**2  # the most that logits and log-probabilities take


@dataclass(frozen=True, slots=True)
class LogitsPart:
    """Rows ``first`` to ``last`` of a batch: ``logits`` and ``log_probabilities`` [last − first,
    vocabulary] on the model's device, to be neither changed nor kept.
    """

    first: int
    last: int
    logits: Tensor
    log_probabilities: Tensor


class Observer(Protocol):
    """An object that sees every scored row in the forward pass that scores it.

    Rows come in no particular order. Each index comes at least once. It comes again where a batch
    ran out of memory and was repeated, so keep results by index.
    """

    def begin(self, instances: Sequence[object], lengths: Sequence[int], head: Any) -> None:
        """Begin a call, before its rows. ``instances`` are its requests in order (lm-eval's
        ``Instance``: ``task_name``, ``doc_id``, ``idx``), ``lengths`` how many tokens of each are
        scored, ``head`` the LM head (``hidden_states.LMHead``)."""

    def batch(
        self, scored: Scored, hidden: Tensor, projection: Projection
    ) -> Callable[[LogitsPart], None] | None:
        """Take one forward's rows, and return a function that is called with each part of their
        logits, or None. ``hidden`` [R, H] are the LM head's input rows, still being computed where
        the device is asynchronous. ``projection`` says how they go through it."""

    def end(self) -> None:
        """End a call, after all of its rows."""


@dataclass(frozen=True, slots=True)
class RowScores:
    """One value per scored token, on the device: its log-probability in nats and whether it was the
    likeliest token.
    """

    log_probability: Tensor
    likeliest: Tensor


def score_rows(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    scored: Scored,
    projection: Projection,
    *,
    softmax_dtype: torch.dtype | None,
    at_once: int,
    observer: Observer | None,
) -> RowScores:
    """Apply LM head and log-softmax to ``hidden`` [R, H], ``at_once`` rows at a time (rounded up to
    ``projection.multiple``). Return the log-probability of each token ``scored`` and whether it was
    the likeliest, in their order. ``softmax_dtype`` None: the logits' own dtype. ``observer``, if
    given, sees every part."""
    watch = None if observer is None else observer.batch(scored, hidden, projection)
    order = np.argsort(scored.row, kind="stable")
    rows = scored.row[order]
    indices = to_device(
        np.stack((rows, scored.token[order], np.argsort(order), scored.row, scored.token)),
        hidden.device,
    )
    count, logits_of = len(hidden), projection.of(head, hidden)
    picked, tops = [], []
    at_once += -at_once % projection.multiple
    for first in range(0, count, at_once):
        last = min(first + at_once, count)
        logits = logits_of(first, last)
        log_probabilities = functional.log_softmax(logits, dim=-1, dtype=softmax_dtype)
        low, high = np.searchsorted(rows, (first, last))
        picked.append(log_probabilities[indices[0, low:high] - first, indices[1, low:high]])
        tops.append(log_probabilities.argmax(dim=-1))
        if watch is not None:
            watch(LogitsPart(first, last, logits, log_probabilities))
    return RowScores(torch.cat(picked)[indices[2]], torch.cat(tops)[indices[3]] == indices[4])


def to_device(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return a copy on ``device`` without waiting for work already queued there; on a CPU the
    memory may be shared with ``array``."""
    tensor = torch.as_tensor(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


LogLikelihood = tuple[float, bool]  # in nats, and whether every token was the likeliest


def in_order(
    results: Sequence[tuple[Batch, RowScores]], count: int, *, exact: bool
) -> list[LogLikelihood]:
    """Return the log-likelihood of each of the ``count`` requests, in input order, from
    ``results``, batches in any order, after one copy to host memory. ``exact``: summed by torch in
    the dtype of the log-probabilities, which is HFLM's rounding; else in float64."""
    values = torch.cat([scores.log_probability for _, scores in results]).cpu()
    likeliest = torch.cat([scores.likeliest for _, scores in results]).cpu().numpy()
    requests = np.concatenate([batch.request_indices for batch, _ in results])
    counts = np.concatenate([batch.counts for batch, _ in results])
    firsts = np.cumsum(counts) - counts
    greedy = np.logical_and.reduceat(likeliest, firsts)
    if exact:
        ends = (firsts + counts).tolist()
        sums = [float(values[a:b].sum()) for a, b in zip(firsts.tolist(), ends, strict=True)]
    else:
        sums = np.add.reduceat(values.double().numpy(), firsts).tolist()
    answers: list[LogLikelihood | None] = [None] * count
    for i, log_likelihood, all_likeliest in zip(
        requests.tolist(), sums, greedy.tolist(), strict=True
    ):
        answers[i] = (log_likelihood, all_likeliest)
    assert all(answer is not None for answer in answers)
    return answers  # type: ignore[return-value]  # none is left out by now
