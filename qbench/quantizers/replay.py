"""Calibration passes over a block, without computing twice what cannot have changed.

A calibrated quantizer runs a block over all samples again and again, each time with a few more of
its linear layers final. What such a pass computes before the first layer that is not yet final is,
bit for bit, what an earlier pass computed: above all the attention, most of a pass's time. So the
output of a child of the block (``self_attn``, ``mlp``: whatever its name) is kept for each sample
once every linear layer that ran before its end is final. A child that returns what its last layer
returns needs not even one pass for that: the layer's input, kept from the pass before it was
quantized, gives the output by one product.

What is kept of a sample is at most ``WIDEST`` times its hidden states: memory grows by one set of
hidden states with most models, by two at most, until the block is done. The input of an MLP's last
layer is three to four times as wide: the MLP's first half is computed twice, which costs a tenth
of the time, rather than its activations kept for all samples.

What a block does is learnt from one sample. Where that shows anything else than layers that each
run once on inputs left as they were, and where a call is not one of tensors and plain values seen
before, everything is computed as if this file did not exist. What is kept is checked to be
unchanged before it is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from qbench.quantizers.blocks import Stop, Walk, patched

WIDEST = 2

Leaves = list[tuple[Any, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Child:
    """``end``: how many of the block's layers ran before it returned. ``tail``: the last of them,
    where its output is the child's, alone or as the first of ``items`` of which the rest is None.
    """

    end: int
    tail: nn.Linear | None
    items: int


@dataclass(kw_only=True, slots=True, eq=False)
class _Sample:
    """One call of the block: its arguments, and what is kept of it, each with its version."""

    arguments: Leaves
    bytes_left: int
    outputs: dict[nn.Module, tuple[Any, Leaves]] = field(default_factory=dict)
    inputs: dict[nn.Module, tuple[Tensor, Leaves]] = field(default_factory=dict)

    def keep(self, kept: dict[nn.Module, tuple[Any, Leaves]], child: nn.Module, value: Any) -> None:
        """Keep ``value`` in ``kept`` if it is of known kinds and there is room."""
        leaves = _leaves(value)
        if leaves is not None and _bytes(leaves) <= self.bytes_left:
            kept[child] = value, leaves
            self.bytes_left -= _bytes(leaves)

    def take(self, kept: dict[nn.Module, tuple[Any, Leaves]], child: nn.Module) -> Any:
        """Take ``child``'s value out of ``kept``; None if there is none, or it has changed."""
        value, leaves = kept.pop(child, (None, []))
        self.bytes_left += _bytes(leaves)
        return value if _unchanged(leaves) else None


class Replay:
    """One block: ``order`` of its linear layers, the number of each one's input in ``source``.

    ``met`` are the layers that the forward under way has reached; None in a forward that has to be
    computed in full.
    """

    def __init__(
        self,
        order: list[nn.Linear],
        source: list[int],
        children: dict[nn.Module, Child],
        final: set[nn.Module],
    ) -> None:
        self.order = order
        self.source = dict(zip(order, source, strict=True))
        self._final = final
        self.met: set[nn.Module] | None = None
        self._children = children
        self._samples: dict[int, _Sample] = {}
        self._now: _Sample | None = None

    def patches(self, block: nn.Module) -> Iterator[tuple[nn.Module, Callable]]:
        """The forwards to put in place of those of ``block`` and its children."""
        yield block, self._over_samples(block.forward)
        for child, about in self._children.items():
            yield child, self._given_back(child, about, child.forward)

    def meet(self, layer: nn.Module, arguments: tuple) -> None:
        """A forward pre-hook of each linear layer."""
        if self.met is None or self._now is None:
            return
        self.met.add(layer)
        for child, about in self._children.items():
            if about.tail is layer and layer not in self._final and self._settled(about.end - 1):
                self._now.keep(self._now.inputs, child, arguments[0])

    def _over_samples(self, forward: Callable) -> Callable:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._now = self._sample(args, kwargs)
            self.met = None if self._now is None else set()
            try:
                return forward(*args, **kwargs)
            except Stop:
                return args[0]
            finally:
                self._now = self.met = None
                if self._settled(len(self.order)):  # the last pass
                    self._samples.pop(id(args[0]) if args else 0, None)

        return run

    def _given_back(self, child: nn.Module, about: Child, forward: Callable) -> Callable:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            sample = self._now
            if sample is None or not self._settled(about.end):
                return forward(*args, **kwargs)
            output = sample.take(sample.outputs, child)
            if output is None:
                x = sample.take(sample.inputs, child)
                if x is None:
                    output = forward(*args, **kwargs)
                elif about.tail is not None:
                    output = about.tail(x)
                    output = (output, *[None] * (about.items - 1)) if about.items else output
            if not self._settled(len(self.order)):  # else no pass is to come
                sample.keep(sample.outputs, child, output)
            return output

        return run

    def _settled(self, end: int) -> bool:
        return self._final.issuperset(self.order[:end])

    def _sample(self, args: tuple, kwargs: dict) -> _Sample | None:
        arguments = _leaves((args, kwargs))
        if not args or not isinstance(args[0], Tensor) or arguments is None:
            return None
        sample = self._samples.get(id(args[0]))
        if sample is None:
            if not self._final.isdisjoint(self.order):  # not seen in the first pass
                return None
            sample = _Sample(arguments=arguments, bytes_left=WIDEST * args[0].nbytes)
            self._samples[id(args[0])] = sample
        return sample if _same(sample.arguments, arguments) else None


