"""From log-probabilities of tokens to log-likelihoods of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from qbench.evaluation.scoring.requests import Batch
from qbench.evaluation.scoring.rows import RowScores

Answer = tuple[float, bool]  # log-likelihood in nats, and whether every token was the likeliest
# Sums of the runs of values that begin at ``firsts`` [K] and are ``counts`` [K] long.
Total = Callable[[Tensor, np.ndarray, np.ndarray], list[float]]


def in_order(results: Sequence[tuple[Batch, RowScores]], count: int, total: Total) -> list[Answer]:
    """To host memory in one copy, added up by request, and back into input order."""
    values = torch.cat([scores.log_probability for _, scores in results]).cpu()
    likeliest = torch.cat([scores.likeliest for _, scores in results]).cpu().numpy()
    members = np.concatenate([batch.members for batch, _ in results])
    counts = np.concatenate([batch.counts for batch, _ in results])
    firsts = np.cumsum(counts) - counts
    greedy = np.logical_and.reduceat(likeliest, firsts)
    answers: list[Answer | None] = [None] * count
    for i, log_likelihood, all_likeliest in zip(
        members.tolist(), total(values, firsts, counts), greedy.tolist(), strict=True
    ):
        answers[i] = (log_likelihood, all_likeliest)
    assert all(answer is not None for answer in answers)
    return answers  # type: ignore[return-value]


def as_hflm(values: Tensor, firsts: np.ndarray, counts: np.ndarray) -> list[float]:
    """torch's own sum, in the dtype of the log-probabilities: HFLM's rounding."""
    ends = (firsts + counts).tolist()
    return [float(values[a:b].sum()) for a, b in zip(firsts.tolist(), ends, strict=True)]


def in_float64(values: Tensor, firsts: np.ndarray, counts: np.ndarray) -> list[float]:
    return np.add.reduceat(values.double().numpy(), firsts).tolist()
