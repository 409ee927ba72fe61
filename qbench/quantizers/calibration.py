"""Text that calibrated quantizers see, as token ids, and a model walked over it block by block:
what each linear layer takes in."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from qbench.errors import DataError, QuantizationError, some
from qbench.quantizers.config import Progress
from qbench.quantizers.texts import CalibrationText, draw_windows
from qbench.streaming import Stop, decoder_blocks, hold


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """Token ids, int64 [samples, length], and their digest."""

    ids: Tensor

    @property
    def digest(self) -> str:
        """SHA-256 of shape and ids; the file's name and format play no part."""
        shape = f"{len(self.ids)}x{self.ids.shape[1]}:".encode()
        return hashlib.sha256(shape + self.ids.numpy().astype("<i8").tobytes()).hexdigest()


def read_calibration(text: CalibrationText, tokenizer: PreTrainedTokenizerBase) -> Calibration:
    """Windows of ``text``, without special tokens but a BOS at the beginning where it has one.

    Raises DataError for a malformed or changed file, one with too little text, or a tokenizer
    without the BOS that is asked for.
    """
    if text.bos and tokenizer.bos_token_id is None:
        raise DataError(
            "calibration text begins with BOS, but this tokenizer has none; set add_bos: false"
        )
    begin = [tokenizer.bos_token_id] if text.bos else []
    windows = draw_windows(
        text,
        # verbose=False: documents longer than the model's context are no mistake here.
        lambda one: tokenizer(one, add_special_tokens=False, verbose=False)["input_ids"],
        end=tokenizer.eos_token_id,
    )
    ids = [[*begin, *window] for window in windows]
    return Calibration(ids=torch.tensor(ids, dtype=torch.int64))


@torch.no_grad()
def watch_inputs(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    look: Callable[[str, Tensor], None],
    batches: Sequence[Tensor],
    progress: Progress = lambda what, done: None,
) -> None:
    """Run ``model`` on ``batches`` of token ids [B, T], and let ``look`` see by name what each of
    ``modules`` takes in, before anything else that hangs on them changes it."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _, arguments: look(name, arguments[0].detach())

    device = next(model.parameters()).device
    with _hooks(
        *(one.register_forward_pre_hook(hook(n), prepend=True) for n, one in modules.items())
    ):
        for number, ids in enumerate(batches):
            progress("inputs of layers", number / len(batches))
            model(input_ids=ids.to(device), use_cache=False)


# The walk over blocks


class BlockInputs:
    """The inputs of a model's blocks, one block after the other.

    ``root`` is the name of the list of ``blocks``. ``groups``: of each block, the linear layers to
    quantize in the order they run, those with one input together; for Llama q, k, v; o; gate, up;
    down. Layers with one input have one Hessian.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, nn.Linear],
        calibration: Calibration,
        batch_size: int,
    ) -> None:
        """``layers``: the linear layers to quantize, by name. Raises QuantizationError where the
        blocks, one after the other, are not what the model computes, do not hold all of
        ``layers``, or receive something beside hidden states that depends on the text."""
        self.root, self.blocks = _blocks(model, layers)
        batches = calibration.ids.split(batch_size)
        # Of a block, what it receives beside hidden states, by the batch's size: its own mask and
        # rotary angles, which differ between blocks where layer types are mixed.
        self._arguments: dict[tuple[int, int], dict[str, Any]] = {}
        firsts = {len(ids): ids for ids in (*batches, calibration.ids[:1])}
        for size, ids in firsts.items():
            received, self.groups = _trace(model, self.root, self.blocks, layers, ids)
            self._arguments |= {(i, size): rest for i, rest in enumerate(received)}
        self._states: list[Tensor] = []
        self._model, self._device = model, next(model.parameters()).device
        for ids in batches:
            hidden, rest = _first(model, self.blocks[0], ids)
            if not _equal(rest, self._arguments[0, len(ids)]):
                raise QuantizationError(
                    f"{type(model).__name__}: the other inputs of its blocks depend on the text, "
                    "not the hidden states alone; it cannot be calibrated block by block"
                )
            self._states.append(hold(model, hidden))

    def batches(self, index: int) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """What block ``index`` receives: hidden states [batch, length, hidden] and the rest."""
        for hidden in self._states:
            there = hidden.to(self._device, non_blocking=True)
            yield there, self._arguments[index, len(hidden)]

    @torch.no_grad()
    def hessians(self, index: int, layers: Sequence[str]) -> list[Tensor]:
        """2/n Σ x xᵀ over all n calibration tokens that reach each of the ``layers`` of block
        ``index``, which run in this order: float32 [in, in]; zeros where none does (an expert that
        is never chosen). A forward ends at the last of them."""
        block = self.blocks[index]
        sums: dict[str, Tensor] = {}
        tokens = dict.fromkeys(layers, 0)

        def add(name: str) -> Callable[[nn.Module, tuple], None]:
            def hook(_: nn.Module, arguments: tuple) -> None:
                x = arguments[0].reshape(-1, arguments[0].shape[-1])
                tokens[name] += len(x)
                product = _product(x)
                sums[name] = sums[name].add_(product) if name in sums else product
                if name == layers[-1]:
                    raise Stop

            return hook

        hooks = [block.get_submodule(n).register_forward_pre_hook(add(n)) for n in layers]
        with _hooks(*hooks):
            for hidden, rest in self.batches(index):
                try:
                    block(hidden, **rest)
                except Stop:
                    continue
        return [sums[name].mul_(2 / max(tokens[name], 1)) for name in layers]

    @torch.no_grad()
    def advance(self, index: int) -> None:
        """Take the step from block ``index`` to the next: its outputs are what that receives."""
        for number, (hidden, rest) in enumerate(self.batches(index)):
            output = _states(self.blocks[index](hidden, **rest))
            self._states[number] = hold(self._model, output, self._states[number])


