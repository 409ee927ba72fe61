"""A model whose activations and KV cache stay as they are for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from qbench.attention.kv_cache import KV_CACHE

INPUTS = "qbench_inputs"  # attribute of a model whose activations are quantized, see quantizers


@contextlib.contextmanager
def unrounded(model: nn.Module) -> Iterator[None]:
    """Within it nothing is rounded to few bits while ``model`` runs; its weights stay quantized.
    Products of a library that rounds its inputs itself go on doing so."""
    carried = [getattr(model, INPUTS, None)]
    carried += [getattr(module, KV_CACHE, None) for module in model.modules()]
    rounding: dict[int, Any] = {id(one): one for one in carried if one is not None}
    for one in rounding.values():
        one.paused = True
    try:
        yield
    finally:
        for one in rounding.values():
            one.paused = False
