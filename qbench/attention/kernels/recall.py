"""Calls like one that was made before: the same launches with other tensors.

For short sequences what the host does before a launch takes longer than the GPU does: which tile,
which strides, whether the layouts suit the accelerator. It is the same whenever the tensors are
laid out alike, so the launches of a first call are written down and then repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from qbench.attention.kernels import direct, relaunch, schedules
from qbench.attention.kernels.settings import Settings
from qbench.attention.normalizers import NORMALIZERS

MOST = 1024  # calls that are kept
# Times that a call is repeated before its launches are made without Triton, see direct.py; None for
# never. 4 halves what the host does, and gives the same bits: a short step took 0.48 instead of
# 0.69 ms (softmax, H200) where others computed on the CPU, and the same 0.25 on an idle host, where
# Triton's launches are made while the GPU computes. No training has run with it yet.
OFTEN: int | None = None

_calls: dict[Any, Call | None] = {}


class Call:
    """Launches, with a number for each tensor: first those given, then those made."""

    def __init__(
        self,
        launches: Sequence[relaunch.Launch],
        given: Sequence[Tensor | None],
        made: Sequence[tuple[Tensor, Callable[[], Tensor]]],
    ) -> None:
        """``made``: the call's results, and how each is made again. A tensor that is in none of
        them is one between launches: room, which the first of them fills; or a table of
        schedules.py, which stays."""
        self.makers = [maker for _, maker in made]
        numbers = {id(tensor): i for i, tensor in enumerate(given) if tensor is not None}
        numbers |= {id(tensor): len(given) + i for i, (tensor, _) in enumerate(made)}
        self.results = len(made)
        self.launches = []
        for run, pointers, rest in launches:
            tensors, descriptors = [], []
            for place, pointer in enumerate(pointers):
                base = pointer if isinstance(pointer, Tensor) else getattr(pointer, "base", None)
                if base is None:
                    continue
                if id(base) not in numbers:
                    numbers[id(base)] = len(given) + len(self.makers)
                    self.makers.append(the_same(base) if schedules.kept(base) else again(base))
                if base is pointer:
                    tensors.append((place, numbers[id(base)]))
                else:
                    fields = {**vars(pointer), "base": None}
                    descriptors.append((place, numbers[id(base)], type(pointer), fields))
            arguments = [None] * len(pointers) + list(rest)
            self.launches.append((run, arguments, tensors, descriptors))
        self.device = next(tensor for tensor in given if tensor is not None).device
        self.repeated = 0
        self.direct: list[direct.Launched] = []

    def __call__(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        """The results, in tensors made for them."""
        relaunch.prepare_thread(self.device)
        made = [maker() for maker in self.makers]
        tensors = [*given, *made]
        # The driver launches where the kernels were loaded.
        if self.direct and torch.cuda.current_device() == self.device.index:
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            stream = current_stream(self.device.index)
            for launched in self.direct:
                launched(addresses, stream)
            return made[: self.results]
        for run, *rest in self.launches:
            run(*_filled(tensors, *rest))
        self.repeated += 1
        if self.repeated == OFTEN:
            self._direct(tensors)
        return made[: self.results]

    def _direct(self, tensors: Sequence[Tensor | None]) -> None:
        """From now on the launches are made without Triton, where that is possible."""
        if self.device.type != "cuda":
            return
        here = torch.cuda.current_device() == self.device.index
        if torch.cuda.is_current_stream_capturing() or not (here and direct.distinct(tensors)):
            self.repeated = 0  # another time
            return
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        found = []
        for run, *rest in self.launches:
            arguments = _filled(tensors, *rest)
            _, plain, described = rest
            try:
                made = direct.captured(
                    lambda stream, run=run, arguments=arguments: run(*arguments, stream=stream),
                    addresses,
                    [number for _, number in plain],
                    [number for _, number, _, _ in described],
                )
            except direct.NotKnown:
                return
            found.append(made)
        self.direct = found


def _filled(
    tensors: Sequence[Tensor | None], arguments: list[Any], plain: list[Any], described: list[Any]
) -> list[Any]:
    """A launch's arguments, of these tensors."""
    filled = arguments.copy()
    for place, number in plain:
        filled[place] = tensors[number]
    for place, number, kind, fields in described:
        descriptor = object.__new__(kind)
        vars(descriptor).update(fields, base=tensors[number])
        filled[place] = descriptor
    return filled


def current_stream(device: int) -> int:
    """The handle of the stream that work of this thread goes to."""
    return triton.runtime.driver.active.get_current_stream(device)


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """All that launches depend on."""
    aligned = tensor.data_ptr() % 16 == 0
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), aligned


def about(which: Any, given: Sequence[Tensor | None], settings: Settings) -> Any:
    """All that a call's launches depend on. ``which``: forward, or how its backward kernels are
    chosen; ``given``: its tensors, then its parameters."""
    kernels = NORMALIZERS.get(settings.normalizer).kernels
    return which, kernels, settings, *[t if t is None else layout(t) for t in given]


def recalled(key: Any) -> Call | None:
    return _calls.get(key)


def remember(key: Any, call: Call) -> None:
    if len(_calls) >= MOST:
        _calls.clear()
    _calls[key] = call


def again(tensor: Tensor, zeros: bool = False) -> Callable[[], Tensor]:
    """Makes a tensor like this one, not filled, or of zeros."""
    shape, strides = tensor.shape, tensor.stride()
    dtype, device = tensor.dtype, tensor.device
    if zeros:
        return lambda: torch.zeros(shape, dtype=dtype, device=device)
    return lambda: torch.empty_strided(shape, strides, dtype=dtype, device=device)


def the_same(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


def forget() -> None:
    """For whoever changes tiles or arithmetic while the program runs."""
    from qbench.attention.kernels import plans

    _calls.clear()
    plans.forget()
