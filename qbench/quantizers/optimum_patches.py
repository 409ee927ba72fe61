"""What of optimum's quantizer is replaced while it runs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from qbench.errors import QuantizationError
from qbench.quantizers.blocks import Walk
from qbench.quantizers.config import Progress
from qbench.quantizers.gptq_words import packed
from qbench.quantizers.hessians import Hessians
from qbench.quantizers.linear import Tensors


@dataclass(kw_only=True, slots=True)
class Ran:
    """What the library really did: the damping of each layer, and what went through columns."""

    damps: list[float] = field(default_factory=list)
    columns: str = "PyTorch"


@contextmanager
def watched(optimum: Any, model: nn.Module, ran: Ran, hessians: Hessians) -> Iterator[None]:
    """Note what the library really did, collect no Hessian twice, go through columns in a kernel
    on a GPU, keep its progress bars away, and keep it on the model's device (it takes a GPU
    wherever there is one)."""

    class Noting(optimum.GPTQ):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **options)
            hessians.begin(self)

        def create_quantizer(self, name: str) -> Any:
            quantizer = super().create_quantizer(name)
            quantizer.find_params = partial(find_scales, quantizer)
            return quantizer

        def add_batch(self, *batch: Any) -> None:
            if not hessians.follows(self):
                super().add_batch(*batch)

        def fasterquant(self, **options: Any) -> Any:
            hessians.share(self)
            result = super().fasterquant(**options)
            ran.damps.append(float(result[-1]))
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
    with _replaced(optimum, replacements), _replaced(_columns(), _kernel(ran)):
        yield


def find_scales(quantizer: Any, x: torch.Tensor, weight: bool = False) -> None:
    """The library's ``find_params``, to the bit, for weights ``x`` [rows, columns] with a scale a
    row: its own waits six times for a GPU, for each group of columns of each layer."""
    assert weight
    assert quantizer.perchannel
    assert not quantizer.requires_groupwise_processing()
    assert not float(getattr(quantizer.qcfg, "mse", 0.0) or 0.0)
    largest = 2**quantizer.qcfg.bits - 1
    quantizer.maxq = quantizer.maxq.to(x.device)
    none = x.new_zeros(len(x))
    low, high = torch.minimum(x.min(1)[0], none), torch.maximum(x.max(1)[0], none)
    if quantizer.qcfg.sym:
        high = torch.maximum(low.abs(), high)
        low = torch.where(low < 0, -high, low)
    empty = (low == 0) & (high == 0)
    low, high = low.masked_fill(empty, -1.0), high.masked_fill(empty, 1.0)
    # by a tensor: by a plain number, CUDA multiplies by 1 / it
    scale = (high - low) / quantizer.maxq
    middle = torch.full_like(scale, (largest + 1) / 2)
    zero = middle if quantizer.qcfg.sym else torch.round(-low / scale)
    quantizer.scale, quantizer.zero = scale[:, None], zero[:, None]


def _columns() -> ModuleType:
    """Where the library asks for its own kernel, when it needs it."""
    return importlib.import_module("gptqmodel.quantization.gptq_cuda")


def _kernel(ran: Ran) -> dict[str, Any]:
    """What the library asks on a GPU, for blocks of 128 columns: whether there is a kernel, and to
    run it. Never its own, which it compiles where it can, and says nothing where it cannot."""
    try:
        from qbench.quantizers.gptq_columns import block_update
    except ImportError:  # no Triton
        return {"block_update_available": lambda: False}

    def update(*arguments: Any) -> None:
        ran.columns = "our Triton kernel"
        block_update(*arguments)

    return {"block_update_available": lambda: True, "gptq_block_update": update}


@contextmanager
def _replaced(module: ModuleType, names: Mapping[str, Any]) -> Iterator[None]:
    saved = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(saved)


@contextmanager
def own_packing(
    quantizer: Any, layers: Mapping[str, nn.Linear], bits: int
) -> Iterator[dict[str, Tensors]]:
    """What the library would pack of ``layers``, by name, in its format; it puts no modules of its
    own into the model. Layers keep their place, with quantized weights."""
    made: dict[str, Tensors] = {}

    def pack(model: nn.Module, quantizers: dict[str, tuple]) -> None:
        for name, (_, scale, zero, group) in quantizers.items():
            made[name] = packed(layers[name].weight, scale, zero, group, bits)

    quantizer.pack_model = pack
    quantizer.post_init_model = lambda model: model
    yield made


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
