"""Attention of packs, on top of the attention that the model runs anyway.

Two layouts give the same function. ``Segments``: every prefix and suffix is a sequence of its own
with its own keys, for kernels that take ``cu_seqlens`` with fewer queries than keys.
``Blocks``: prefix groups of similar size side by side, filled up on the right, with a mask, for the
reference and for torch's own attention; not where the distance of keys counts, since the suffixes
of a group stand one behind the other there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qbench.attention.kv_cache import READ, read_apart
from qbench.attention.rotation import rotated
from qbench.evaluation.scoring.packing import PackedBatch, PrefixGroup
from qbench.evaluation.scoring.rows import to_device

NAME = "qbench-packed"
BLOCK_SCORES = 1 << 22  # queries × keys of one block
BLOCK_WASTE = 0.8  # the smallest group of a block has at least this part of the largest's tokens

Attention = Callable[..., tuple[Tensor, Any]]


class Layout(Protocol):
    def attend(
        self,
        function: Attention,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """Attention [T, H, D] of query, key and value [T, H, D]."""


@dataclass(frozen=True, slots=True)
class Segments:
    """``cu_seqlens_q``, ``cu_seqlens_k`` int32 [S + 1]; ``keys`` [K] tokens whose keys are seen,
    or None where every segment sees just itself."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest_q: int
    longest_k: int
    keys: Tensor | None

    def attend(
        self,
        function: Attention,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        if self.keys is not None:
            key, value = key.index_select(0, self.keys), value.index_select(0, self.keys)
        output, _ = function(
            module,
            *(_row(tensor) for tensor in (query, key, value)),
            None,
            cu_seq_lens_q=self.cu_seqlens_q,
            cu_seq_lens_k=self.cu_seqlens_k,
            max_length_q=self.longest_q,
            max_length_k=self.longest_k,
            **options,
        )
        return output[0]


@dataclass(frozen=True, slots=True)
class Block:
    """G prefix groups of up to n tokens: ``take`` [G · n] tokens to read, ``real`` those entries of
    the block that hold a token, ``put`` that token; ``mask`` [G, 1, n, n], None for plain
    causality."""

    groups: int
    take: Tensor
    real: Tensor
    put: Tensor
    mask: Tensor | None


class Stopped(Exception):
    """Nobody waits for this pack any more."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """``stopped``, once set, ends the forward at its next layer by :class:`Stopped`."""

    blocks: tuple[Block, ...]
    stopped: threading.Event

    def attend(
        self,
        function: Attention,
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        if self.stopped.is_set():
            raise Stopped
        result = value.new_empty(*query.shape[:2], value.shape[2])
        for block in self.blocks:
            shape = (block.groups, -1)
            parts = (
                tensor.index_select(0, block.take).unflatten(0, shape).transpose(1, 2)
                for tensor in (query, key, value)
            )
            output, _ = function(module, *parts, block.mask, **options)
            result.index_copy_(0, block.put, output.flatten(0, 1).index_select(0, block.real))
        return result


def takes_segments(attention: str) -> bool:
    """Whether the attention of this name takes ``cu_seqlens`` at the speed of a kernel."""
    return attention.endswith("-triton") or attention.startswith("flash_attention")


def lay_segments(pack: PackedBatch, device: torch.device) -> Segments:
    queries, keys = pack.segments()
    index = pack.key_index()
    cu_seqlens = [np.concatenate(([0], np.cumsum(n))).astype(np.int32) for n in (queries, keys)]
    return Segments(
        cu_seqlens_q=to_device(cu_seqlens[0], device),
        cu_seqlens_k=to_device(cu_seqlens[1], device),
        longest_q=int(queries.max()),
        longest_k=int(keys.max()),
        keys=None if index is None else to_device(index, device),
    )


def lay_blocks(pack: PackedBatch, device: torch.device, stopped: threading.Event) -> Blocks:
    blocks = []
    first = 0
    for groups in _alike(pack.groups):
        blocks.append(_block(groups, first, device))
        first += sum(group.tokens for group in groups)
    return Blocks(tuple(blocks), stopped)


def _alike(groups: list[PrefixGroup]) -> Iterator[list[PrefixGroup]]:
    """Runs of groups of similar size (they are sorted by it), with suffixes or all without."""
    run: list[PrefixGroup] = []
    for group in groups:
        if run and (
            bool(group.suffixes) != bool(run[0].suffixes)
            or group.tokens < BLOCK_WASTE * run[0].tokens
            or (len(run) + 1) * run[0].tokens ** 2 > BLOCK_SCORES
        ):
            yield run
            run = []
        run.append(group)
    if run:
        yield run


def _block(groups: list[PrefixGroup], first: int, device: torch.device) -> Block:
    longest = max(group.tokens for group in groups)
    take = np.zeros((len(groups), longest), dtype=np.int64)
    # −1: no token, 0: prefix, 1 …: suffix
    labels = np.full((len(groups), longest), -1, dtype=np.int64)
    for i, group in enumerate(groups):
        take[i, : group.tokens] = np.arange(first, first + group.tokens)
        lengths = [len(group.prefix), *map(len, group.suffixes)]
        labels[i, : group.tokens] = np.repeat(np.arange(len(lengths)), lengths)
        first += group.tokens
    mask = None
    if any(group.suffixes for group in groups):
        label = to_device(labels, device)
        seen = (label[:, None, :] == 0) | (label[:, None, :] == label[:, :, None])
        mask = seen.tril()[:, None]
    real = np.flatnonzero(labels.ravel() >= 0)
    return Block(
        groups=len(groups),
        take=to_device(take.ravel(), device),
        real=to_device(real, device),
        put=to_device(take.ravel()[real], device),
        mask=mask,
    )


@contextlib.contextmanager
def packed(model: Any) -> Iterator[str]:
    """Within it the model attends by ``qbench_layout``; gives the name of what does the work."""
    name = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield name
    finally:
        model.config._attn_implementation = name


def _row(tensor: Tensor) -> Tensor:
    """[T, H, D] as [1, H, T, D], without a copy."""
    return tensor.transpose(0, 1)[None]


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    qbench_layout: Layout,
    qbench_attention: str,
    **options: Any,
) -> tuple[Tensor, None]:
    function = ALL_ATTENTION_FUNCTIONS[qbench_attention]
    query, key = rotated(module, query, key, options)
    once = read_apart(module, key, value)
    if once is not None:  # before keys are laid out for each segment that sees them
        key, value = once
        options[READ] = True
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    # The pack's positions are no packed sequences in transformers' sense.
    options.pop("position_ids", None)
    return qbench_layout.attend(function, module, *rows, options)[None], None


AttentionInterface.register(NAME, _forward)
