"""Walking a decoder block by block: what calibrated quantizers need of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qbench.errors import QuantizationError
from qbench.quantizers.calibration import Calibration


class Stop(Exception):
    """Ends a forward once its input has been seen."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Walk:
    """How the model's own forward goes through its blocks.

    ``sample``: hidden states [1, length, hidden] that the first block receives for one sample.
    ``arguments``: what a block receives beside them, by its index and the batch's size: its own
    mask and rotary angles, which differ between blocks where layer types are mixed. ``groups``:
    of each block, the linear layers to quantize in the order they run, those with one input
    together; for Llama q, k, v; o; gate, up; down. Layers with one input have one Hessian.
    """

    root: str
    blocks: nn.ModuleList
    sample: Tensor
    arguments: dict[tuple[int, int], dict[str, Any]]
    groups: list[list[list[str]]]

    def batches(self, block: int, states: list[Tensor]) -> list[tuple[Tensor, dict[str, Any]]]:
        """The arguments of ``block`` for each batch, whose hidden states are ``states``."""
        return [(hidden, self.arguments[block, len(hidden)]) for hidden in states]

    @contextmanager
    def own_arguments(self) -> Iterator[None]:
        """Let each block run with its own arguments, whatever it is called with."""
        with ExitStack() as stack:
            for index, block in enumerate(self.blocks):
                stack.enter_context(patched(block, self._with_own(index, block.forward)))
            yield

    def _with_own(self, index: int, inner: Callable) -> Callable:
        def run(hidden: Tensor, **_: Any) -> Any:
            return inner(hidden, **self.arguments[index, len(hidden)])

        return run


@torch.no_grad()
def walk(
    model: nn.Module,
    layers: dict[str, nn.Linear],
    calibration: Calibration,
    batch_size: int,
) -> Walk:
    """Follow ``model`` over one batch of each size.

    ``layers``: the linear layers to quantize, by name. Raises QuantizationError where the blocks,
    one after the other, are not what the model computes, or do not hold all of ``layers``.
    """
    root, blocks = _blocks(model, layers)
    firsts = {len(ids): ids for ids in (*calibration.ids.split(batch_size), calibration.ids[:1])}
    looks = {size: _follow(model, blocks, layers, root, ids) for size, ids in firsts.items()}
    return Walk(
        root=root,
        blocks=blocks,
        sample=_first(model, blocks[0], calibration.ids[:1])[0],
        arguments={
            (index, size): rest
            for size, notes in looks.items()
            for index, rest in enumerate(notes.arguments)
        },
        groups=looks[1].groups,
    )


@torch.no_grad()
def first_states(
    model: nn.Module, route: Walk, calibration: Calibration, batch_size: int
) -> Iterator[Tensor]:
    """What the first block receives: hidden states [batch, length, hidden], one a batch.

    Raises QuantizationError where the rest of its arguments is not that of ``route``.
    """
    for ids in calibration.ids.split(batch_size):
        hidden, rest = _first(model, route.blocks[0], ids)
        if not _equal(rest, route.arguments[0, len(ids)]):
            raise QuantizationError(
                f"{type(model).__name__}: what its blocks receive beside hidden states depends on "
                "the text; it cannot be calibrated block by block"
            )
        yield hidden


@torch.no_grad()
def forward(block: nn.Module, hidden: Tensor, rest: dict[str, Any]) -> Tensor:
    return _states(block(hidden, **rest))


@torch.no_grad()
def hessian(
    block: nn.Module, layer: nn.Module, batches: list[tuple[Tensor, dict[str, Any]]]
) -> Tensor:
    """2/n Σ x xᵀ over all n calibration tokens that reach ``layer``: float32 [in, in]; zeros where
    none does (an expert that is never chosen)."""
    total: Tensor | None = None
    tokens = 0

    def add(_: nn.Module, arguments: tuple) -> None:
        nonlocal total, tokens
        x = arguments[0].reshape(-1, arguments[0].shape[-1]).float()
        tokens += x.shape[0]
        total = x.T @ x if total is None else total.addmm_(x.T, x)
        raise Stop

    with _hooks(layer.register_forward_pre_hook(add)):
        for hidden, rest in batches:
            try:
                forward(block, hidden, rest)
            except Stop:
                continue
    assert total is not None
    return total.mul_(2 / max(tokens, 1))


