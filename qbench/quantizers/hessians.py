"""The Hessians of gptqmodel, each input counted once and no pass longer than it has to be.

optimum runs every pass over a block to its end, and counts the input that q, k and v share three
times. Here one of the layers with a common input leads: the others take over its Hessian, and the
inverse, right before they are quantized. A forward ends before the last leader is computed.

A task is gptqmodel's ``GPTQ`` of one layer. Layers of blocks that are not replayed are left alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from qbench.quantizers.blocks import Stop
from qbench.quantizers.replay import Replay


class Hessians:
    """Told by tasks what happens to them: ``begin``, ``share`` before quantizing, ``end``."""

    def __init__(self, replays: list[Replay], final: set[nn.Module]) -> None:
        self._final = final
        self._replays = {layer: replay for replay in replays for layer in replay.order}
        self._tasks: dict[nn.Module, Any] = {}
        self._leaders: dict[nn.Module, nn.Module] = {}  # of each layer in this pass

    def begin(self, task: Any) -> None:
        replay = self._replays.get(task.module)
        if replay is None:
            return
        self._tasks[task.module] = task
        first: dict[int, nn.Module] = {}
        self._leaders = {
            layer: first.setdefault(replay.source[layer], layer)
            for layer in replay.order
            if layer in self._tasks
        }

    def follows(self, task: Any) -> bool:
        return self._leaders.get(task.module, task.module) is not task.module

    def meet(self, layer: nn.Module, arguments: tuple) -> None:
        """A forward pre-hook of each linear layer, after the replay's own."""
        met = self._replays[layer].met
        if met is not None and layer in self._tasks and met.issuperset(self._leaders.values()):
            self._tasks[layer].add_batch(arguments[0].data, None)
            raise Stop

    def share(self, task: Any) -> None:
        """Before the first task of a pass is quantized, which uses its Hessian up."""
        if task.module not in self._leaders:
            return
        gptq = importlib.import_module("gptqmodel.quantization.gptq")
        caches: dict[nn.Module, Any] = {}
        for layer, leader in self._leaders.items():
            if leader is not layer:
                cache = caches.setdefault(leader, gptq.SharedHessianFactorCache(0, "input"))
                self._tasks[layer].adopt_hessian_from(self._tasks[leader])
                self._tasks[layer].attach_shared_hessian_cache(cache)
                self._tasks[leader].attach_shared_hessian_cache(cache)
        self._leaders = {}

    def end(self, task: Any) -> None:
        self._tasks.pop(task.module, None)
        self._final.add(task.module)


@contextmanager
def collecting(replays: list[Replay], final: set[nn.Module]) -> Iterator[Hessians]:
    """``final``: where the layers of tasks that end are added, as the replays read it."""
    hessians = Hessians(replays, final)
    with ExitStack() as stack:
        for replay in replays:
            for layer in replay.order:
                stack.callback(layer.register_forward_pre_hook(hessians.meet).remove)
        yield hessians
