"""Next-token distributions of a quantized model against those of the unquantized one, exactly.

Beside each part of the quantized model's logits, the unquantized model's are computed from its
kept rows by its own LM head, in a product of the same shape, so that both round alike: a model
against itself gives 0. The Kullback-Leibler divergence is over the whole vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from qbench.errors import EvaluationError
from qbench.evaluation.scoring.base_rows import BaseRows, Call, TaskRows
from qbench.evaluation.scoring.logits import Part, Projection, to_device
from qbench.evaluation.scoring.requests import Scored


@dataclass(frozen=True, slots=True)
class Measured:
    """One task's tokens [N]: ``kl`` in nats, ``agrees`` on the likeliest token, ``change`` of the
    target's log-probability in nats; ``document`` that the token belongs to."""

    kl: np.ndarray
    agrees: np.ndarray
    change: np.ndarray
    document: np.ndarray


@dataclass(frozen=True, slots=True)
class _Results:
    """The call at work; ``origin`` [N] are the indexes of its tokens in ``task``."""

    call: Call
    task: TaskRows
    origin: np.ndarray
    kl: Tensor
    agrees: Tensor
    change: Tensor


class Meter:
    """An observer that measures a quantized model's distributions against ``base``, which may
    get further tasks between two of them; None: nothing is measured."""

    def __init__(self, base: BaseRows | None) -> None:
        self.base = base
        self._weight: Tensor | None = None  # on the model's device, once it is known
        self._bias: Tensor | None = None
        self._results: _Results | None = None
        self.measured: dict[str, Measured] = {}

    def begin(
        self, instances: Sequence[Any], lengths: Sequence[int], head: torch.nn.Module
    ) -> None:
        self._results = None
        call = Call.of(instances, lengths)
        if call is None or self.base is None:
            return
        task = self.base.tasks.get(call.task)
        if task is None:
            raise EvaluationError(
                f"{call.task}: the unquantized cell kept no rows of it; run that again"
            )
        device = next(itertools.chain(head.parameters(), head.buffers())).device
        if self._weight is None:
            # Copied even on a CPU: a product may round by where in memory its weight begins.
            self._weight = self.base.weight.to(device, copy=True)
            self._bias = None if self.base.bias is None else self.base.bias.to(device, copy=True)
        self._results = _Results(
            call,
            task,
            _origin(call, task),
            kl=torch.full((call.tokens,), torch.nan, device=device),
            agrees=torch.zeros(call.tokens, dtype=torch.bool, device=device),
            change=torch.full((call.tokens,), torch.nan, device=device),
        )

    def batch(
        self, scored: Scored, hidden: Tensor, projection: Projection
    ) -> Callable[[Part], None] | None:
        results = self._results
        if results is None:
            return None
        indexes = results.call.indexes(scored)
        origin = results.origin[indexes]
        if not np.array_equal(results.task.token.numpy()[origin], scored.token):
            raise EvaluationError(
                f"{results.call.task}: the unquantized cell scored other tokens; run that again"
            )
        order = np.argsort(scored.row, kind="stable")
        rows = scored.row[order]
        _, firsts = np.unique(rows, return_index=True)  # one token of each row: all have its input
        assert len(firsts) == len(hidden)
        before = self._rows(results.task, origin[order][firsts], hidden.device)
        logits_of = projection.of(self._head, before)
        entries = to_device(np.stack((rows, indexes[order], scored.token[order])), hidden.device)

        def measure(part: Part) -> None:
            low, high = np.searchsorted(rows, (part.first, part.last))
            row, index, token = entries[:, low:high]
            unquantized = logits_of(part.first, part.last)
            _compare(results, unquantized, part, row - part.first, index, token)

        return measure

    def end(self) -> None:
        results = self._results
        if results is None:
            return
        kl = results.kl.cpu().numpy()
        if not np.isfinite(kl).all():
            raise EvaluationError(
                f"{results.call.task}: the divergence of {int((~np.isfinite(kl)).sum())} of "
                f"{len(kl)} tokens is not a number; the model gives NaN or infinite logits there"
            )
        self.measured[results.call.task] = Measured(
            kl=kl,
            agrees=results.agrees.cpu().numpy(),
            change=results.change.cpu().numpy(),
            document=np.repeat(results.call.document, results.call.length),
        )
        self._results = None

    def _head(self, rows: Tensor) -> Tensor:
        assert self._weight is not None
        return functional.linear(rows, self._weight, self._bias)

    def _rows(self, task: TaskRows, origin: np.ndarray, device: torch.device) -> Tensor:
        """Kept rows [R, H], copied beside the device's work."""
        index = torch.from_numpy(origin)
        if device.type != "cuda":
            return task.rows[index]
        shape = (len(index), task.rows.shape[1])
        rows = torch.empty(shape, dtype=task.rows.dtype, pin_memory=True)
        torch.index_select(task.rows, 0, index, out=rows)
        return rows.to(device, non_blocking=True)


def _compare(
    results: _Results, before: Tensor, part: Part, row: Tensor, index: Tensor, token: Tensor
) -> None:
    """Writes what the rows of ``part`` give. ``before`` [R, V]: the unquantized logits; ``row``,
    ``index``, ``token`` [M]: scored tokens by row of the part, index in the results, and id."""
    after = part.log_probabilities
    if after.dtype != torch.float32:
        after = functional.log_softmax(part.logits, dim=-1, dtype=torch.float32)
    log_p = functional.log_softmax(before, dim=-1, dtype=torch.float32)
    difference = log_p - after
    results.change[index] = -difference[row, token]
    # Σ p ln(p/q); rounding alone can bring it below 0.
    kl = log_p.exp_().mul_(difference).sum(dim=-1).clamp_(min=0.0)
    results.kl[index] = kl[row]
    results.agrees[index] = (before.argmax(dim=-1) == part.logits.argmax(dim=-1))[row]


def _origin(call: Call, task: TaskRows) -> np.ndarray:
    """Indexes [N] of the call's tokens in the base, which may hold requests in another order.
    Raises EvaluationError where a request is not there or has another length."""
    length = task.length.numpy()
    known = {
        (document, request): (start, count)
        for document, request, start, count in zip(
            task.document.tolist(),
            task.request.tolist(),
            (np.cumsum(length) - length).tolist(),
            length.tolist(),
            strict=True,
        )
    }
    starts = []
    for document, request, count in zip(
        call.document.tolist(), call.request.tolist(), call.length.tolist(), strict=True
    ):
        start, there = known.get((document, request), (0, 0))
        if there != count:
            raise EvaluationError(
                f"{call.task}: document {document}, request {request} has {count} scored tokens, "
                f"in the unquantized cell {there}; run that again"
            )
        starts.append(start)
    shift = np.repeat(np.asarray(starts, dtype=np.int64) - call.starts, call.length)
    return shift + np.arange(call.tokens)