@contextmanager
def patched(module: nn.Module, forward: Callable) -> Iterator[None]:
    """``forward`` in the place of the module's own."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _blocks(model: nn.Module, layers: dict[str, nn.Linear]) -> tuple[str, nn.ModuleList]:
    """The decoder's list of blocks and its name: the heaviest ModuleList of the model."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    if not lists:
        raise QuantizationError(f"{type(model).__name__} has no list of blocks to calibrate")
    name = max(lists, key=lambda n: sum(p.numel() for p in lists[n].parameters()))
    outside = [n for n in layers if not n.startswith(f"{name}.")]
    if outside:
        raise QuantizationError(f"linear layers outside the blocks {name}: {', '.join(outside)}")
    return name, lists[name]


class _Notes:
    """Hooks that note how one forward goes through the blocks, and end it after the last."""

    def __init__(self, blocks: nn.ModuleList, layers: dict[str, nn.Linear], root: str) -> None:
        self.arguments: list[dict[str, Any]] = []
        self.groups: list[list[list[str]]] = []
        self._blocks, self._layers, self._root = blocks, layers, root
        self._output: Tensor | None = None
        # Of the block that runs: tensors are kept until it is done, so that none is mistaken for
        # another that lay in its place.
        self._order: list[tuple[str, Tensor, int]] = []

    def handles(self) -> Iterator[Any]:
        for block in self._blocks:
            yield block.register_forward_pre_hook(self._enter, with_kwargs=True)
            yield block.register_forward_hook(self._leave)
        for name, layer in self._layers.items():
            yield layer.register_forward_pre_hook(self._reach(name))

    def _enter(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        index = len(self.arguments)
        if index >= len(self._blocks) or block is not self._blocks[index]:
            raise QuantizationError(f"{self._root}: its blocks do not run once each, in order")
        hidden, rest = _split(block, args, kwargs)
        if self._output is not None and not _equal(hidden, self._output):
            raise QuantizationError(
                f"{self._root}.{index}: receives something else than the block before it gives; "
                "such a model cannot be calibrated block by block"
            )
        self.arguments.append(rest)

    def _leave(self, block: nn.Module, _: tuple, output: Any) -> None:
        prefix = f"{self._root}.{len(self.groups)}."
        named: dict[tuple[int, int], list[str]] = {}
        for name, tensor, version in self._order:
            named.setdefault((id(tensor), version), []).append(name.removeprefix(prefix))
        self.groups.append(list(named.values()))
        self._order.clear()
        self._output = _states(output)
        if block is self._blocks[-1]:
            raise Stop

    def _reach(self, name: str) -> Callable:
        def note(_: nn.Module, arguments: tuple) -> None:
            self._order.append((name, arguments[0], arguments[0]._version))

        return note


def _follow(
    model: nn.Module,
    blocks: nn.ModuleList,
    layers: dict[str, nn.Linear],
    root: str,
    ids: Tensor,
) -> _Notes:
    notes = _Notes(blocks, layers, root)
    with _hooks(*notes.handles()):
        _run(model, ids)
    if len(notes.arguments) < len(blocks):
        raise QuantizationError(f"{root}: its blocks do not run once each, in order")
    reached = {
        f"{root}.{index}.{name}"
        for index, groups in enumerate(notes.groups)
        for group in groups
        for name in group
    }
    if missing := sorted(set(layers) - reached):
        raise QuantizationError(
            f"calibration never reaches {', '.join(missing[:3])}"
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        )
    return notes


def _first(model: nn.Module, block: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """What ``block`` receives: hidden states, and the rest."""
    seen: list[tuple[Tensor, dict[str, Any]]] = []

    def keep(_: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append(_split(block, args, kwargs))
        raise Stop

    with _hooks(block.register_forward_pre_hook(keep, with_kwargs=True)):
        _run(model, ids)
    return seen[0]


def _run(model: nn.Module, ids: Tensor) -> None:
    try:
        model(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
    except Stop:
        return


def _split(block: nn.Module, args: tuple, kwargs: dict) -> tuple[Tensor, dict[str, Any]]:
    """Hidden states, and the other arguments by name."""
    names = list(inspect.signature(type(block).forward).parameters)[1:]
    rest = {**dict(zip(names, args, strict=False)), **kwargs}
    return rest.pop(names[0]), rest


def _states(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first is second or torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_equal(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(_equal(a, b) for a, b in pairs)
    if type(first) is not type(second):
        return False
    if callable(getattr(first, "dense", None)):  # a mask that is made when a layer asks
        return first is second or _equal(first.dense(), second.dense())
    return first is second or bool(first == second)


@contextmanager
def _hooks(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
