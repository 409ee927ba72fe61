"""What of optimum's quantizer is replaced while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from qbench.errors import QuantizationError
from qbench.quantizers.blocks import Walk
from qbench.quantizers.hessians import Hessians
from qbench.quantizers.quantizer import Progress


@contextmanager
def watched(
    optimum: Any, model: nn.Module, damps: list[float], hessians: Hessians
) -> Iterator[None]:
    """Note the damping that the library really used, collect no Hessian twice, keep its progress
    bars away, and keep it on the model's device (it takes a GPU wherever there is one)."""

    class Noting(optimum.GPTQ):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **options)
            hessians.begin(self)

        def add_batch(self, *batch: Any) -> None:
            if not hessians.follows(self):
                super().add_batch(*batch)

        def fasterquant(self, **options: Any) -> Any:
            hessians.share(self)
            result = super().fasterquant(**options)
            damps.append(float(result[-1]))
            return result

        def hessian_inverse(self, H: torch.Tensor) -> Any:
            factor, damp = super().hessian_inverse(H)
            if factor is None:
                raise QuantizationError("gptqmodel found no regular Hessian; raise damp")
            return factor, damp

        def free(self) -> None:
            hessians.end(self)
            super().free()

    on_gpu = next(model.parameters()).device.type != "cpu"
    replacements = {
        "GPTQ": Noting,
        "tqdm": lambda iterable, **_: iterable,
        "has_device_more_than_cpu": lambda: on_gpu,
    }
    saved = {name: getattr(optimum, name) for name in replacements}
    vars(optimum).update(replacements)
    try:
        yield
    finally:
        vars(optimum).update(saved)


@contextmanager
def own_groups(optimum: Any, quantizer: Any, route: Walk) -> Iterator[None]:
    """Each block its own groups of layers; the library takes those of the first for all."""
    groups = dict(zip(route.blocks, route.groups, strict=True))
    current = quantizer.modules_in_block_to_quantize = list(route.groups[0])
    inner = optimum.get_layers

    def get_layers(module: nn.Module, *rest: Any, **named: Any) -> dict[str, nn.Module]:
        current[:] = groups.get(module, current)
        return inner(module, *rest, **named)

    optimum.get_layers = get_layers
    try:
        yield
    finally:
        optimum.get_layers = inner


@contextmanager
def reporting(route: Walk, progress: Progress) -> Iterator[None]:
    reached = -1

    def report(index: int) -> Any:
        def hook(*_: Any) -> None:
            nonlocal reached
            if index > reached:
                reached = index
                progress(f"{route.root}.{index}", index / len(route.blocks))

        return hook

    handles = [b.register_forward_pre_hook(report(i)) for i, b in enumerate(route.blocks)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
