"""Requests into packs: shared contexts once, no padding, a fixed number of tokens each.

A *tree* is a stem (the tokens that its requests share) followed by branches (what each adds).
A branch attends to the stem and to itself, and its positions go on where the stem's end::

    stem: Question: … Answer:      positions 0 … n−1
    branch:   the heart            positions n …
    branch:   a lung               positions n …

A *pack* is trees laid one after another in one row of tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qbench.evaluation.scoring.requests import Request, shuffled
from qbench.evaluation.scoring.rows import Scored

LEAST = 4  # tokens of a context that is shared


@dataclass(frozen=True, slots=True)
class Tree:
    """``members`` are (place of the request in the list, number of its branch or −1 if the stem
    is all of its input)."""

    stem: list[int]
    branches: list[list[int]]
    members: list[tuple[int, int]]

    @property
    def tokens(self) -> int:
        return len(self.stem) + sum(map(len, self.branches))

    @property
    def keys(self) -> int:
        """Keys that all its segments attend to, the stem's counted once for each of them."""
        return len(self.stem) * (1 + len(self.branches)) + sum(map(len, self.branches))


@dataclass(frozen=True, slots=True)
class Pack:
    """Trees in one row of T tokens, as int64 arrays.

    ``ids``, ``positions`` [T]; ``rows`` [R] the tokens whose logits are scored; ``scored`` what
    they score, its rows counted within ``rows``. ``members`` [M'] are the requests' places in
    the list that was packed, ``counts`` [M'] how many entries of ``scored`` belong to each.
    """

    trees: list[Tree]
    ids: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    scored: Scored
    members: np.ndarray
    counts: np.ndarray

    def segments(self) -> tuple[np.ndarray, np.ndarray]:
        """Lengths [S] of the stems and branches in order, and of the keys that each sees."""
        queries, keys = [], []
        for tree in self.trees:
            queries.append(len(tree.stem))
            keys.append(len(tree.stem))
            for branch in tree.branches:
                queries.append(len(branch))
                keys.append(len(tree.stem) + len(branch))
        return np.array(queries), np.array(keys)

    def key_index(self) -> np.ndarray | None:
        """Tokens [K] whose keys the segments see, one segment after another; None where each
        segment sees just itself."""
        if not any(tree.branches for tree in self.trees):
            return None
        parts = []
        first = 0
        for tree in self.trees:
            stem = np.arange(first, first + len(tree.stem))
            parts.append(stem)
            first += len(tree.stem)
            for branch in tree.branches:
                parts += [stem, np.arange(first, first + len(branch))]
                first += len(branch)
        return np.concatenate(parts)


def grow(requests: Sequence[Request], max_length: int, batch_tokens: int) -> list[Tree]:
    """One tree for the requests of one context, several where they are more than a batch holds.

    A context that had to be cut is nobody else's, and one of a few tokens is not worth sharing:
    every document's first rolling window has the prefix token alone for its context.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, request in enumerate(requests):
        cut = len(request.tokens) - 1 > max_length
        own = cut or request.context < LEAST
        shared = request.tokens[:-1] if own else request.tokens[: request.context]
        groups.setdefault(tuple(shared), []).append(i)
    trees = []
    for context, members in groups.items():
        part: list[int] = []
        tokens = len(context)
        for i in members:
            more = len(requests[i].tokens) - len(context)
            if part and tokens + more > batch_tokens:
                trees.append(_tree(requests, part, max_length))
                part, tokens = [], len(context)
            part.append(i)
            tokens += more
        trees.append(_tree(requests, part, max_length))
    return trees


def _tree(requests: Sequence[Request], members: list[int], max_length: int) -> Tree:
    inputs = [requests[i].inputs(max_length) for i in members]
    stem = inputs[0][: _common(inputs)]
    branches: dict[tuple[int, ...], int] = {}
    placed = []
    for i, ids in zip(members, inputs, strict=True):
        rest = tuple(ids[len(stem) :])
        placed.append((i, branches.setdefault(rest, len(branches)) if rest else -1))
    return Tree(stem, [list(branch) for branch in branches], placed)


def _common(inputs: Sequence[list[int]]) -> int:
    """How many leading tokens all inputs share."""
    low, high = min(inputs), max(inputs)
    return next(
        (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b),
        min(len(low), len(high)),
    )


def pack(
    requests: Sequence[Request],
    *,
    batch_tokens: int,
    max_length: int,
    key_ratio: int = 4,
    shuffle: int | None = None,
) -> list[list[Tree]]:
    """Trees in lists of at most ``batch_tokens`` tokens and ``key_ratio`` times as many keys.

    The longest come first unless ``shuffle`` seeds another order; a tree that is larger than a
    batch stays alone.
    """
    trees = grow(requests, max_length, batch_tokens)
    trees.sort(key=lambda tree: (-tree.tokens, tree.stem))
    trees = shuffled(trees, shuffle)
    packs: list[list[Tree]] = []
    tokens = keys = 0
    for tree in trees:
        tokens += tree.tokens
        keys += tree.keys
        if not packs or tokens > batch_tokens or keys > key_ratio * batch_tokens:
            packs.append([])
            tokens, keys = tree.tokens, tree.keys
        packs[-1].append(tree)
    return packs


def lay(trees: list[Tree], requests: Sequence[Request]) -> Pack:
    """The arrays of one pack. Rows that several requests score are there once."""
    ids: list[int] = []
    positions: list[np.ndarray] = []
    flat: list[np.ndarray] = []  # for each scored token the place of its logits in the pack
    owners, places, tokens, counts, members = [], [], [], [], []
    for tree in trees:
        first = len(ids)
        stem = len(tree.stem)
        ids += tree.stem
        positions.append(np.arange(stem))
        starts = []
        for branch in tree.branches:
            starts.append(len(ids))
            ids += branch
            positions.append(np.arange(stem, stem + len(branch)))
        for i, branch in tree.members:
            request = requests[i]
            length = stem + (len(tree.branches[branch]) if branch >= 0 else 0)
            steps = np.arange(length - request.scored, length)
            shift = starts[branch] - stem - first if branch >= 0 else 0
            flat.append(first + steps + np.where(steps >= stem, shift, 0))
            owners.append(np.full(request.scored, request.owner))
            places.append(request.place + np.arange(request.scored))
            tokens.append(np.asarray(request.tokens[request.context :]))
            counts.append(request.scored)
            members.append(i)
    rows, inverse = np.unique(np.concatenate(flat), return_inverse=True)
    return Pack(
        trees=trees,
        ids=np.asarray(ids, dtype=np.int64),
        positions=np.concatenate(positions),
        rows=rows,
        scored=Scored(inverse, *(np.concatenate(part) for part in (owners, places, tokens))),
        members=np.asarray(members),
        counts=np.asarray(counts),
    )


def halve(trees: list[Tree]) -> tuple[list[Tree], list[Tree]]:
    """Two parts of about as many tokens each; at least one tree in each."""
    sums = list(itertools.accumulate(tree.tokens for tree in trees))
    middle = next(i for i, total in enumerate(sums, start=1) if 2 * total >= sums[-1])
    middle = min(max(middle, 1), len(trees) - 1)
    return trees[:middle], trees[middle:]
