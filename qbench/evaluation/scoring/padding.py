"""Requests into HFLM's batches: its order, padding and grouping, since scores depend on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from qbench.evaluation.scoring.requests import Batch, Request, Scored, shuffled


@dataclass(frozen=True, slots=True)
class Group:
    """Requests with the same model input; ``longest`` scores the most tokens of it.
    ``members`` are indexes in the list that was grouped."""

    longest: Request
    members: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """Batches of ``batch_size`` distinct inputs, or ``window_batch_size`` rolling windows.

    ``misread``: where requests with one input split it differently, the shorter continuation
    belongs to the last rows of the longer; lm-eval 0.4.13 reads its log-probability from the
    first rows (and its greediness from the last), and so does exact scoring.
    """

    max_length: int
    batch_size: int
    window_batch_size: int
    misread: bool
    shuffle: int | None = None

    def plan(self, requests: Sequence[Request], *, windows: bool) -> list[PaddedBatch]:
        """HFLM sorts requests all together, but rolling windows a batch of input order at a
        time."""
        if not windows:
            return list(self._batches(requests, range(len(requests)), self.batch_size))
        size, count = self.window_batch_size, len(requests)
        return [
            batch
            for first in range(0, count, size)
            for batch in self._batches(requests, range(first, min(first + size, count)), size)
        ]

    def _batches(
        self, requests: Sequence[Request], chosen: Sequence[int], size: int
    ) -> Iterator[PaddedBatch]:
        groups = shuffled(group(requests, chosen), self.shuffle)
        for first in range(0, len(groups), size):
            part = groups[first : first + size]
            length = max(len(g.longest.inputs(self.max_length)) for g in part)
            yield PaddedBatch(part, length, self)


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Sequences padded on the right to ``length``, which a half of it keeps."""

    groups: list[Group]
    length: int
    padding: Padding

    @property
    def requests(self) -> int:
        return sum(len(g.members) for g in self.groups)

    @property
    def longest(self) -> int:
        return self.length

    def halves(self) -> tuple[PaddedBatch, PaddedBatch] | None:
        if len(self.groups) == 1:
            return None
        half = (len(self.groups) + 1) // 2
        first, second = self.groups[:half], self.groups[half:]
        return (
            PaddedBatch(first, self.length, self.padding),
            PaddedBatch(second, self.length, self.padding),
        )

    def lay(self, requests: Sequence[Request]) -> Batch:
        ids = np.zeros((len(self.groups), self.length), dtype=np.int64)  # HFLM pads with id 0
        rows: list[np.ndarray] = []
        right, read, owner, index, token, members, counts = [], [], [], [], [], [], []
        first = 0  # row of the group's first scored token
        for i, g in enumerate(self.groups):
            inputs, most = g.longest.inputs(self.padding.max_length), g.longest.scored
            ids[i, : len(inputs)] = inputs
            end = i * self.length + len(inputs)
            rows.append(np.arange(end - most, end))
            for member in g.members:
                request = requests[member]
                steps = np.arange(request.scored)
                right.append(first + most - request.scored + steps)
                read.append(first + steps)
                owner.append(np.full(request.scored, request.owner))
                index.append(request.first + steps)
                token.append(np.asarray(request.tokens[request.context :]))
                members.append(member)
                counts.append(request.scored)
            first += most
        return Batch(
            ids=ids,
            rows=np.concatenate(rows),
            scored=Scored(*(np.concatenate(part) for part in (right, owner, index, token))),
            read=np.concatenate(read) if self.padding.misread else None,
            members=np.asarray(members),
            counts=np.asarray(counts),
        )


def group(requests: Sequence[Request], chosen: Sequence[int]) -> list[Group]:
    """One group for each distinct input of the ``chosen``, longest first, as HFLM orders them."""
    members: dict[tuple[int, ...], list[int]] = {}
    for i in chosen:
        members.setdefault(tuple(requests[i].tokens[:-1]), []).append(i)
    groups = [
        Group(max((requests[i] for i in indexes), key=lambda r: r.scored), indexes)
        for indexes in members.values()
    ]
    groups.sort(key=lambda g: (-len(g.longest.tokens), g.longest.tokens))
    return groups
