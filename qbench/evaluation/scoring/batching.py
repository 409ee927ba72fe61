"""Group requests into batches: padded ones, which are HFLM's own, or packs without padding.

Scores depend on the order, padding and grouping of padded batches. Packs have about the same number
of tokens each, and a prefix that requests share stands in them once.

Requests with one context are a *prefix group*: the prefix (the tokens that they share) followed by
suffixes (what each adds). A suffix attends to the prefix and to itself, and its positions go on
where the prefix ends::

    prefix: Question: … Answer:      positions 0 … n−1
    suffix:   the heart              positions n …
    suffix:   a lung                 positions n …

A *pack* is prefix groups laid one after another in one row of tokens.
"""

from __future__ import annotations

import itertools
import os.path
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from qbench.evaluation.scoring.requests import Batch, Request, Scored


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Groups of requests that go through the model together; they are collated when their turn
    comes.
    """

    groups: list[Any]

    @property
    def requests(self) -> int:
        return sum(len(group.request_indices) for group in self.groups)

    def split(self) -> tuple[Self, Self] | None:
        """Return two halves; None for a single group."""
        if len(self.groups) == 1:
            return None
        half = (len(self.groups) + 1) // 2
        return replace(self, groups=self.groups[:half]), replace(self, groups=self.groups[half:])


@dataclass(frozen=True, slots=True)
class Group:
    """Requests with the same model input; ``longest`` scores the most tokens of it.
    ``request_indices`` are indexes in the list that was grouped.
    """

    longest: Request
    request_indices: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """Batches of ``batch_size`` distinct inputs, or ``window_batch_size`` rolling windows; of as
    many of either as ``batch_tokens`` hold, padding included, if that is given.

    Rotary angles of longrope and dynamic scaling, and which keys a top-k chooses, depend on the
    longest text of a batch. ``rope_limit`` is the number of tokens beyond which they change: no
    batch mixes lengths on both sides of it, and with ``one_length`` (dynamic, top-k) no batch
    beyond it mixes lengths at all.
    """

    max_length: int
    batch_size: int
    window_batch_size: int
    batch_tokens: int | None = None
    rope_limit: int | None = None
    one_length: bool = False

    def plan(self, requests: Sequence[Request], *, windows: bool) -> list[PaddedBatch]:
        """Return padded batches in HFLM's order: requests are sorted all together, rolling windows
        a batch of input order at a time.
        """
        if not windows or self.batch_tokens is not None:
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
        for _, alike in itertools.groupby(group(requests, chosen), self._angles):
            groups = list(alike)
            while groups:
                length = self._length(groups[0])  # the longest come first
                if self.batch_tokens is not None:
                    size = max(1, self.batch_tokens // length)
                yield PaddedBatch(groups[:size], length, self)
                del groups[:size]

    def _length(self, group: Group) -> int:
        return min(self.max_length, len(group.longest.tokens) - 1)

    def _angles(self, group: Group) -> int:
        """Return a number that is the same for inputs that may share a batch."""
        length = self._length(group)
        if self.rope_limit is None or length <= self.rope_limit:
            return 0
        return length if self.one_length else 1


@dataclass(frozen=True, slots=True)
class PaddedBatch(BatchPlan):
    """Sequences padded on the right to ``length`` tokens; its halves keep that length."""

    length: int
    padding: Padding

    @property
    def tokens(self) -> int:
        return len(self.groups) * self.length

    def collate(self, requests: Sequence[Request]) -> Batch:
        ids = np.zeros((len(self.groups), self.length), dtype=np.int64)  # HFLM pads with id 0
        members, flat = [], []
        for i, g in enumerate(self.groups):
            inputs = g.longest.inputs(self.padding.max_length)
            ids[i, : len(inputs)] = inputs
            end = i * self.length + len(inputs)
            for member in g.request_indices:
                count = requests[member].scored
                members.append(member)
                flat.append(np.arange(end - count, end))
        return Batch(ids=ids, **_scored_by(requests, members, flat))


def _scored_by(
    requests: Sequence[Request], members: list[int], flat: list[np.ndarray]
) -> dict[str, Any]:
    """Return the fields of a batch that map its hidden states to the tokens that they score.
    ``flat``: per request of ``members`` the indexes of its states; a shared state is kept once."""
    rows, inverse = np.unique(np.concatenate(flat), return_inverse=True)
    scored = [requests[i] for i in members]
    index = np.concatenate([request.first + np.arange(request.scored) for request in scored])
    token = np.concatenate([request.tokens[request.context :] for request in scored])
    return {
        "rows": rows,
        "scored": Scored(inverse, index, token),
        "request_indices": np.asarray(members),
        "counts": np.asarray([request.scored for request in scored]),
    }


def group(requests: Sequence[Request], chosen: Sequence[int]) -> list[Group]:
    """Return one group per distinct input of the ``chosen`` requests, longest first, as HFLM orders
    them.
    """
    by_input: dict[tuple[int, ...], list[int]] = {}
    for i in chosen:
        by_input.setdefault(tuple(requests[i].tokens[:-1]), []).append(i)
    groups = [
        Group(max((requests[i] for i in indexes), key=lambda r: r.scored), indexes)
        for indexes in by_input.values()
    ]
    groups.sort(key=lambda g: (-len(g.longest.tokens), g.longest.tokens))
    return groups


LEAST = 4  # tokens of a context that is shared
KEY_RATIO = 4  # keys that a pack's segments see, for each of its tokens


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """A prefix and its suffixes in token ids. ``request_indices`` are (index of the request in the
    list, index of its suffix or −1 if the prefix is all of its input).
    """

    prefix: list[int]
    suffixes: list[list[int]]
    request_indices: list[tuple[int, int]]

    @property
    def tokens(self) -> int:
        return len(self.prefix) + sum(map(len, self.suffixes))

    @property
    def keys(self) -> int:
        """Return how many keys all its segments attend to; the prefix's count once per segment."""
        return len(self.prefix) * (1 + len(self.suffixes)) + sum(map(len, self.suffixes))


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch(Batch):
    """A pack of T tokens: ``ids`` [1, T] at ``positions`` [1, T]. Its segments are the prefixes and
    suffixes in order: ``cu_seqlens_q`` [S + 1] of their tokens, ``cu_seqlens_k`` of the keys that
    they see; ``keys`` [K] the tokens that these are, one segment after another, None where each
    sees just itself."""

    positions: np.ndarray
    cu_seqlens_q: np.ndarray
    cu_seqlens_k: np.ndarray
    keys: np.ndarray | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Packs of at most ``batch_tokens`` tokens and ``KEY_RATIO`` times as many keys.

    The longest prefix groups come first; one that is larger than a pack stays alone.
    """

    max_length: int
    batch_tokens: int

    def plan(self, requests: Sequence[Request], *, windows: bool) -> list[Pack]:
        groups = prefix_groups(requests, self.max_length, self.batch_tokens)
        groups.sort(key=lambda group: (-group.tokens, group.prefix))
        packs: list[Pack] = []
        tokens = keys = 0
        for group in groups:
            tokens += group.tokens
            keys += group.keys
            if not packs or tokens > self.batch_tokens or keys > KEY_RATIO * self.batch_tokens:
                packs.append(Pack([]))
                tokens, keys = group.tokens, group.keys
            packs[-1].groups.append(group)
        return packs


class Pack(BatchPlan):
    """Prefix groups in one row of tokens."""

    @property
    def tokens(self) -> int:
        return sum(group.tokens for group in self.groups)

    def collate(self, requests: Sequence[Request]) -> PackedBatch:
        ids: list[int] = []
        positions: list[np.ndarray] = []
        queries, keys, seen = [], [], []  # of each segment
        members, flat = [], []
        for group in self.groups:
            first, shared = len(ids), len(group.prefix)
            starts = []
            for before, part in [
                (0, group.prefix),
                *((shared, suffix) for suffix in group.suffixes),
            ]:
                start, end = len(ids), len(ids) + len(part)
                starts.append(start)
                ids += part
                positions.append(np.arange(before, before + len(part)))
                queries.append(len(part))
                keys.append(before + len(part))
                seen += [np.arange(first, first + before), np.arange(start, end)]
            for i, suffix_index in group.request_indices:
                request = requests[i]
                added = len(group.suffixes[suffix_index]) if suffix_index >= 0 else 0
                steps = np.arange(shared + added - request.scored, shared + added)
                shift = starts[suffix_index + 1] - shared - first if suffix_index >= 0 else 0
                flat.append(first + steps + np.where(steps >= shared, shift, 0))
                members.append(i)
        return PackedBatch(
            ids=np.asarray(ids, dtype=np.int64)[None],
            positions=np.concatenate(positions)[None],
            cu_seqlens_q=np.cumsum([0, *queries], dtype=np.int32),
            cu_seqlens_k=np.cumsum([0, *keys], dtype=np.int32),
            keys=np.concatenate(seen) if keys != queries else None,
            **_scored_by(requests, members, flat),
        )


def prefix_groups(
    requests: Sequence[Request], max_length: int, batch_tokens: int
) -> list[PrefixGroup]:
    """Return one group per context, several if its requests are more than a pack holds.

    A context that had to be cut is not shared, nor is one of a few tokens: every document's first
    rolling window has the prefix token alone for its context.
    """
    by_context: dict[tuple[int, ...], list[int]] = {}
    for i, request in enumerate(requests):
        cut = len(request.tokens) - 1 > max_length
        alone = cut or request.context < LEAST
        shared = request.tokens[:-1] if alone else request.tokens[: request.context]
        by_context.setdefault(tuple(shared), []).append(i)
    groups = []
    for context, request_indices in by_context.items():
        part: list[int] = []
        tokens = len(context)
        for i in request_indices:
            more = len(requests[i].tokens) - len(context)
            if part and tokens + more > batch_tokens:
                groups.append(_prefix_group(requests, part, max_length))
                part, tokens = [], len(context)
            part.append(i)
            tokens += more
        groups.append(_prefix_group(requests, part, max_length))
    return groups


def _prefix_group(
    requests: Sequence[Request], request_indices: list[int], max_length: int
) -> PrefixGroup:
    inputs = [requests[i].inputs(max_length) for i in request_indices]
    prefix = list(os.path.commonprefix(inputs))  # noqa: RUF071  of lists, not of paths
    suffixes: dict[tuple[int, ...], int] = {}
    suffix_indexes = []
    for i, ids in zip(request_indices, inputs, strict=True):
        rest = tuple(ids[len(prefix) :])
        suffix_indexes.append((i, suffixes.setdefault(rest, len(suffixes)) if rest else -1))
    return PrefixGroup(prefix, [list(suffix) for suffix in suffixes], suffix_indexes)
