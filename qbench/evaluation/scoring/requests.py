"""What is to be scored, and what a batch of it is."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from qbench.errors import EvaluationError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids to score. ``tokens`` is context and continuation, ``context`` how many of them
    are context; ``owner`` the index of the lm-eval request that it belongs to, ``first`` the
    index of its first scored token in that request (not 0 in later rolling windows)."""

    tokens: list[int]
    context: int
    owner: int
    first: int = 0

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.context

    def inputs(self, max_length: int) -> list[int]:
        """What goes into the model: all but the last token, the oldest dropped if too many."""
        return self.tokens[-(max_length + 1) : -1]


@dataclass(frozen=True, slots=True)
class Scored:
    """What rows of log-probabilities score: one entry a scored token, int64 arrays [M].

    ``row`` is the index among the rows handed over with it (a row may serve several requests),
    ``request`` the request's index within the call of the language model, ``index`` the
    token's index among that request's scored tokens, ``token`` its id.
    """

    row: np.ndarray
    request: np.ndarray
    index: np.ndarray
    token: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One forward: token ``ids`` [B, L], and what its B · L hidden states score.

    ``rows`` [R] are the hidden states that go through the LM head, ``scored`` the M tokens that
    they score, its rows counted within ``rows``; ``read`` [M], where given, are the rows to read
    log-probabilities from in place of ``scored.row``. ``members`` [K] are indexes of requests,
    ``counts`` [K] how many entries of ``scored`` belong to each, in order.
    """

    ids: np.ndarray
    rows: np.ndarray
    scored: Scored
    members: np.ndarray
    counts: np.ndarray
    read: np.ndarray | None = None


class Planned(Protocol):
    """What will be a batch: laid out when its turn comes."""

    @property
    def requests(self) -> int:
        """How many it scores."""

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""

    def lay(self, requests: Sequence[Request]) -> Batch: ...

    def halves(self) -> tuple[Planned, Planned] | None:
        """For a device that it does not fit; None where it cannot be divided."""


class Batching(Protocol):
    """How requests become batches."""

    def plan(self, requests: Sequence[Request], *, windows: bool) -> Sequence[Planned]:
        """Batches in order; ``windows`` says that the requests are rolling windows."""


def shuffled(things: list[T], seed: int | None) -> list[T]:
    """In another order, or as they are where ``seed`` is None."""
    return things if seed is None else random.Random(seed).sample(things, len(things))


def check_tokens(prompts: Iterable[Sequence[int]], rows: int) -> None:
    """Raises EvaluationError for a token that has no row among the ``rows`` of the model's
    embedding: on a GPU that would end the process."""
    most = max((max(tokens, default=0) for tokens in prompts), default=0)
    if most >= rows:
        raise EvaluationError(
            f"its tokenizer gives token {most}, and the model embeds {rows}: the tokenizer is that "
            "of another model"
        )


def check_lengths(requests: Sequence[Request], max_length: int) -> None:
    """Raises EvaluationError where HFLM would stop at a bare assertion."""
    for request in requests:
        if request.scored > max_length:
            raise EvaluationError(
                f"a continuation of {request.scored} tokens does not fit into "
                f"evaluation.max_length {max_length}; raise max_length"
            )
