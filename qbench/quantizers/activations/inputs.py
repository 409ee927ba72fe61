"""Quantizing what a model's products take in: a forward pre-hook on each module that multiplies
by a weight matrix, the LM head's left out.

Layers that take in the same tensor (q, k and v; gate and up) get the same quantized one, computed
once.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from qbench.errors import QuantizationError
from qbench.quantizers.activations.quantize import Fixed, fixed_by
from qbench.quantizers.config import ActivationEvidence, Grid, matching

Quantize = Callable[[Tensor, Fixed | None], Any]  # a tensor, or codes and scales
ATTRIBUTE = "qbench_inputs"  # of a model whose activations are quantized


class Inputs:
    """What quantizes the inputs of one model's ``names``; ``fixed``: their scales, where those do
    not depend on the input."""

    def __init__(self, quantize: Quantize, fixed: Mapping[str, Fixed], names: Iterable[str]):
        self.quantize, self.fixed, self.names = quantize, dict(fixed), tuple(names)
        self.paused = False
        # by thread: an input, its version and scale, and what became of it
        self._last: dict[int, tuple[weakref.ref[Tensor], int, Fixed | None, Any]] = {}

    def hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
        """The forward pre-hook of the module ``name``."""
        fixed = self.fixed.get(name)

        def quantize_input(module: nn.Module, arguments: tuple[Any, ...]) -> Any:
            if self.paused:
                return None
            return (self.once(arguments[0], fixed), *arguments[1:])

        return quantize_input

    def once(self, x: Tensor, fixed: Fixed | None) -> Any:
        """What ``quantize`` gives for ``x``, kept for the next that asks with the same tensor."""
        thread = threading.get_ident()
        version = 0 if x.is_inference() else x._version
        last = self._last.get(thread)
        if last and last[0]() is x and last[1] == version and last[2] is fixed:
            return last[3]
        quantized = self.quantize(x, fixed)

        def forget(reference: weakref.ref[Tensor]) -> None:
            if self._last.get(thread, (None,))[0] is reference:
                del self._last[thread]

        # kept no longer than the input itself lives
        self._last[thread] = weakref.ref(x, forget), version, fixed, quantized
        return quantized


def multipliers(model: nn.Module, spared: tuple[str, ...] = ()) -> dict[str, nn.Module]:
    """The modules of ``model`` that multiply by a weight matrix, by name: linear layers, however
    their weights are stored. Without the LM head and what ``spared`` names.

    Raises QuantizationError for a pattern that names none of them.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = {
        name: module
        for name, module in model.named_modules()
        if module is not head and hasattr(module, "in_features") and hasattr(module, "out_features")
    }
    for one in spared:
        if not matching(found, (one,)):
            last = dict.fromkeys(name.rpartition(".")[2] for name in found)
            raise QuantizationError(
                f"activations: ignore: {one!r} names no layer; they end in {', '.join(last)}"
            )
    out = matching(found, spared)
    return {name: module for name, module in found.items() if name not in out}


def install(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    quantize: Quantize,
    fixed: Mapping[str, Fixed] | None = None,
) -> None:
    """Let ``quantize`` change the input of every one of ``modules`` of ``model``."""
    inputs = Inputs(quantize, fixed or {}, modules)
    for name, module in modules.items():
        module.register_forward_pre_hook(inputs.hook(name))
    setattr(model, ATTRIBUTE, inputs)


def fixed_ranges(ranges: Mapping[str, Tensor], grid: Grid) -> dict[str, Fixed]:
    """Scales from [low, high] of each module's inputs. Equal ranges give one object, so that
    layers with one input still have it quantized once."""
    made: dict[tuple[float, ...], Fixed] = {}
    result = {}
    for name, ends in ranges.items():
        key = tuple(ends.tolist())
        result[name] = made.setdefault(key, fixed_by(ends[0], ends[1], grid))
    return result


def evidence(
    model: nn.Module, grid: Grid, group: int, scale_of: str
) -> dict[str, ActivationEvidence]:
    """What is installed in ``model``."""
    inputs = getattr(model, ATTRIBUTE, None)
    if inputs is None:
        return {}
    result = {}
    for name in inputs.names:
        fixed = inputs.fixed.get(name)
        result[name] = ActivationEvidence(
            grid=grid,
            scale_of=scale_of,
            group=group,
            scale=fixed.scale if fixed else None,
            zero=fixed.zero if fixed else None,
        )
    return result


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
