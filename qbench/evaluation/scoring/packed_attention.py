"""Attention of packed trees, on top of the attention that the model runs anyway.

Two layouts give the same function. ``Segments``: every stem and branch is a sequence of its own
with its own keys, for kernels that take ``cu_seq_lens`` with fewer queries than keys.
``Blocks``: trees of similar size side by side, filled up on the right, with a mask, for the
reference and for torch's own attention.
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

from qbench.errors import UnavailableError
from qbench.evaluation.scoring.packing import Pack, Tree
from qbench.evaluation.scoring.rows import to_device

NAME = "qbench-packed"
MOVING_ROPES = ("longrope", "dynamic")
BLOCK_SCORES = 1 << 22  # queries × keys of one block
BLOCK_WASTE = 0.8  # the smallest tree of a block has at least this part of the largest's tokens

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
    """``starts_q``, ``starts_k`` int32 [S + 1]; ``keys`` [K] tokens whose keys are seen, or None
    where every segment sees just itself."""

    starts_q: Tensor
    starts_k: Tensor
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
            cu_seq_lens_q=self.starts_q,
            cu_seq_lens_k=self.starts_k,
            max_length_q=self.longest_q,
            max_length_k=self.longest_k,
            **options,
        )
        return output[0]


@dataclass(frozen=True, slots=True)
class Block:
    """G trees of up to n tokens: ``take`` [G · n] tokens to read, ``real`` those places of the
    block that hold a token, ``put`` that token; ``mask`` [G, 1, n, n], None for plain causality."""

    trees: int
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
            shape = (block.trees, -1)
            parts = (
                tensor.index_select(0, block.take).unflatten(0, shape).transpose(1, 2)
                for tensor in (query, key, value)
            )
            output, _ = function(module, *parts, block.mask, **options)
            result.index_copy_(0, block.put, output.flatten(0, 1).index_select(0, block.real))
        return result


def takes_segments(attention: str) -> bool:
    """Whether the attention of this name takes ``cu_seq_lens`` at the speed of a kernel."""
    return attention.endswith("-triton") or attention.startswith("flash_attention")


def lay_segments(pack: Pack, device: torch.device) -> Segments:
    queries, keys = pack.segments()
    index = pack.key_index()
    starts = [np.concatenate(([0], np.cumsum(n))).astype(np.int32) for n in (queries, keys)]
    return Segments(
        starts_q=to_device(starts[0], device),
        starts_k=to_device(starts[1], device),
        longest_q=int(queries.max()),
        longest_k=int(keys.max()),
        keys=None if index is None else to_device(index, device),
    )


def lay_blocks(pack: Pack, device: torch.device, stopped: threading.Event) -> Blocks:
    blocks = []
    first = 0
    for trees in _alike(pack.trees):
        blocks.append(_block(trees, first, device))
        first += sum(tree.tokens for tree in trees)
    return Blocks(tuple(blocks), stopped)


def _alike(trees: list[Tree]) -> Iterator[list[Tree]]:
    """Runs of trees of similar size (they are sorted by it), branched or not."""
    run: list[Tree] = []
    for tree in trees:
        if run and (
            bool(tree.branches) != bool(run[0].branches)
            or tree.tokens < BLOCK_WASTE * run[0].tokens
            or (len(run) + 1) * run[0].tokens ** 2 > BLOCK_SCORES
        ):
            yield run
            run = []
        run.append(tree)
    if run:
        yield run


def _block(trees: list[Tree], first: int, device: torch.device) -> Block:
    longest = max(tree.tokens for tree in trees)
    take = np.zeros((len(trees), longest), dtype=np.int64)
    labels = np.full(
        (len(trees), longest), -1, dtype=np.int64
    )  # −1: no token, 0: stem, 1 …: branch
    for i, tree in enumerate(trees):
        take[i, : tree.tokens] = np.arange(first, first + tree.tokens)
        lengths = [len(tree.stem), *map(len, tree.branches)]
        labels[i, : tree.tokens] = np.repeat(np.arange(len(lengths)), lengths)
        first += tree.tokens
    mask = None
    if any(tree.branches for tree in trees):
        label = to_device(labels, device)
        seen = (label[:, None, :] == 0) | (label[:, None, :] == label[:, :, None])
        mask = seen.tril()[:, None]
    real = np.flatnonzero(labels.ravel() >= 0)
    return Block(
        trees=len(trees),
        take=to_device(take.ravel(), device),
        real=to_device(real, device),
        put=to_device(take.ravel()[real], device),
        mask=mask,
    )


def check_model(model: Any) -> None:
    """Raises UnavailableError for models whose attention a pack cannot reproduce."""
    config = model.config
    name = config._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise UnavailableError(
            f"fast scoring needs an attention of AttentionInterface, not {name!r}; use scoring: "
            "exact or another attention"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", 1)
    if kinds - {"full_attention"} or (windowed and not kinds):
        raise UnavailableError(
            f"fast scoring knows full causal attention only, and {type(model).__name__} has "
            "windows or other layers; use scoring: exact"
        )
    if moving := [kind for kind in _rope_types(config) if kind.startswith(MOVING_ROPES)]:
        raise UnavailableError(
            f"fast scoring needs rotary angles that depend on a token's place alone, and those of "
            f"{moving[0]} depend on the longest sequence of a batch; use scoring: exact"
        )


def _rope_types(config: Any) -> list[str]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return [str(kind.get("rope_type") or kind.get("type") or "") for kind in kinds]


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
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    # The pack's positions are no packed sequences in transformers' sense.
    options.pop("position_ids", None)
    return qbench_layout.attend(function, module, *rows, options)[None], None


AttentionInterface.register(NAME, _forward)
