"""Read calibration text as token ids, and compute the inputs of linear layers on it, block by block
of a model."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial, reduce
from queue import SimpleQueue
from threading import Thread, local
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedTokenizerBase

from qbench.errors import DataError, QuantizationError, some
from qbench.files import GIB
from qbench.machine import memory_gib
from qbench.progress import Advance
from qbench.quantizers.config import ignore_advice
from qbench.quantizers.texts import CalibrationText, draw_windows
from qbench.streaming import Stop, decoder_blocks, free_gpu_bytes, offload, offload_device

CORES = torch.get_num_threads()  # of this process, before quantizing sets it to one
PRODUCT_ROWS = 2048  # that a CPU multiplies at once in bfloat16: more leave a core's cache
STRIPS = {"cpu": (4, 256), "cuda": (8, 1024)}  # of xᵀ x: how many at most, and their least columns
Call = Callable[[Tensor], Any]  # of a block on hidden states


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """Holds calibration text as token ids, int64 [samples, length]."""

    ids: Tensor

    @property
    def digest(self) -> str:
        """Return the SHA-256 of shape and ids; the file's name and format play no part."""
        shape = f"{len(self.ids)}x{self.ids.shape[1]}:".encode()
        return hashlib.sha256(shape + self.ids.numpy().astype("<i8").tobytes()).hexdigest()


def read_calibration(text: CalibrationText, tokenizer: PreTrainedTokenizerBase) -> Calibration:
    """Return the windows of ``text`` as token ids, without special tokens except a BOS at the
    beginning if ``text.bos`` is true (None is replaced before, by ``cell.calibration_of``). Raises
    DataError for a malformed or changed file, too little text, or a tokenizer without the BOS that
    is needed."""
    if text.bos and tokenizer.bos_token_id is None:
        raise DataError(
            "calibration text shall begin with BOS, but the tokenizer has none; set "
            "evaluation.add_bos: false"
        )
    start = [tokenizer.bos_token_id] if text.bos else []
    windows = draw_windows(
        text,
        # verbose=False: documents longer than the model's context are no mistake here.
        lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
        end=tokenizer.eos_token_id,
    )
    ids = [[*start, *window] for window in windows]
    return Calibration(ids=torch.tensor(ids, dtype=torch.int64))


