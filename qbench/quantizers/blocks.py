"""Walking a decoder block by block: what calibrated quantizers need of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qbench.errors import QuantizationError
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.linears import linears


class Stop(Exception):
    """Ends a forward once its input has been seen."""


def blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The decoder's list of blocks and its name: the heaviest ModuleList of the model.

    Raises QuantizationError where a linear layer (the LM head aside) lies outside it: a calibrated
    quantizer would leave it out.
    """
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    if not lists:
        raise QuantizationError(f"{type(model).__name__} has no list of blocks to calibrate")
    name = max(lists, key=lambda n: sum(p.numel() for p in lists[n].parameters()))
    outside = [n for n in linears(model) if not n.startswith(f"{name}.")]
    if outside:
        raise QuantizationError(f"linear layers outside the blocks {name}: {', '.join(outside)}")
    return name, lists[name]


@torch.no_grad()
def first_inputs(
    model: nn.Module, calibration: Calibration, batch_size: int
) -> list[tuple[Tensor, dict[str, Any]]]:
    """What the first block receives: hidden states [batch, length, hidden], and the rest.

    Samples are of one length without padding, so batches of one size share the rest.
    """
    _, decoder = blocks(model)
    seen: list[tuple[Tensor, dict[str, Any]]] = []
    shared: dict[int, dict[str, Any]] = {}

    def keep(_: nn.Module, arguments: tuple, keywords: dict) -> None:
        rest = dict(keywords)
        hidden = arguments[0] if arguments else rest.pop("hidden_states")
        seen.append((hidden, shared.setdefault(hidden.shape[0], rest)))
        raise Stop

    device = next(decoder[0].parameters()).device
    with _hook(decoder[0].register_forward_pre_hook(keep, with_kwargs=True)):
        for batch in calibration.ids.split(batch_size):
            try:
                model(input_ids=batch.to(device), use_cache=False)
            except Stop:
                continue
    return seen


@torch.no_grad()
def forward(block: nn.Module, hidden: Tensor, rest: dict[str, Any]) -> Tensor:
    output = block(hidden, **rest)
    return output[0] if isinstance(output, tuple) else output


@torch.no_grad()
def input_groups(block: nn.Module, hidden: Tensor, rest: dict[str, Any]) -> list[list[str]]:
    """Linear layers of a block in the order they run, those with one input together.

    For Llama: q, k, v; o; gate, up; down. Layers with one input have one Hessian.
    """
    order: list[tuple[str, Tensor]] = []  # the tensors are kept, so that no id is used twice

    def note(name: str) -> Any:
        return lambda _, arguments: order.append((name, arguments[0]))

    layers = linears(block)
    handles = [m.register_forward_pre_hook(note(n)) for n, m in layers.items()]
    try:
        forward(block, hidden, rest)
    finally:
        for handle in handles:
            handle.remove()
    groups: dict[int, list[str]] = {}
    for name, tensor in order:
        groups.setdefault(id(tensor), []).append(name)
    missing = set(layers) - {name for name, _ in order}
    if missing:
        raise QuantizationError(f"calibration never reaches {', '.join(sorted(missing))}")
    return list(groups.values())


@torch.no_grad()
def hessian(
    block: nn.Module, layer: nn.Module, batches: list[tuple[Tensor, dict[str, Any]]]
) -> Tensor:
    """2/n Σ x xᵀ over all n calibration tokens that reach ``layer``: float32 [in, in]."""
    total: Tensor | None = None
    tokens = 0

    def add(_: nn.Module, arguments: tuple) -> None:
        nonlocal total, tokens
        x = arguments[0].reshape(-1, arguments[0].shape[-1]).float()
        tokens += x.shape[0]
        total = x.T @ x if total is None else total.addmm_(x.T, x)
        raise Stop

    with _hook(layer.register_forward_pre_hook(add)):
        for hidden, rest in batches:
            try:
                forward(block, hidden, rest)
            except Stop:
                continue
    assert total is not None
    return total.mul_(2 / tokens)


@contextmanager
def _hook(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