@contextmanager
def replaying(
    walk: Walk, layers: Collection[nn.Module], final: set[nn.Module]
) -> Iterator[list[Replay]]:
    """Replay every block of ``walk`` that a sample shows to be regular; the others run as they
    are. ``layers`` are to be quantized; those whose weights change no more are added to ``final``
    by the caller."""
    chosen = set(layers)
    with ExitStack() as stack:
        found = [
            (block, learn(block, walk.sample, walk.arguments[index, 1], chosen, final))
            for index, block in enumerate(walk.blocks)
        ]
        for block, replay in found:
            if replay is not None:
                for layer in replay.order:
                    stack.callback(layer.register_forward_pre_hook(replay.meet).remove)
                for module, forward in replay.patches(block):
                    stack.enter_context(patched(module, forward))
        yield [replay for _, replay in found if replay is not None]


@torch.no_grad()
def learn(
    block: nn.Module,
    hidden: Tensor,
    rest: dict[str, Any],
    chosen: set[nn.Module],
    final: set[nn.Module],
) -> Replay | None:
    """What ``block`` does, from one sample; None if that is not known to be replayable."""
    arguments = _leaves((hidden, rest))
    if arguments is None:
        return None
    # Tensors are kept, so that none is mistaken for another that lay in its place.
    inputs: list[tuple[nn.Linear, Tensor, int]] = []
    made: dict[nn.Module, tuple[Tensor, int]] = {}
    starts: dict[nn.Module, int] = {}
    spans: dict[nn.Module, list[tuple[int, int, Any]]] = {}

    def reach(layer: Any, x: tuple) -> None:
        inputs.append((layer, x[0], x[0]._version))

    def make(layer: nn.Module, _: tuple, y: Tensor) -> None:
        made[layer] = y, y._version

    def enter(child: nn.Module, _: tuple) -> None:
        starts[child] = len(inputs)

    def leave(child: nn.Module, _: tuple, output: Any) -> None:
        spans.setdefault(child, []).append((starts[child], len(inputs), output))

    layers = [module for module in block.modules() if module in chosen]
    with ExitStack() as stack:
        for modules, before, after in (
            (layers, reach, make),
            ([child for child in block.children() if child not in layers], enter, leave),
        ):
            for module in modules:
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after).remove)
        block(hidden, **rest)

    order = [layer for layer, _, _ in inputs]
    if not _unchanged(arguments) or sorted(map(id, order)) != sorted(map(id, layers)):
        return None
    keys = [(id(x), version) for _, x, version in inputs]
    children = {
        child: _child(calls[0][1], calls[0][2], order, made)
        for child, calls in spans.items()
        if len(calls) == 1 and calls[0][0] < calls[0][1]
    }
    return Replay(order, [keys.index(key) for key in keys], children, final)


def _child(
    end: int, output: Any, order: list[nn.Linear], made: dict[nn.Module, tuple[Tensor, int]]
) -> Child:
    items = len(output) if type(output) is tuple else 0
    first, others = (output[0], output[1:]) if items else (output, ())
    last, version = made[order[end - 1]]
    handed_on = first is last and first._version == version
    tail = order[end - 1] if handed_on and all(other is None for other in others) else None
    return Child(end=end, tail=tail, items=items)


def _leaves(value: Any) -> Leaves | None:
    """Tensors, with the count of their changes in place, and plain values inside ``value``; None
    where it holds anything else, such as a cache, which a forward changes."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else [(value, value._version)]
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return [(value, 0)]
    if type(value) is dict:
        value = [*value, *value.values()]
    if type(value) not in (tuple, list):
        return None
    parts = [_leaves(part) for part in value]
    if any(part is None for part in parts):
        return None
    return [leaf for part in parts for leaf in part]


def _unchanged(leaves: Leaves) -> bool:
    return all(x._version == version for x, version in leaves if isinstance(x, Tensor))


def _same(first: Leaves, second: Leaves) -> bool:
    """The same tensors, as they were, and equal values."""
    return len(first) == len(second) and all(
        (a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b) and v == w
        for (a, v), (b, w) in zip(first, second, strict=True)
    )


def _bytes(leaves: Leaves) -> int:
    """Of memory that they keep from being freed."""
    return sum(x.untyped_storage().nbytes() for x, _ in leaves if isinstance(x, Tensor))
