"""What is to be scored, and HFLM's way of grouping, ordering and batching it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from qbench.errors import EvaluationError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """Token ids to score. ``tokens`` is context and continuation, ``context`` how many of them
    are context; ``owner`` the number of the lm-eval request it belongs to, ``place`` where its
    first scored token stands in that request (not 0 in later rolling windows)."""

    tokens: list[int]
    context: int
    owner: int
    place: int = 0

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.context

    def inputs(self, max_length: int) -> list[int]:
        """What goes into the model: all but the last token, the oldest dropped if too many."""
        return self.tokens[-(max_length + 1) : -1]


@dataclass(frozen=True, slots=True)
class Group:
    """Requests with the same model input; ``longest`` scores the most tokens of it.
    ``members`` are places in the list that was grouped."""

    longest: Request
    members: list[int]


def group(requests: Sequence[Request]) -> list[Group]:
    """One group for each distinct input, longest first, as HFLM orders them."""
    members: dict[tuple[int, ...], list[int]] = {}
    for i, request in enumerate(requests):
        members.setdefault(tuple(request.tokens[:-1]), []).append(i)
    groups = [
        Group(max((requests[i] for i in places), key=lambda r: r.scored), places)
        for places in members.values()
    ]
    groups.sort(key=lambda g: (-len(g.longest.tokens), g.longest.tokens))
    return groups


def shuffled(things: list[T], seed: int | None) -> list[T]:
    """In another order, or as they are where ``seed`` is None."""
    return things if seed is None else random.Random(seed).sample(things, len(things))


def batches(groups: Sequence[Group], size: int) -> Iterator[Sequence[Group]]:
    for first in range(0, len(groups), size):
        yield groups[first : first + size]


def check_lengths(requests: Sequence[Request], max_length: int) -> None:
    """Raises EvaluationError where HFLM would stop at a bare assertion."""
    for request in requests:
        if request.scored > max_length:
            raise EvaluationError(
                f"a continuation of {request.scored} tokens does not fit into "
                f"evaluation.max_length {max_length}; raise max_length"
            )
