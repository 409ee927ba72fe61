"""Run a model that does not fit its device: its decoder blocks lie on several GPUs, or on the host,
from where each is copied to the GPU for its turn.

What is in no block (embeddings, last norm, LM head) stays on the device. A block's weights stay
where transformers put them, which for safetensors is the mapped file, until its turn. Every forward
of a streamed model reads all weights once; :meth:`Stream.lockstep` runs many forwards through one
block after the other, and so reads the weights once for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn

from qbench.errors import UnavailableError

ATTRIBUTE = "qbench_stream"  # of a streamed model
SHARDED = "qbench_sharded"  # of one whose blocks lie on several devices
READERS = 4  # threads that copy weights: a single one is slower than the bus
Tensors = dict[str, Tensor]
Build = Callable[[nn.Linear, Tensors], nn.Module]


class Stop(Exception):
    """Raised inside a forward to end it once its result is computed."""


def decoder_blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name of the decoder's list of blocks and the list: the ModuleList with the most
    parameters. Raises UnavailableError if there is none."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    if not lists:
        raise UnavailableError(
            f"{type(model).__name__} has no list of blocks; it cannot be computed block by block: "
            "set evaluation.stream: false, and leave device_map, GPTQ and noise-floor out"
        )
    name = max(lists, key=lambda n: sum(p.numel() for p in lists[n].parameters()))
    return name, lists[name]


def free_gpu_bytes(device: torch.device | None = None) -> int:
    """Return the bytes of a GPU (None: the current one) that PyTorch can allocate: free ones, and
    its unused reserve."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def stream(model: nn.Module, device: str | torch.device) -> nn.Module:
    """Set up ``model``, whose weights are on the host, to run on ``device`` block by block, and
    return it. Raises UnavailableError if it has no list of blocks."""
    setattr(model, ATTRIBUTE, Stream(model, torch.device(device)))
    return model


def shard(model: nn.Module, devices: Sequence[str | torch.device]) -> nn.Module:
    """Place the blocks of ``model``, whose weights are on the host, in order on ``devices``, about
    equal bytes on each; return the model. Everything outside the blocks is on the first device,
    where hidden states return after the last block. Raises UnavailableError if the model has no
    list of blocks."""
    _, blocks = decoder_blocks(model)
    places = [torch.device(device) for device in devices]
    _move_rest(model, blocks, places[0])
    total = sum(p.nbytes for p in model.parameters())
    before = total - sum(p.nbytes for p in blocks.parameters())
    for index, block in enumerate(blocks):
        size = sum(p.nbytes for p in block.parameters())
        place = places[int((before + size / 2) / total * len(places))]
        before += size
        after = places[0] if index == len(blocks) - 1 else place
        block.to(place)
        block.forward = partial(_forward_at, block.forward, place, after)
    setattr(model, SHARDED, True)
    return model