@torch.no_grad()
def watch_inputs(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    look: Callable[[str, Tensor], None],
    batches: Sequence[Tensor],
    progress: Advance = lambda done, total: None,
) -> None:
    """Run ``model`` on ``batches`` of token ids [B, T]; call ``look(name, input)`` for each call of
    each of ``modules``, before other hooks change the input."""

    def hook(name: str, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        look(name, arguments[0].detach())

    device = next(model.parameters()).device
    hooks = (m.register_forward_pre_hook(partial(hook, n), prepend=True)
             for n, m in modules.items())  # fmt: skip
    with _hooks(*hooks):
        for number, ids in enumerate(batches):
            progress(number, len(batches))
            model(input_ids=ids.to(device), use_cache=False)


# The walk over blocks


class SequentialCalibrator:
    """Compute the Hessians of a model's linear layers, one decoder block after the other. ``root``:
    the name of the list of ``blocks``. ``groups``: for each block, the names of the linear layers
    to quantize, in the order they run; those with the same input, and so the same Hessian, are one
    group. For Llama: q, k, v; o; gate, up; down."""

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, nn.Linear],
        calibration: Calibration,
        batch_size: int,
    ) -> None:
        """Run the calibration text up to the first block and trace the blocks once. ``layers``: the
        linear layers to quantize, by name. Raises QuantizationError if the model does not run its
        blocks one after the other, if they do not hold all of ``layers``, or if they receive
        something beside hidden states that depends on the text."""
        self.root, self.blocks = decoder_blocks(model)
        outside = [name for name in layers if not name.startswith(f"{self.root}.")]
        if outside:
            raise QuantizationError(
                f"linear layers outside the decoder blocks {self.root} cannot be calibrated: "
                f"{', '.join(outside)}; set {ignore_advice(outside, layers)}"
            )
        self._model, self._device = model, next(model.parameters()).device
        self._states: list[Tensor] = []
        # By batch size: each block with its other arguments, mask and rotary angles, which differ
        # between blocks if layer types are mixed.
        self._calls: dict[int, list[Call]] = {}
        self._beside: dict[int, list[Tensor]] = {}  # other tensors that the first block receives
        for ids in calibration.ids.split(batch_size):
            self._trace(layers, ids)

    def _trace(self, layers: dict[str, nn.Linear], ids: Tensor) -> None:
        """Run a batch up to the first block and keep its hidden states. The first batch of a size
        also runs through all blocks: how each is called, and which layers share an input, is
        kept."""
        traced, calls = self._beside.get(len(ids)), list[Call]()
        groups: list[list[list[str]]] = []
        reached: set[str] = set()
        output: Tensor | None = None  # of the block before
        # Inputs of the block that runs. They are kept until it is done, so that no new tensor can
        # have the id of an earlier one.
        order: list[tuple[str, Tensor, int]] = []

        def refuse(why: str) -> NoReturn:
            raise QuantizationError(
                f"{why}, so the model cannot be calibrated block by block; use rtn or hqq"
            )

        def enter(block: nn.Module, args: tuple, kwargs: dict) -> None:
            index = len(calls)
            if index >= len(self.blocks) or block is not self.blocks[index]:
                refuse(f"{self.root}: these blocks do not run once each, in order")
            options = dict(kwargs)
            hidden, *rest = args or (options.pop("hidden_states"),)
            if output is None:
                self._states.append(offload(self._model, hidden))
                beside = [x for x in tree_leaves((rest, options)) if isinstance(x, Tensor)]
                if traced is not None:
                    if not all(map(torch.equal, traced, beside)):
                        refuse(
                            f"{type(self._model).__name__}: inputs of the blocks beside hidden "
                            "states depend on the text"
                        )
                    raise Stop
                self._beside[len(ids)] = beside
                torch.set_num_threads(CORES)  # of what the blocks compute now nothing is kept
            elif not torch.equal(hidden, output):
                refuse(f"{self.root}.{index}: does not receive the output of the block before it")
            calls.append(lambda hidden: block(hidden, *rest, **options))

        def leave(block: nn.Module, _: tuple, given: Any) -> None:
            nonlocal output
            output = _states(given)
            named: dict[tuple[int, int], list[str]] = {}
            for name, tensor, version in order:
                short = name.removeprefix(f"{self.root}.{len(groups)}.")
                named.setdefault((id(tensor), version), []).append(short)
            groups.append(list(named.values()))
            order.clear()
            if block is self.blocks[-1]:
                raise Stop

        def reach(name: str, _: nn.Module, arguments: tuple) -> None:
            order.append((name, arguments[0], arguments[0]._version))
            reached.add(name)

        hooks = [layer.register_forward_pre_hook(partial(reach, n)) for n, layer in layers.items()]
        for block in self.blocks:
            hooks.append(block.register_forward_pre_hook(enter, with_kwargs=True))
            hooks.append(block.register_forward_hook(leave))
        threads = torch.get_num_threads()
        with _hooks(*hooks), suppress(Stop):
            self._model(input_ids=ids.to(self._device), use_cache=False)
        torch.set_num_threads(threads)
        if traced is not None:
            return
        if missing := sorted(set(layers) - reached):
            raise QuantizationError(
                f"calibration never reaches {some(missing, 3)}; leave out what the model does not "
                f"call: {ignore_advice(missing, layers)}"
            )
        self._calls[len(ids)], self.groups = calls, groups

    def run(self, index: int, batch: int) -> Any:
        """Return the output of block ``index`` for batch number ``batch``: hidden states [B, T, H],
        or a tuple that begins with them."""
        hidden = self._states[batch].to(self._device, non_blocking=True)
        return self._calls[len(hidden)][index](hidden)

    @torch.no_grad()
    def hessians(self, index: int, layers: Sequence[str]) -> list[Tensor | None]:
        """Return 2/n Σ x xᵀ, float32 [in, in], over the n calibration tokens that reach each of the
        ``layers`` (names within block ``index``); None without such tokens (an expert that is never
        chosen). The layers are listed in the order they run; a forward ends at the last of them."""
        block = self.blocks[index]
        sums: dict[str, Tensor] = {}
        tokens = dict.fromkeys(layers, 0)

        def add(name: str, _: nn.Module, arguments: tuple) -> None:
            x = arguments[0].reshape(-1, arguments[0].shape[-1])
            tokens[name] += len(x)
            with _exact_products(x):
                product = _product(x)
            sums[name] = sums[name].add_(product) if name in sums else product
            if name == layers[-1]:
                raise Stop

        hooks = [block.get_submodule(n).register_forward_pre_hook(partial(add, n)) for n in layers]
        with _hooks(*hooks):
            for batch in range(len(self._states)):
                with suppress(Stop):
                    self.run(index, batch)
        return [sums[name].mul_(2 / tokens[name]) if tokens[name] else None for name in layers]

    @torch.no_grad()
    def sequence(
        self, index: int, layers: Sequence[str], progress: Advance = lambda done, total: None
    ) -> Iterator[Tensor | None]:
        """Yield the Hessian of each of the ``layers`` of block ``index`` as ``hessians`` returns
        it, then compute the next block's inputs as ``advance`` does. The caller may change the
        weights of a layer and of those with the same input before it takes the next Hessian.
        ``progress`` is called with the number of blocks that are done, a fraction of this one
        counted, and of all. If there is memory for it, each batch runs through the block once and
        pauses at each layer, on a CPU one batch per core; else each Hessian takes a forward from
        the beginning of the block."""
        if not self._can_pause(index, layers):
            for number, name in enumerate(layers):
                progress(index + number / len(layers), len(self.blocks))
                yield self.hessians(index, [name])[0]
            self.advance(index)
            return
        block, at_once = self.blocks[index], CORES if self._device.type == "cpu" else 1
        hooks = [
            block.get_submodule(name).register_forward_pre_hook(partial(_pause, number))
            for number, name in enumerate(layers)
        ]
        calls = [partial(self.run, index, batch) for batch in range(len(self._states))]
        forwards = [_PausedForward(call, self._device) for call in calls]
        try:
            with _hooks(*hooks):
                for number in range(len(layers) + 1):
                    inputs: list[Tensor] = []
                    started = (forward.run_to(number) for forward in forwards)
                    for done, x in enumerate(_in_order(started, at_once), 1):
                        inputs += [] if x is None else [x]
                        share = (number + done / len(forwards)) / (len(layers) + 1)
                        progress(index + share, len(self.blocks))
                    if number < len(layers):
                        yield _hessian(inputs, at_once)
            for batch, before in enumerate(self._states):
                output = _states(forwards[batch].output)
                self._states[batch] = offload(self._model, output, before)
        finally:
            for forward in forwards:  # and free their tensors
                forward.run_to(None).thread.join()

    def _can_pause(self, index: int, layers: Sequence[str]) -> bool:
        """Return whether memory can hold the state of every batch that pauses at one of the
        ``layers``: about four hidden states, and two inputs of the widest layer."""
        if offload_device(self._model) != self._device:
            return False
        inputs = [self.blocks[index].get_submodule(name).in_features for name in layers]
        widest = max(inputs, default=0)
        needed = sum(
            (4 * states.numel() + 2 * widest * states.numel() // states.shape[-1]) * states.itemsize
            for states in self._states
        )
        if self._device.type == "cpu":
            return needed < memory_gib("cpu") * GIB / 2
        return needed < free_gpu_bytes() / 2

    @torch.no_grad()
    def advance(self, index: int) -> None:
        """Replace the hidden states by the outputs of block ``index``, the inputs of the next."""
        for batch, before in enumerate(self._states):
            self._states[batch] = offload(self._model, _states(self.run(index, batch)), before)


class _PausedForward:
    """A forward of a batch through a block, in a thread that pauses at layers. After the last layer
    ``output`` is what the block returns."""

    current = local()  # .forward: of the running thread

    def __init__(self, call: Callable[[], Any], device: torch.device) -> None:
        self.number, self.output = -1, None
        self.numbers: SimpleQueue[int | None] = SimpleQueue()
        self._results: SimpleQueue[Any] = SimpleQueue()
        arguments = call, device, torch.get_num_threads()
        self.thread = Thread(target=self._run, args=arguments, daemon=True)
        self.thread.start()

    def run_to(self, number: int | None) -> Self:
        """Let the thread run up to layer ``number`` (None: end it), and return at once."""
        self.numbers.put(number)
        return self

    def result(self) -> Tensor | None:
        """Wait for the layer's input [tokens, in], and return it; None if the layer is not reached.
        Raise the thread's error if it failed."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def pause(self, *results: Tensor | BaseException | None) -> None:
        """Hand over ``results``, and wait in the forward's own thread until it may go on. Raises
        Stop if it is ended."""
        for result in results:
            self._results.put(result)
        self.number = self.numbers.get()
        if self.number is None:
            raise Stop

    @torch.no_grad()
    def _run(self, call: Callable[[], Any], device: torch.device, threads: int) -> None:
        torch.set_num_threads(threads)  # which a thread does not have from its parent
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.current.forward = self
        with suppress(Stop):
            self.pause()
            try:
                self.output = call()
            except Stop:
                raise
            except Exception as error:
                self._results.put(error)
            while True:  # layers that were not reached, and the end
                self.pause(None)


def _in_order(started: Iterable[_PausedForward | Future], at_once: int) -> Iterator[Any]:
    """Yield the results of what the iterable ``started`` begins, in its order; at most ``at_once``
    run at a time."""
    running: deque[_PausedForward | Future] = deque()
    for each in started:
        running.append(each)
        if len(running) == at_once:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def _pause(number: int, _: nn.Module, arguments: tuple) -> None:
    """Pause the running forward at layer ``number`` until the layer is quantized."""
    forward = _PausedForward.current.forward
    while forward.number < number:
        forward.pause(None)
    if forward.number == number:
        forward.pause(arguments[0].reshape(-1, arguments[0].shape[-1]))


def _hessian(inputs: Sequence[Tensor], at_once: int) -> Tensor | None:
    """Return 2/n Σ xᵀ x over the n tokens of all ``inputs`` [tokens, in], added in their order;
    None if there are none. At most ``at_once`` products are computed and held at a time."""
    total, tokens = None, sum(map(len, inputs))
    with _exact_products(*inputs[:1]):
        for product in _products(inputs, at_once):
            total = product if total is None else total.add_(product)
    return total.mul_(2 / tokens) if tokens else None


def _products(inputs: Sequence[Tensor], at_once: int) -> Iterator[Tensor]:
    """Yield xᵀ x of each x in order, ``at_once`` computed at a time. Only several at a time run in
    threads: on a GPU, which computes one, cuBLAS warns of a new thread without a CUDA context."""
    if at_once == 1:
        yield from map(_product, inputs)
        return
    threads = torch.set_num_threads, (torch.get_num_threads(),)
    with ThreadPoolExecutor(at_once, "product", *threads) as pool:
        yield from _in_order((pool.submit(_product, x) for x in inputs), at_once)


@contextmanager
def _exact_products(*inputs: Tensor) -> Iterator[None]:
    """Make a CPU multiply float32 numbers as bfloat16 in the body if ``inputs`` are bfloat16: the
    products are exact and are summed in float32, three times as fast and with less error. This
    holds for all threads, so nothing else may be computed meanwhile."""
    with ExitStack() as after:
        if any(x.dtype == torch.bfloat16 and not x.is_cuda for x in inputs):
            products = torch.backends.mkldnn.matmul
            after.callback(setattr, products, "fp32_precision", products.fp32_precision)
            products.fp32_precision = "bf16"
        yield


def _product(x: Tensor) -> Tensor:
    """Return xᵀ x of ``x`` [tokens, in], float32 [in, in]. Products of two 16-bit numbers are exact
    in float32, so a GPU's tensor cores sum them directly. Only the upper half is computed, in
    strips: 0.65 of the time on a CPU at 1,536 columns and on an H200 at 14,336."""
    if x.is_cuda and len(x) and x.dtype in (torch.bfloat16, torch.float16):
        multiply = partial(torch.mm, out_dtype=torch.float32)
    elif not x.is_cuda and x.dtype == torch.bfloat16 and len(x) > PRODUCT_ROWS:
        return reduce(Tensor.add_, map(_product, x.split(PRODUCT_ROWS)))
    else:
        x, multiply = x.float(), torch.mm
    width, (most, narrowest) = x.shape[1], STRIPS[x.device.type]
    product = x.new_empty(width, width, dtype=torch.float32)
    step = max(narrowest, -(-width // most))
    for start in range(0, width, step):
        strip = slice(start, start + step)
        rows = multiply(x[:, strip].T, x[:, start:])
        product[strip, start:], product[start:, strip] = rows, rows.T
    return product


def _states(output: Any) -> Tensor:
    """Return the hidden states of a block's output."""
    return output[0] if isinstance(output, tuple) else output


def _hooks(*handles: RemovableHandle) -> ExitStack:
    """Return a context that removes the hooks at its end."""
    stack = ExitStack()
    for handle in handles:
        stack.enter_context(handle)
    return stack
