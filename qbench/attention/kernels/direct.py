"""Kernels launched by the CUDA driver, with the pointers of other tensors.

Triton builds a launch's arguments anew each time, and tensor descriptors with them: a fifth of a
millisecond for a short training step. Here a launch of Triton's is captured once, by itself, in a
CUDA graph, which tells the function and the bytes of every argument. Which of these are addresses
of tensors is known, since the tensors are; another launch differs in these alone.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor

Words = ctypes.c_uint64
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: other threads may do what they like meanwhile
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
POINTER, DESCRIPTOR = 8, 128  # bytes; of a CUtensorMap
ALIGNMENT = 64  # of a CUtensorMap


class _Node(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2 of the CUDA driver API."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("sizes", ctypes.c_uint * 7),  # of grid and block in three directions, shared memory
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class NotKnown(Exception):
    """A launch whose arguments are not all understood: Triton goes on making it."""


@cache
def driver() -> Any:
    """The CUDA driver's library, called without giving up Python's lock: these calls are short."""
    return ctypes.PyDLL("libcuda.so.1")


@cache
def launcher() -> Any:
    """The function that launches, with Python's lock given up: it waits where the GPU has more
    launches ahead than it takes."""
    return ctypes.CDLL("libcuda.so.1").cuLaunchKernel


def _checked(status: int, what: str, error: type[Exception] = RuntimeError) -> None:
    if status:
        raise error(f"CUDA driver: {what} failed with status {status}")


class Launched:
    """A captured launch. ``plain``: numbers of the tensors whose addresses are arguments, in the
    order of the arguments; ``described``: of those that have descriptors."""

    def __init__(
        self, node: _Node, addresses: Sequence[int], plain: Sequence[int], described: Sequence[int]
    ) -> None:
        sizes = _argument_sizes(node)
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // ALIGNMENT) * ALIGNMENT
        self.room = ctypes.create_string_buffer(end + ALIGNMENT)
        start = ctypes.addressof(self.room)
        start += -start % ALIGNMENT
        for i, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
            ctypes.memmove(start + offset, node.arguments[i], size)
        self.arguments = (ctypes.c_void_p * len(sizes))(*(start + each for each in offsets))
        self.function = ctypes.c_void_p(node.function)
        self.sizes = [ctypes.c_uint(size) for size in node.sizes]
        self.lock = threading.Lock()
        words = [Words.from_address(start + offset) for offset in offsets]
        self.pointers = _matched(sizes, words, addresses, plain)
        maps = [start + at for size, at in zip(sizes, offsets, strict=True) if size == DESCRIPTOR]
        if len(maps) != len(described):
            raise NotKnown(f"{len(maps)} descriptors for {len(described)} tensors")
        self.maps = [(ctypes.c_void_p(at), i) for at, i in zip(maps, described, strict=True)]
        before = ctypes.string_at(start, end)
        self._fill(addresses)
        if ctypes.string_at(start, end) != before:
            raise NotKnown("an argument was taken for another")

    def _fill(self, addresses: Sequence[int]) -> None:
        for word, number in self.pointers:
            word.value = addresses[number]
        for place, number in self.maps:
            status = driver().cuTensorMapReplaceAddress(place, ctypes.c_void_p(addresses[number]))
            _checked(status, "cuTensorMapReplaceAddress")

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        """Launches with these tensors' addresses."""
        with self.lock:
            self._fill(addresses)
            status = launcher()(
                self.function, *self.sizes, ctypes.c_void_p(stream), self.arguments, None
            )
        _checked(status, "cuLaunchKernel")


def _matched(
    sizes: Sequence[int], words: Sequence[Any], addresses: Sequence[int], plain: Sequence[int]
) -> list[tuple[Any, int]]:
    """The arguments that are the ``plain`` tensors' addresses, in this order."""
    found, wanted = [], list(plain)
    for size, word in zip(sizes, words, strict=True):
        if size == POINTER and wanted and word.value == addresses[wanted[0]]:
            found.append((word, wanted.pop(0)))
    if wanted:
        raise NotKnown(f"{len(wanted)} of {len(plain)} addresses are not among the arguments")
    return found


def _argument_sizes(node: _Node) -> list[int]:
    """Of each argument in bytes."""
    if not node.function or node.extra or not node.arguments:
        raise NotKnown("a node without a function, or with its arguments in another form")
    sizes = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    ask = driver().cuFuncGetParamInfo
    function = ctypes.c_void_p(node.function)
    while not ask(function, ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)):
        sizes.append(size.value)
    return sizes


def captured(
    launch: Callable[[int], None], addresses: Sequence[int], plain: Sequence[int],
    described: Sequence[int],
) -> Launched:  # fmt: skip
    """What ``launch(stream)`` launches, one kernel. Raises NotKnown."""
    cuda, stream, graph = driver(), ctypes.c_void_p(), ctypes.c_void_p()
    status = cuda.cuStreamCreate(ctypes.byref(stream), NON_BLOCKING)
    _checked(status, "cuStreamCreate", NotKnown)
    try:
        _checked(cuda.cuStreamBeginCapture_v2(stream, RELAXED), "cuStreamBeginCapture", NotKnown)
        try:
            launch(stream.value)
        finally:
            status = cuda.cuStreamEndCapture(stream, ctypes.byref(graph))
        _checked(status, "cuStreamEndCapture", NotKnown)
    finally:
        cuda.cuStreamDestroy_v2(stream)
    try:
        count = ctypes.c_size_t(2)
        nodes = (ctypes.c_void_p * 2)()
        status = cuda.cuGraphGetNodes(graph, nodes, ctypes.byref(count))
        _checked(status, "cuGraphGetNodes", NotKnown)
        if count.value != 1:
            raise NotKnown(f"{count.value} nodes of one launch")
        node = _Node()
        status = cuda.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(nodes[0]), ctypes.byref(node))
        if status:
            raise NotKnown("what was captured is no kernel")
        return Launched(node, addresses, plain, described)
    finally:
        cuda.cuGraphDestroy(graph)


def distinct(tensors: Sequence[Tensor | None]) -> bool:
    """Whether each has an address of its own, so that an address tells the tensor."""
    addresses = [tensor.data_ptr() for tensor in tensors if tensor is not None]
    return len(set(addresses)) == len(addresses)