def _product(x: Tensor) -> Tensor:
    """xᵀ x of x [tokens, in], float32 [in, in]. Products of two numbers of 16 bits are exact in
    float32, so a GPU's tensor cores add them up as they are: a tenth of the time of float32."""
    if x.is_cuda and len(x) and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x.T, x, out_dtype=torch.float32)
    x = x.float()
    return x.T @ x


def _blocks(model: nn.Module, layers: dict[str, nn.Linear]) -> tuple[str, nn.ModuleList]:
    """The decoder's blocks, which must hold all ``layers``, and the name of their list."""
    found = decoder_blocks(model)
    if found is None:
        raise QuantizationError(f"{type(model).__name__} has no list of blocks to calibrate")
    name, blocks = found
    outside = [n for n in layers if not n.startswith(f"{name}.")]
    if outside:
        raise QuantizationError(
            f"linear layers outside the blocks {name}: {', '.join(outside)}; set ignore: "
            f"[{', '.join(dict.fromkeys(n.rpartition('.')[2] for n in outside))}]"
        )
    return name, blocks


def _trace(
    model: nn.Module,
    root: str,
    blocks: nn.ModuleList,
    layers: dict[str, nn.Linear],
    ids: Tensor,
) -> tuple[list[dict[str, Any]], list[list[list[str]]]]:
    """How one forward goes through the blocks, which ends after the last: what each receives beside
    hidden states, and its layers by what they take in."""
    received: list[dict[str, Any]] = []
    groups: list[list[list[str]]] = []
    reached: set[str] = set()
    outputs: list[Tensor] = []  # of the block before
    # Of the block that runs: tensors are kept until it is done, so that none is mistaken for
    # another that lay in its place.
    order: list[tuple[str, Tensor, int]] = []

    def enter(block: nn.Module, args: tuple, kwargs: dict) -> None:
        index = len(received)
        if index >= len(blocks) or block is not blocks[index]:
            raise QuantizationError(f"{root}: its blocks do not run once each, in order")
        hidden, rest = _split(block, args, kwargs)
        if outputs and not _equal(hidden, outputs.pop()):
            raise QuantizationError(
                f"{root}.{index}: does not receive the output of the block before it; such a model "
                "cannot be calibrated block by block"
            )
        received.append(rest)

    def leave(block: nn.Module, _: tuple, output: Any) -> None:
        named: dict[tuple[int, int], list[str]] = {}
        for name, tensor, version in order:
            short = name.removeprefix(f"{root}.{len(groups)}.")
            named.setdefault((id(tensor), version), []).append(short)
        groups.append(list(named.values()))
        order.clear()
        outputs.append(_states(output))
        if block is blocks[-1]:
            raise Stop

    def reach(name: str) -> Callable[[nn.Module, tuple], None]:
        def note(_: nn.Module, arguments: tuple) -> None:
            order.append((name, arguments[0], arguments[0]._version))
            reached.add(name)

        return note

    with _hooks(
        *(block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks),
        *(block.register_forward_hook(leave) for block in blocks),
        *(layer.register_forward_pre_hook(reach(name)) for name, layer in layers.items()),
    ):
        _run(model, ids)
    if missing := sorted(set(layers) - reached):
        raise QuantizationError(f"calibration never reaches {some(missing, 3)}")
    return received, groups


def _first(model: nn.Module, block: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """What ``block`` receives: hidden states, and the rest."""
    seen: list[tuple[Tensor, dict[str, Any]]] = []

    def keep(_: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append(_split(block, args, kwargs))
        raise Stop

    with _hooks(block.register_forward_pre_hook(keep, with_kwargs=True)):
        _run(model, ids)
    return seen[0]


def _run(model: nn.Module, ids: Tensor) -> None:
    try:
        model(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
    except Stop:
        return


def _split(block: nn.Module, args: tuple, kwargs: dict) -> tuple[Tensor, dict[str, Any]]:
    """Hidden states, and the other arguments by name."""
    names = list(inspect.signature(type(block).forward).parameters)[1:]
    rest = {**dict(zip(names, args, strict=False)), **kwargs}
    return rest.pop(names[0]), rest


def _states(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first is second or torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_equal(first[k], second[k]) for k in first)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(_equal(a, b) for a, b in pairs)
    if type(first) is not type(second):
        return False
    if callable(getattr(first, "dense", None)):  # a mask that is made when a layer asks
        return first is second or _equal(first.dense(), second.dense())
    return first is second or bool(first == second)


@contextmanager
def _hooks(*handles: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
