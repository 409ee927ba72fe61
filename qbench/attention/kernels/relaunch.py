"""Launches that have been made before, without what Triton does to find the compiled kernel again.

For a kernel of forty arguments that is most of a launch: 60 µs of the host's time, where short
sequences take the GPU 100 µs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

MOST = 4096  # launches that are kept
INTERPRETED = triton.knobs.runtime.interpret

_descriptions: dict[tuple[Any, ...], tuple[type, dict[str, Any]]] = {}
# How a compiled kernel is launched, its pointers, and its other arguments.
Launch = tuple[Callable[..., None], list[Any], list[Any]]


class _Notes(threading.local):
    launches: list[Launch] | None = None

    def __init__(self) -> None:
        self.devices: set[int] = set()  # that this thread has used


_notes = _Notes()
_known: dict[tuple[Any, ...], tuple[Callable[..., None], list[Any]]] = {}


def prepare_thread(device: torch.device) -> None:
    """Makes this thread able to launch. A thread has no CUDA context before its first use of the
    runtime, autograd's threads for gradients among them; Triton sets one only where it loads a
    kernel, and a kernel that another thread has loaded would fail."""
    if device.type == "cuda" and device.index not in _notes.devices:
        torch.zeros(1, device=device)
        _notes.devices.add(device.index)


def launch(
    kernel: Any, grid: tuple[int, int], device: int | None, pointers: list[Any],
    numbers: tuple[Any, ...], constants: dict[str, Any],
) -> None:  # fmt: skip
    """``kernel[grid](*pointers, *numbers, **constants)``. ``pointers``: tensors, descriptors and
    None; ``numbers``: the rest of what is not known when the kernel is compiled."""
    if INTERPRETED:
        kernel[grid](*pointers, *numbers, **constants)
        return
    # All that Triton compiles for, and more: it goes by properties of numbers, not by each.
    key = (
        id(kernel), grid, device, numbers, tuple(constants.values()),
        tuple([_kind(pointer) for pointer in pointers]),
    )  # fmt: skip
    known = _known.get(key)
    if known is not None:
        run, rest = known
        _note((run, pointers, rest))
        run(*pointers, *rest)
        return
    compiled = kernel[grid](*pointers, *numbers, **constants)
    if compiled is None:  # not compiled: a hook of Triton's took it
        return
    if len(_known) >= MOST:
        _known.clear()
    names = kernel.arg_names[len(pointers) + len(numbers) :]
    run, rest = compiled[(*grid, 1)], [*numbers, *(constants[name] for name in names)]
    _known[key] = (run, rest)
    _note((run, pointers, rest))


@contextmanager
def noted() -> Iterator[list[Launch]]:
    """The launches that this thread makes meanwhile; none that a hook of Triton's took."""
    kept, _notes.launches = _notes.launches, []
    try:
        yield _notes.launches
    finally:
        _notes.launches = kept


def _note(made: Launch) -> None:
    if _notes.launches is not None:
        _notes.launches.append(made)


def _kind(pointer: Any) -> Any:
    if pointer is None:
        return None
    if isinstance(pointer, Tensor):
        return pointer.dtype, pointer.data_ptr() % 16 == 0
    return pointer.base.dtype, tuple(pointer.block_shape)


def described(make: Callable[..., Any], tensor: Tensor, *about: Any) -> Any:
    """``make(tensor, *about)``, a tensor descriptor; for a tensor like one that was described
    before, without checking its layout again."""
    key = (make, tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16 == 0, about)
    known = _descriptions.get(key)
    if known is None:
        made = make(tensor, *about)
        if len(_descriptions) >= MOST:
            _descriptions.clear()
        _descriptions[key] = type(made), {**vars(made), "base": None}
        return made
    kind, fields = known
    again = object.__new__(kind)
    vars(again).update(fields, base=tensor)
    return again
