"""Requests into packs: shared prefixes once, no padding, a fixed number of tokens each.

Requests with one context are a *prefix group*: the prefix (the tokens that they share) followed
by suffixes (what each adds). A suffix attends to the prefix and to itself, and its positions go
on where the prefix ends::

    prefix: Question: … Answer:      positions 0 … n−1
    suffix:   the heart              positions n …
    suffix:   a lung                 positions n …

A *pack* is prefix groups laid one after another in one row of tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qbench.evaluation.scoring.requests import Batch, Request, Scored, shuffled

LEAST = 4  # tokens of a context that is shared
KEY_RATIO = 4  # keys that a pack's segments see, for each of its tokens


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """``members`` are (index of the request in the list, index of its suffix or −1 if the prefix
    is all of its input)."""

    prefix: list[int]
    suffixes: list[list[int]]
    members: list[tuple[int, int]]

    @property
    def tokens(self) -> int:
        return len(self.prefix) + sum(map(len, self.suffixes))

    @property
    def keys(self) -> int:
        """Keys that all its segments attend to, the prefix's counted once for each of them."""
        return len(self.prefix) * (1 + len(self.suffixes)) + sum(map(len, self.suffixes))


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch(Batch):
    """A pack of T tokens: ``ids`` [1, T] at ``positions`` [1, T]."""

    positions: np.ndarray
    groups: list[PrefixGroup]

    def segments(self) -> tuple[np.ndarray, np.ndarray]:
        """Lengths [S] of the prefixes and suffixes in order, and of the keys that each sees."""
        queries, keys = [], []
        for group in self.groups:
            queries.append(len(group.prefix))
            keys.append(len(group.prefix))
            for suffix in group.suffixes:
                queries.append(len(suffix))
                keys.append(len(group.prefix) + len(suffix))
        return np.array(queries), np.array(keys)

    def key_index(self) -> np.ndarray | None:
        """Tokens [K] whose keys the segments see, one segment after another; None where each
        segment sees just itself."""
        if not any(group.suffixes for group in self.groups):
            return None
        parts = []
        first = 0
        for group in self.groups:
            prefix = np.arange(first, first + len(group.prefix))
            parts.append(prefix)
            first += len(group.prefix)
            for suffix in group.suffixes:
                parts += [prefix, np.arange(first, first + len(suffix))]
                first += len(suffix)
        return np.concatenate(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Packs of at most ``batch_tokens`` tokens and ``KEY_RATIO`` times as many keys.

    The longest prefix groups come first unless ``shuffle`` seeds another order; one that is
    larger than a pack stays alone.
    """

    max_length: int
    batch_tokens: int
    shuffle: int | None = None

    def plan(self, requests: Sequence[Request], *, windows: bool) -> list[Pack]:
        groups = prefix_groups(requests, self.max_length, self.batch_tokens)
        groups.sort(key=lambda group: (-group.tokens, group.prefix))
        groups = shuffled(groups, self.shuffle)
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


@dataclass(frozen=True, slots=True)
class Pack:
    groups: list[PrefixGroup]

    @property
    def requests(self) -> int:
        return sum(len(group.members) for group in self.groups)

    @property
    def longest(self) -> int:
        return max(group.tokens for group in self.groups)

    def halves(self) -> tuple[Pack, Pack] | None:
        """Two parts of about as many tokens each."""
        if len(self.groups) == 1:
            return None
        sums = list(itertools.accumulate(group.tokens for group in self.groups))
        middle = next(i for i, total in enumerate(sums, start=1) if 2 * total >= sums[-1])
        middle = min(max(middle, 1), len(self.groups) - 1)
        return Pack(self.groups[:middle]), Pack(self.groups[middle:])

    def lay(self, requests: Sequence[Request]) -> PackedBatch:
        """The arrays. Rows that several requests score are there once."""
        ids: list[int] = []
        positions: list[np.ndarray] = []
        flat: list[np.ndarray] = []  # for each scored token the index of its row in the pack
        owner, index, token, counts, members = [], [], [], [], []
        for group in self.groups:
            first, shared = len(ids), len(group.prefix)
            ids += group.prefix
            positions.append(np.arange(shared))
            starts = []
            for suffix in group.suffixes:
                starts.append(len(ids))
                ids += suffix
                positions.append(np.arange(shared, shared + len(suffix)))
            for i, suffix_index in group.members:
                request = requests[i]
                own = len(group.suffixes[suffix_index]) if suffix_index >= 0 else 0
                steps = np.arange(shared + own - request.scored, shared + own)
                shift = starts[suffix_index] - shared - first if suffix_index >= 0 else 0
                flat.append(first + steps + np.where(steps >= shared, shift, 0))
                owner.append(np.full(request.scored, request.owner))
                index.append(request.first + np.arange(request.scored))
                token.append(np.asarray(request.tokens[request.context :]))
                counts.append(request.scored)
                members.append(i)
        rows, inverse = np.unique(np.concatenate(flat), return_inverse=True)
        return PackedBatch(
            groups=self.groups,
            ids=np.asarray(ids, dtype=np.int64)[None],
            positions=np.concatenate(positions)[None],
            rows=rows,
            scored=Scored(inverse, *(np.concatenate(part) for part in (owner, index, token))),
            members=np.asarray(members),
            counts=np.asarray(counts),
        )


def prefix_groups(
    requests: Sequence[Request], max_length: int, batch_tokens: int
) -> list[PrefixGroup]:
    """One group for the requests of one context, several where they are more than a pack holds.

    A context that had to be cut is nobody else's, and one of a few tokens is not worth sharing:
    every document's first rolling window has the prefix token alone for its context.
    """
    by_context: dict[tuple[int, ...], list[int]] = {}
    for i, request in enumerate(requests):
        cut = len(request.tokens) - 1 > max_length
        own = cut or request.context < LEAST
        shared = request.tokens[:-1] if own else request.tokens[: request.context]
        by_context.setdefault(tuple(shared), []).append(i)
    groups = []
    for context, members in by_context.items():
        part: list[int] = []
        tokens = len(context)
        for i in members:
            more = len(requests[i].tokens) - len(context)
            if part and tokens + more > batch_tokens:
                groups.append(_prefix_group(requests, part, max_length))
                part, tokens = [], len(context)
            part.append(i)
            tokens += more
        groups.append(_prefix_group(requests, part, max_length))
    return groups


def _prefix_group(requests: Sequence[Request], members: list[int], max_length: int) -> PrefixGroup:
    inputs = [requests[i].inputs(max_length) for i in members]
    prefix = inputs[0][: _common(inputs)]
    suffixes: dict[tuple[int, ...], int] = {}
    found = []
    for i, ids in zip(members, inputs, strict=True):
        rest = tuple(ids[len(prefix) :])
        found.append((i, suffixes.setdefault(rest, len(suffixes)) if rest else -1))
    return PrefixGroup(prefix, [list(suffix) for suffix in suffixes], found)


def _common(inputs: Sequence[list[int]]) -> int:
    """How many leading tokens all inputs share."""
    low, high = min(inputs), max(inputs)
    return next(
        (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b),
        min(len(low), len(high)),
    )