def _forward_at(
    block_forward: Callable[..., Any],
    place: torch.device,
    after: torch.device,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a block on its device ``place``, and return its output on the device ``after``."""
    with torch.cuda.device(place) if place.type == "cuda" else nullcontext():
        output = block_forward(*send_to_device(args, place), **send_to_device(kwargs, place))
    return send_to_device(output, after)


def is_sharded(model: Any) -> bool:
    """Return whether the blocks of ``model`` lie on several devices."""
    return hasattr(model, SHARDED)


def _move_rest(model: nn.Module, blocks: nn.ModuleList, device: torch.device) -> None:
    """Move everything outside the blocks, and all buffers, to ``device``."""
    inside = {id(p) for p in blocks.parameters()}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in inside:
                parameter.data = parameter.data.to(device)
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def stream_of(model: Any) -> Stream | None:
    """Return the :class:`Stream` of ``model``; None if all its weights lie on devices."""
    return getattr(model, ATTRIBUTE, None)


def load_block(model: nn.Module, name: str) -> None:
    """Copy the block that holds the module or parameter ``name`` to the device. It stays there
    until a call or a forward pass needs another block; changes to its weights are lost then. Does
    nothing for a name outside the blocks, or if the model is not streamed."""
    streamed = stream_of(model)
    if streamed is not None:
        streamed.load_block(name)


def lockstep(model: Any, calls: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
    """Return the results of ``calls``, each of which runs the decoder of ``model`` once. A streamed
    model reads its weights once for all of them."""
    streamed = stream_of(model)
    if streamed is None:
        return [call() for call in calls]
    return list(streamed.lockstep(calls, lambda share: None))


def offload_device(model: Any) -> torch.device:
    """Return the device for tensors as large as the model's weights: the host if the model is
    streamed or sharded, else the model's."""
    on_device = stream_of(model) is None and not is_sharded(model)
    return model.device if on_device else torch.device("cpu")


def offload(model: Any, hidden: Tensor, buffer: Tensor | None = None) -> Tensor:
    """Return ``hidden`` on :func:`offload_device`; a streamed model copies it into ``buffer``, that
    of an earlier call, if given. Copies are ordered: a later one back sees the result."""
    streamed = stream_of(model)
    return streamed.offload(hidden, buffer) if streamed else hidden.to(offload_device(model))


@dataclass(slots=True)
class _Step:
    """One step of ``lockstep``: run only block ``index``, with the input ``state`` (None: the first
    block's input). ``index`` = number of blocks: run what follows the last block."""

    index: int
    state: Tensor | None
    output: Any = None


@dataclass(slots=True)
class _Replacement:
    """The module ``build(layer, tensors)`` in place of a block's layer ``name`` during its turn."""

    name: str
    layer: nn.Linear
    tensors: Tensors
    build: Build


@dataclass(slots=True)
class _Block:
    """A block's parameters, their tensors on the host, and its quantized layers."""

    parameters: list[nn.Parameter]
    host: list[Tensor]
    replaced: list[_Replacement] = field(default_factory=list)

    def tensors(self) -> list[Tensor]:
        """Return the block's tensors on the host, those of its quantized layers too."""
        return [
            *self.host,
            *(t for replacement in self.replaced for t in replacement.tensors.values()),
        ]


class Stream:
    """Runs decoder blocks in turn: one is on the device while the next is copied to it."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.root, self.blocks = decoder_blocks(model)
        self._blocks = []
        _move_rest(model, self.blocks, device)
        for index, block in enumerate(self.blocks):
            parameters = list(block.parameters())
            self._blocks.append(_Block(parameters, [p.data for p in parameters]))
            # The instance's own, so that hooks and transformers' wrappers stay around it.
            block.forward = partial(self._forward, index, block.forward)
        self._at: int | None = None  # the block that is on the device
        self._done: torch.cuda.Event | None = None  # of the work of the one before
        self._coming: tuple[int, list[Future[Tensor]]] | None = None
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="qbench-stream")
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._step: _Step | None = None
        # length of a block's output tuple; 0: it returns the hidden states without a tuple
        self._gives = 0

    def load_block(self, name: str) -> None:
        """Do what :func:`load_block` does."""
        if name.startswith(f"{self.root}."):
            self._turn(int(name.removeprefix(f"{self.root}.").partition(".")[0]))

    def replace(self, name: str, tensors: Tensors, build: Build) -> None:
        """Put ``build(layer, tensors)`` in the place of the linear layer ``name`` whenever its
        block runs. ``tensors`` lie on the host until then. The layer's own weight is dropped."""
        self._leave()
        self._coming = None
        index, _, local = name.removeprefix(f"{self.root}.").partition(".")
        block = self._blocks[int(index)]
        layer = self.blocks[int(index)].get_submodule(local)
        at = next(i for i, p in enumerate(block.parameters) if p is layer.weight)
        del block.parameters[at], block.host[at]
        layer.weight = nn.Parameter(torch.empty_like(layer.weight, device="meta"), False)
        block.replaced.append(_Replacement(local, layer, tensors, build))

    @property
    def replaced(self) -> list[str]:
        """Return the names of the quantized layers, in the model's order."""
        return [
            f"{self.root}.{index}.{replacement.name}"
            for index, block in enumerate(self._blocks)
            for replacement in block.replaced
        ]

    def lockstep(
        self, calls: Sequence[Callable[[], Tensor]], progress: Callable[[float], None]
    ) -> Iterator[Tensor]:
        """Yield the results of ``calls``, each of which runs the decoder once: all go through one
        block after the other, while their hidden states wait on the host. ``progress(share done)``
        is called, 0 to 1."""
        states: list[Tensor | None] = [None] * len(calls)
        for index in range(len(self.blocks)):
            for number, call in enumerate(calls):
                step = _Step(index, states[number])
                self._run(call, step)
                output = step.output[0] if self._gives else step.output
                states[number] = self.offload(output, states[number])
            progress((index + 1) / len(self.blocks))
        for number, call in enumerate(calls):
            yield self._run(call, _Step(len(self.blocks), states[number]))
            states[number] = None

    def _run(self, call: Callable[[], Any], step: _Step) -> Any:
        """Return the result of ``call`` with only ``step`` run; None if that ends the forward."""
        self._step = step
        try:
            return call()
        except Stop:
            return None
        finally:
            self._step = None

    def offload(self, hidden: Tensor, buffer: Tensor | None) -> Tensor:
        """See :func:`offload`; a tensor that is not on a GPU is returned as it is. Copies do not
        wait: one CUDA stream makes them in order."""
        if hidden.device.type != "cuda":
            return hidden
        if buffer is None:
            buffer = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
        return buffer.copy_(hidden, non_blocking=True)

    def _forward(
        self, index: int, block_forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Replace the forward of block ``index``: load and run it, or skip it if the current step
        is about another block."""
        step = self._step
        if step is not None:
            hidden, *rest = args
            if step.state is not None and index in (step.index, len(self.blocks) - 1):
                hidden = step.state.to(self.device, non_blocking=True)
            if index < step.index:
                return (hidden, *[None] * (self._gives - 1)) if self._gives else hidden
            args = hidden, *rest
        self._turn(index)
        output = block_forward(*args, **kwargs)
        self._gives = len(output) if isinstance(output, tuple) else 0
        if step is None:
            return output
        step.output = output
        raise Stop

    @torch.inference_mode(False)
    @torch.no_grad()
    def _turn(self, index: int) -> None:
        """Put block ``index`` on the device; start to copy the next one."""
        if self._at == index:
            return
        self._leave()
        coming, self._coming = self._coming, None
        reads = coming[1] if coming and coming[0] == index else self._read(index)
        tensors = [read.result() for read in reads]
        if self._copies is not None:
            for tensor in tensors:  # its memory is given back to the stream that copied it
                tensor.record_stream(torch.cuda.current_stream(self.device))
        block, on_device = self._blocks[index], iter(tensors)
        for parameter in block.parameters:
            parameter.data = next(on_device)
        for replacement in block.replaced:
            parts = {name: next(on_device) for name in replacement.tensors}
            self.blocks[index].set_submodule(
                replacement.name, replacement.build(replacement.layer, parts)
            )
        self._at, after = index, (index + 1) % len(self.blocks)
        self._coming = after, self._read(after)

    def _leave(self) -> None:
        """Give the current block its tensors on the host again."""
        if self._at is None:
            return
        block, modules = self._blocks[self._at], self.blocks[self._at]
        for parameter, host in zip(block.parameters, block.host, strict=True):
            parameter.data = host
        for replacement in block.replaced:
            modules.set_submodule(replacement.name, replacement.layer)
        self._at = None
        if self._copies is not None:
            self._done = torch.cuda.current_stream(self.device).record_event()

    def _read(self, index: int) -> list[Future[Tensor]]:
        """Start copying a block's tensors to the device, beside its work; return the copies as
        futures. They wait for the previous block's work, or many could wait there."""
        tensors = self._blocks[index].tensors()
        return [self._readers.submit(self._copy, tensor, self._done) for tensor in tensors]

    def _copy(self, tensor: Tensor, after: torch.cuda.Event | None) -> Tensor:
        """Copy a tensor to the device, after the event ``after``."""
        if self._copies is None:
            return tensor.to(self.device, copy=True)
        if after is not None:
            after.synchronize()
        with torch.cuda.stream(self._copies):
            copied = tensor.pin_memory().to(self.device, non_blocking=True)
            self._copies.record_event().synchronize()
        return copied
