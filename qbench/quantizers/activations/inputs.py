"""Quantizing what a model's products take in: a forward pre-hook on each module that multiplies
by a weight matrix, the LM head's left out.

Layers that take in the same tensor (q, k and v; gate and up) get the same quantized one, computed
once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qbench.quantizers.matrices import left_out

Quantize = Callable[[Tensor, Any], Tensor]  # an input and its fixed range, if any → as quantized
ATTRIBUTE = "qbench_inputs"  # of a model whose activations are quantized


class Inputs:
    """What quantizes the inputs of one model. ``ranges``: what is fixed for each module's."""

    def __init__(self, quantize: Quantize, ranges: Mapping[str, Any]) -> None:
        self.quantize, self.ranges = quantize, dict(ranges)
        self.paused = False
        # by thread: an input, its version and range, and what became of it
        self._last: dict[int, tuple[weakref.ref[Tensor], int, Any, Tensor]] = {}

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
        """The forward pre-hook of the module ``name``."""
        fixed = self.ranges.get(name)

        def quantize_input(module: nn.Module, arguments: tuple[Any, ...]) -> Any:
            if self.paused:
                return None
            return (self(arguments[0], fixed), *arguments[1:])

        return quantize_input

    def __call__(self, x: Tensor, fixed: Any) -> Tensor:
        thread = threading.get_ident()
        version = 0 if x.is_inference() else x._version
        last = self._last.get(thread)
        if last and last[0]() is x and last[1] == version and last[2] is fixed:
            return last[3]
        quantized = self.quantize(x, fixed)
        # kept no longer than the input itself lives
        kept = weakref.ref(x, lambda _: self._last.pop(thread, None))
        self._last[thread] = kept, version, fixed, quantized
        return quantized


def multipliers(model: nn.Module, spared: tuple[str, ...] = ()) -> dict[str, nn.Module]:
    """The modules of ``model`` that multiply by a weight matrix, by name: linear layers, however
    their weights are stored. Without the LM head and what ``spared`` names."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = {
        name: module
        for name, module in model.named_modules()
        if module is not head and hasattr(module, "in_features") and hasattr(module, "out_features")
    }
    out = left_out(found, spared)
    return {name: module for name, module in found.items() if name not in out}


def install(
    model: nn.Module,
    quantize: Quantize,
    *,
    spared: tuple[str, ...] = (),
    ranges: Mapping[str, Any] | None = None,
) -> None:
    """Let ``quantize`` change the input of every module of ``multipliers``."""
    inputs = Inputs(quantize, ranges or {})
    for name, module in multipliers(model, spared).items():
        module.register_forward_pre_hook(inputs.hook(name))
    setattr(model, ATTRIBUTE, inputs)


@contextmanager
def weights_alone(model: nn.Module) -> Iterator[None]:
    """Within it the inputs of ``model`` stay as they are."""
    inputs = getattr(model, ATTRIBUTE, None)
    if inputs is not None:
        inputs.paused = True
    try:
        yield
    finally:
        if inputs is not None:
            inputs.paused = False


@torch.no_grad()
def rows_of(x: Tensor) -> Tensor:
    """[..., in] → [tokens, in]: one group a token."""
    return x.reshape(-1, x.shape[-1])
