"""Calls like one that was made before: the same launches with other tensors.

For short sequences what the host does before a launch takes longer than the GPU does: which tile,
which strides, whether the layouts suit the accelerator. It is the same whenever the tensors are
laid out alike, so the launches of a first call are written down and then repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qbench.attention.kernels import relaunch

MOST = 1024  # calls that are kept

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
        them is one between launches: room, which the first of them fills."""
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
                    self.makers.append(again(base))
                if base is pointer:
                    tensors.append((place, numbers[id(base)]))
                else:
                    fields = {**vars(pointer), "base": None}
                    descriptors.append((place, numbers[id(base)], type(pointer), fields))
            arguments = [None] * len(pointers) + list(rest)
            self.launches.append((run, arguments, tensors, descriptors))

    def __call__(self, given: Sequence[Tensor | None]) -> list[Tensor]:
        """The results, in tensors made for them."""
        made = [maker() for maker in self.makers]
        tensors = [*given, *made]
        for run, arguments, plain, descriptors in self.launches:
            filled = arguments.copy()
            for place, number in plain:
                filled[place] = tensors[number]
            for place, number, kind, fields in descriptors:
                descriptor = object.__new__(kind)
                vars(descriptor).update(fields, base=tensors[number])
                filled[place] = descriptor
            run(*filled)
        return made[: self.results]


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """All that launches depend on."""
    aligned = tensor.data_ptr() % 16 == 0
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), aligned


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


def forget() -> None:
    """For whoever changes tiles or arithmetic while the program runs."""
    _calls.clear()
