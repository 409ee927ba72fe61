"""Run a batch through a model: the decoder over padded sequences, or over packs, to hidden states;
then the LM head, for the rows that are scored alone, to log-likelihoods of requests.

In a pack every segment is a sequence of its own, whose keys are those of all that comes before it
too, for attention that takes ``cu_seqlens`` with fewer queries than keys, as all of ours does.

A matrix product adds up in an order that depends on its number of rows and on a row's index in it:
CPU libraries give a thread's last few rows to another kernel. Which sizes that concerns differs by
processor: 1–3 rows on one AMD EPYC, up to 15 on an Intel Xeon, and there any row of a 32,000-wide
head with two threads. So trials on the LM head itself find the rows that it must take to round as
HFLM's whole product does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qbench.attention.kernels.varlen import packed_bounds
from qbench.attention.quantized_kv import READ, read_apart
from qbench.attention.transformers import Mask
from qbench.checkpoints.find import moving_rope
from qbench.checkpoints.load import rounding_tolerance
from qbench.errors import EvaluationError, UnavailableError, first_line
from qbench.evaluation.scoring.batching import (
    Batch,
    JoinedBatch,
    PackedBatch,
    Packing,
    Scored,
    join,
    to_requests,
)
from qbench.evaluation.settings import ScoringSettings
from qbench.streaming import lockstep

WHOLE_BYTES = 2**30  # the most that a batch's whole logits may take; beyond, rows are taken out
SIZES = (65, 71, 100, 131, 160, 193)  # rows of products whose first rows are compared
MORE_SIZES = (257, 331, 515)  # with them those of a decoder's products
PARTS = ((1, 1), (3, 2), (17, 1), (45, 3), (101, 1))  # first row, multiples of ``multiple``
NAME = "qbench-packed"
WITH_MASKS = "qbench-packed-with-masks"
JOINED = "qbench-joined"
JOINED_TOKENS = 4096  # padded ones; of more, layers take no less time for each
_limits: dict[tuple[str, tuple[int, int]], int] = {}  # by attention and shape of a batch


def _attend_segments(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    qbench_keys: Tensor | None,
    qbench_bounds: Tensor,
    qbench_attention: str,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Attend within each segment of a pack. ``qbench_keys`` [K] are the tokens whose keys are seen,
    one segment after another; None if every segment sees just itself. ``qbench_bounds`` of the
    segments, as ``packed_bounds`` gives them, hold every token. ``options`` hold ``cu_seq_lens_q``
    and its like.
    """
    if qbench_attention.startswith("qbench-"):
        options["qbench_bounds"] = qbench_bounds
    once = read_apart(module, key, value)
    if once is not None:  # before keys are laid out for each segment that sees them
        key, value = once
        options[READ] = True
    if qbench_keys is not None:
        key, value = (
            tensor.transpose(1, 2).index_select(1, qbench_keys).transpose(1, 2)
            for tensor in (key, value)
        )  # tokens stay the outer dimension in memory
    # The pack's positions are no packed sequences in transformers' sense.
    options.pop("position_ids", None)
    attention = ALL_ATTENTION_FUNCTIONS[qbench_attention]
    return attention(module, query, key, value, None, **options)


def _mask_window(*_: Any, local_size: int | None = None, **__: Any) -> Mask:
    """Return a mask that holds nothing but the number of keys that its class's mask lets see."""
    return Mask(dense=lambda: torch.empty(0), window=local_size)


def _require_window(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Attend within segments. Raises UnavailableError if the layer's window, which segments go by,
    is not its mask's: windows are longer than a probe's texts.
    """
    window, of_mask = options.get("sliding_window"), getattr(attention_mask, "window", None)
    if window != of_mask:
        raise UnavailableError(f"a layer's window is {window}, and its mask's is {of_mask}")
    return _attend_segments(module, query, key, value, None, **options)


def _attend_padded(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    qbench_shapes: Sequence[tuple[int, int]],
    qbench_tokens: Tensor,
    qbench_places: Tensor,
    qbench_repeats: Tensor,
    qbench_attention: str,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Attend within each padded batch of ``SharedTokens``, in the shape that it has alone. Raises
    UnavailableError for a layer with a window, _OtherBits if a batch's shape rounds a token that it
    shares otherwise than another's."""
    if getattr(attention_mask, "window", None) is not None:
        raise UnavailableError("batches are joined without windows")
    once = read_apart(module, key, value)
    if once is not None:
        key, value = once
        options[READ] = True
    options.pop("position_ids", None)
    attention = ALL_ATTENTION_FUNCTIONS[qbench_attention]
    tokens, outputs = [each[0].transpose(0, 1) for each in (query, key, value)], []
    sizes = [count * length for count, length in qbench_shapes]
    for batch, shape in zip(qbench_tokens.split(sizes), qbench_shapes, strict=True):
        parts = [  # tokens stay the outer dimension in memory
            each.index_select(0, batch).unflatten(0, shape).transpose(1, 2) for each in tokens
        ]
        outputs.append(attention(module, *parts, None, **options)[0].flatten(0, 1))
    output = torch.cat(outputs)
    taken = output.index_select(0, qbench_places)
    off = output[qbench_repeats] != taken[qbench_tokens[qbench_repeats]]
    if off.any():
        raise _OtherBits(qbench_repeats[off.flatten(1).any(1)].numpy())
    return taken[None], None


class _OtherBits(Exception):
    """Says which tokens of joined batches, as indexes of all, attention rounds otherwise."""


AttentionInterface.register(NAME, _attend_segments)
AttentionInterface.register(JOINED, _attend_padded)
AttentionMaskInterface.register(JOINED, _mask_window)
AttentionInterface.register(WITH_MASKS, _require_window)
AttentionMaskInterface.register(WITH_MASKS, _mask_window)


def rope_limit(config: Any) -> tuple[str | None, int | None]:
    """Return what makes logits depend on the longest text of a batch, a kind of rotary embedding or
    ``top-k`` keys, and the number of tokens up to which they do not; (None, None) for other models.
    ``config``: the text model's; may be None. A top-k over keys (DeepSeek V3.2, GLM-MoE-DSA)
    chooses among equal scores by the text's length."""
    kind = None if config is None else moving_rope(config.to_dict())
    if kind is None and getattr(config, "index_topk", None):
        return "top-k", config.index_topk
    if kind is None:
        return None, None
    if kind.startswith("dynamic"):
        return kind, config.max_position_embeddings
    rope = config.rope_parameters
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    name = "original_max_position_embeddings"
    return kind, min(part[name] for part in parts if name in part)


def _fused(decoder: torch.nn.Module, device: torch.device) -> list[Any]:
    """Return the functions of ``decoder`` that fused kernels replace on a GPU, with their bits."""
    if device.type != "cuda" or find_spec("triton") is None:
        return []
    from qbench.attention.kernels.fused import replacements  # which imports Triton

    return replacements(decoder)


@contextmanager
def _replaced(replacements: Sequence[Any]) -> Iterator[None]:
    """Replace functions by fused ones within the body."""
    for each in replacements:
        each.put(each.fused)
    try:
        yield
    finally:
        for each in replacements:
            each.put(each.original)


class PaddedForward:
    """The decoder over sequences padded on the right, under the model's own causal mask."""

    def __init__(self, decoder: torch.nn.Module, device: torch.device) -> None:
        self.decoder, self.device = decoder, device
        self.fused = _fused(decoder, device)
        # A KV cache copies keys and values, and where they lie decides how the products of eager
        # attention round (AVX2, odd lengths). HFLM has one; other attention rounds alike without.
        config = getattr(decoder, "config", None)
        self._cached = getattr(config, "_attn_implementation", None) == "eager"
        kind, self._rope_limit = rope_limit(config)
        self._keeps_angles = kind is not None and kind.startswith("dynamic")

    def __call__(self, batch: Batch) -> Tensor:
        """Return the hidden states [B · L, H] of a padded batch."""
        ids = to_device(batch.ids, self.device)
        if self._keeps_angles and ids.shape[1] > (self._rope_limit or 0):
            self.decoder(ids[:1, :1], use_cache=False)  # forgets the angles of a longer batch
        with _replaced(self.fused):
            return self.decoder(ids, use_cache=self._cached)[0].flatten(0, 1)


class PackedForward:
    """The decoder over packs, each segment attending to what comes before it in its inputs. Raises
    UnavailableError for models whose attention a pack cannot reproduce."""

    def __init__(self, model: Any, decoder: torch.nn.Module, *, name: str = NAME) -> None:
        self.model, self.decoder, self.device = model, decoder, model.device
        self._name = name
        self._attention = model.config._attn_implementation
        self.fused = _fused(decoder, model.device)
        if not str(self._attention).startswith(("qbench-", "flash_attention")):
            raise UnavailableError(
                f"packs need an attention that takes cu_seqlens, not {self._attention!r}; use "
                "scoring: exact"
            )

    def __call__(self, batch: PackedBatch) -> Tensor:
        """Return the hidden states [T, H] of a pack."""
        self.model.config._attn_implementation = self._name
        try:
            with _replaced(self.fused):
                return self.decoder(
                    to_device(batch.ids, self.device),
                    position_ids=to_device(batch.positions, self.device),
                    use_cache=False,
                    **self._options(batch),
                    qbench_attention=self._attention,
                )[0][0]
        finally:
            self.model.config._attn_implementation = self._attention

    def _options(self, batch: Any) -> dict[str, Any]:
        """Return what the attention function is told of a pack."""
        lengths = (batch.cu_seqlens_q, batch.cu_seqlens_k)
        bounds = packed_bounds(*map(torch.from_numpy, lengths))
        return {
            "cu_seq_lens_q": to_device(batch.cu_seqlens_q, self.device),
            "cu_seq_lens_k": to_device(batch.cu_seqlens_k, self.device),
            "max_length_q": int(np.diff(batch.cu_seqlens_q).max()),
            "max_length_k": int(np.diff(batch.cu_seqlens_k).max()),
            "qbench_keys": None if batch.keys is None else to_device(batch.keys, self.device),
            "qbench_bounds": to_device(bounds, self.device),
        }


class JoinedForward(PackedForward):
    """The decoder over padded batches: ``padded`` if they are not joined."""

    def __init__(self, model: Any, padded: PaddedForward, multiple: int, least: int) -> None:
        super().__init__(model, padded.decoder, name=JOINED)
        self.padded, self._multiple, self.least = padded, multiple, least

    def __call__(self, batch: Any) -> Tensor:
        """Return the hidden states [N, H] of a padded batch's tokens, or of joined ones'."""
        if not isinstance(batch, JoinedBatch):
            return self.padded(batch)
        while True:
            shared = batch.share(self._multiple, self.least, self._limit)
            try:
                return super().__call__(shared)[torch.from_numpy(shared.tokens)]
            except _OtherBits as error:
                [indexes] = error.args
            ends = np.cumsum(np.prod(batch.shapes, axis=1))
            for i in np.unique(batches := np.searchsorted(ends, indexes, side="right")):
                positions = (indexes[batches == i] - ends[i]) % batch.shapes[i][1]
                _limits[self._attention, batch.shapes[i]] = positions.min()

    def _limit(self, shape: tuple[int, int]) -> int:
        """Return how many tokens of a text in a batch of ``shape`` have the bits that they have in
        others, as far as was seen: vectors hold eight keys, and what is left rounds otherwise."""
        return _limits.get((self._attention, shape), shape[1] // 8 * 8)

    def _options(self, batch: Any) -> dict[str, Any]:
        tensors = {k: torch.from_numpy(getattr(batch, k)) for k in ("tokens", "places", "repeats")}
        return {f"qbench_{k}": v for k, v in {"shapes": batch.shapes, **tensors}.items()}


@torch.no_grad()
def joined_forward(
    model: Any, padded: PaddedForward, product: MatmulRounding
) -> JoinedForward | None:
    """Return a forward that takes joined batches too, if their hidden states on a CPU are to the
    bit those of each batch alone: in trials each matrix takes every token once and rounds rows
    alike, as that of the LM head (``product``), and two random batches are the same. Else None. A
    batch of fewer tokens than its ``least`` must not be joined."""
    decoder, device = padded.decoder, model.device
    matrices = {module for module in decoder.modules() if hasattr(module, "in_features")}
    rest = [m for m in decoder.modules() if m not in matrices and type(m) is not torch.nn.Embedding]
    kinds = {(type(m), m.in_features, m.out_features): m for m in matrices}
    if (
        device.type != "cpu"
        or not product.stable
        or not str(model.config._attn_implementation).startswith("qbench-")
        or rope_limit(model.config.get_text_config())[0] is not None
        or any(p.dim() > 1 for m in rest for p in m.parameters(recurse=False))
    ):
        return None
    try:
        needed = [least_rows(matrix, model.dtype) for matrix in kinds.values()]
    except Exception:  # a class may not take rows alone, or of this dtype
        return None
    if None in needed:
        return None
    least, none, taken = max(product.rows + 1, *needed), np.zeros(0, dtype=np.int64), list[int]()

    def note(module: torch.nn.Module, given: Any) -> None:
        if module in matrices:
            taken.append(given[0].shape[:-1].numel())

    texts = -(-least // 32)
    ids = np.arange(64 * texts).reshape(2, texts, 32) % len(model.get_input_embeddings().weight)
    ids[:, 1, :9] = ids[:, 0, :9]  # a beginning that two texts share
    scored = {"scored": Scored(none, none, none), "request_indices": none, "counts": none}
    batches = [Batch(ids=each, rows=np.arange(each.size), **scored) for each in ids]
    try:
        with torch.nn.modules.module.register_module_forward_pre_hook(note):
            alone = torch.cat([padded(batch) for batch in batches])
        forward = JoinedForward(model, padded, product.multiple, least)
        same = torch.equal(alone, forward(join(batches)))
    except Exception:  # a class may not take positions or options
        return None
    return forward if same and taken == [ids[0].size] * 2 * len(matrices) else None


class LMHead:
    """What follows the decoder: the LM head's matrix product ``linear``, and ``finish``, the
    scaling or capping that some classes add (``plain``: none)."""

    def __init__(self, model: Any, *, plain: bool = False) -> None:
        self.linear = model.get_output_embeddings()
        self.device = model.device
        self._model, self.plain = model, plain
        self._modules = {"decoder": decoder_of(model), "head": self.linear}

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.finish(self.linear(hidden))

    def finish(self, logits: Tensor) -> Tensor:
        """Return the products ``logits`` [R, V] scaled and capped as the model's class does. Its
        forward is run with decoder and LM head replaced by constants."""
        if self.plain:
            return logits
        names = {module: name for name, module in self._model.named_modules()}
        places = {part: names[module] for part, module in self._modules.items()}
        states = MoeModelOutputWithPast(last_hidden_state=logits.new_zeros(1, 1, 1))
        for part, value in {"decoder": states, "head": logits}.items():
            self._model.set_submodule(places[part], _Constant(value))
        try:
            ids = torch.zeros(1, 1, dtype=torch.long, device=logits.device)
            return self._model.forward(input_ids=ids, use_cache=False).logits
        finally:
            for part, module in self._modules.items():
                self._model.set_submodule(places[part], module)


class _Constant(torch.nn.Module):
    """A module that returns ``value`` whatever it is given."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._value = value

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._value


def decoder_of(model: Any) -> Any:
    """Return the module that computes hidden states of token ids; None if there is none."""
    decoder = model.get_decoder()
    return getattr(model, "model", None) if decoder is model else decoder  # as of Llama 4


def decoder_and_head(model: Any, remedy: str = "") -> tuple[torch.nn.Module, LMHead]:
    """Return decoder and LM head, after checking that they alone turn token ids into logits. Raises
    EvaluationError if logits are not numbers, UnavailableError, ending in ``remedy``, if the model
    does more than these two."""
    decoder, linear = decoder_of(model), model.get_output_embeddings()
    if decoder is None or linear is None:
        raise UnavailableError(
            f"{type(model).__name__} has no decoder and LM head that exact and fast scoring can "
            f"use{remedy}"
        )
    probe = torch.arange(1, 9, device=model.device)[None]
    calls = [
        lambda: model(probe, use_cache=False).logits,
        lambda: decoder(probe, use_cache=False)[0],
    ]
    with torch.no_grad():
        logits, hidden = lockstep(model, calls)
        if not torch.isfinite(logits).all():
            raise EvaluationError(
                f"the logits of {type(model).__name__} are NaN or infinite on eight ordinary "
                "tokens, which no scoring mode can fix; check its weights, its quantizer and its "
                "dtype"
            )
        for plain in (True, False):
            head = LMHead(model, plain=plain)
            try:
                rows = linear(hidden)[0].split(1)  # each finished alone: no row changes another
                if torch.equal(logits[0], torch.cat([head.finish(row) for row in rows])):
                    return decoder, head
            except (AttributeError, RuntimeError, TypeError):
                continue  # states of another width, or a forward that takes more than a decoder
    raise UnavailableError(
        f"the logits of {type(model).__name__} do not follow from its decoder's hidden states and "
        f"its LM head alone: something lies between the two{remedy}"
    )


def fit_settings(model: Any, settings: ScoringSettings) -> tuple[ScoringSettings, str]:
    """Return ``settings`` with the fastest scoring that suits ``model`` (fast in packs, fast in
    padded rows or exact, lm-eval), and a line with the measurement that rules out faster ones, ""
    if there is none. Raises EvaluationError if logits are not numbers."""
    if settings.mode == "lm-eval":
        return settings, ""
    try:
        decoder, _ = decoder_and_head(model)
    except UnavailableError as error:
        slower = replace(settings, mode="lm-eval", batch_tokens=None, sample=0)
        return slower, str(error)
    if settings.mode == "fast" and (problem := packing_problem(model, decoder)):
        return replace(settings, packed=False), f"texts stand in rows of a batch: {problem}"
    return settings, ""


def packing_problem(model: Any, decoder: torch.nn.Module) -> str | None:
    """Return why packing changes the hidden states that ``decoder`` computes of texts, as a line;
    None if it does not."""
    if moving := moving_rope(model.config.to_dict()):
        return f"{moving} rotary angles depend on the batch"
    try:
        off = packing_difference(model, decoder)
    except Exception as error:  # a class may not take a pack's positions or options
        return f"{type(model).__name__} takes no packs ({first_line(error)})"
    if off <= rounding_tolerance(model):
        return None
    return f"packing texts changes their hidden states by {off:.2g} of their size"


@torch.no_grad()
def packing_difference(model: Any, decoder: torch.nn.Module) -> float:
    """Return ‖packed − single‖ / ‖single‖ of the hidden states of eight short texts, of which two
    share each beginning: the 80th percentile over tokens, since rounding may send single tokens to
    other experts.

    Raises UnavailableError if a layer's attention in a pack has another window than its mask.
    """
    ids = (np.arange(1, 65) * 7 % len(model.get_input_embeddings().weight)).tolist()
    texts = [(ids[i : i + 6], ids[i + j : i + j + 3]) for i in range(0, 64, 16) for j in (6, 10)]
    requests = to_requests((*pair, owner) for owner, pair in enumerate(texts))
    [pack] = Packing(max_length=len(ids), batch_tokens=1024).plan(requests)
    batch = pack.collate(requests)
    packed = PackedForward(model, decoder, name=WITH_MASKS)(batch)
    packed = packed[to_device(batch.rows[batch.scored.row], model.device)].float()
    single = []
    for index in batch.request_indices:
        row = np.asarray([[*texts[index][0], *texts[index][1][:-1]]])
        states = decoder(to_device(row, model.device), use_cache=False)[0][0]
        single.append(states[-len(texts[index][1]) :].float())
    expected = torch.cat(single)
    off = (packed - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(off.quantile(0.8))


# --- from hidden states to log-likelihoods


@dataclass(frozen=True, slots=True)
class MatmulRounding:
    """How the LM head's product rounds, as ``probe_matmul`` measured it. Rows may be taken out of
    batches of more than ``rows`` rows, filled up to a ``multiple``; never if ``stable`` is False.
    """

    rows: int
    multiple: int
    stable: bool

    def projection(self, total: int, chosen: Tensor, row_bytes: int) -> Projection:
        """Return how the rows ``chosen`` [R] of a batch of ``total`` rows go through the head:
        alone, padded, or as part of the whole. ``row_bytes``: size of one row of logits."""
        few = 0 < total <= self.rows
        if (few or not self.stable) and total * row_bytes <= WHOLE_BYTES:
            return Projection(total=total, chosen=chosen)
        return Projection(multiple=self.multiple)


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """How rows [R, H] go through an LM head: filled up to a ``multiple``, or, if ``chosen`` [R] is
    given, at these indexes of a product of ``total`` rows.
    """

    multiple: int = 1
    total: int = 0
    chosen: Tensor | None = None

    def of(self, head: Callable[[Tensor], Tensor], rows: Tensor) -> Callable[[int, int], Tensor]:
        """Return a function (first, last) that gives the logits [last − first, vocabulary] of these
        of the ``rows`` [R, H], by ``head``. The product's shape depends only on the part, so that
        two heads round alike."""
        if self.chosen is not None:
            inputs = rows.new_zeros(self.total, rows.shape[1]).index_copy_(0, self.chosen, rows)
            logits = head(inputs)[self.chosen]
            return lambda first, last: logits[first:last]
        missing = -len(rows) % self.multiple
        filled = functional.pad(rows, (0, 0, 0, missing)) if missing else rows

        def part(first: int, last: int) -> Tensor:
            end = last + (first - last) % self.multiple
            return head(filled[first:end])[: last - first]

        return part


@torch.no_grad()
def least_rows(matrix: torch.nn.Module, dtype: torch.dtype) -> int | None:
    """Return how many rows a product by ``matrix`` on a CPU must have to round each of them as one
    of JOINED_TOKENS rows does, as far as trials tell: libraries multiply few rows in another order,
    the fewer the wider. None if they are more than ``MORE_SIZES``."""
    generator, sizes = torch.Generator().manual_seed(0), (*SIZES, *MORE_SIZES)
    x = torch.randn(JOINED_TOKENS, matrix.in_features, generator=generator).to(dtype)
    product = matrix(x)
    for least, fewer in itertools.pairwise((None, *reversed(sizes), 0)):
        if fewer and not torch.equal(matrix(x[:fewer]), product[:fewer]):
            return least
    return sizes[0]


def probe_matmul(head: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> MatmulRounding:
    """Measure how many rows the head's product in ``dtype`` needs to round as a full product does:
    compare parts of a product of random rows with the same rows of the whole. On a GPU nothing is
    measured: rows are taken out freely."""
    if device.type != "cpu":  # no claim to the bit there
        return MatmulRounding(rows=0, multiple=1, stable=True)
    width = getattr(head, "in_features", None) or head.weight.shape[-1]
    threads = torch.get_num_threads()
    multiple = 16 * threads
    generator = torch.Generator().manual_seed(0)
    longest = max(200, PARTS[-1][0] + max(n for _, n in PARTS) * multiple)
    x = torch.randn(longest, width, generator=generator).to(dtype)
    with torch.no_grad():
        product = head(x)
        stable = all(torch.equal(head(x[:n]), product[:n]) for n in SIZES) and all(
            torch.equal(head(x[i : i + n * multiple]), product[i : i + n * multiple])
            for i, n in PARTS
        )
    return MatmulRounding(rows=max(64, 4 * threads**2), multiple=multiple, stable=stable)


LOG_PROBABILITY_BYTES = 256 * 1024**2  # the most that logits and log-probabilities take


@dataclass(frozen=True, slots=True)
class LogitsPart:
    """Rows ``first`` to ``last`` of a batch: ``logits`` and ``log_probabilities`` [last − first,
    vocabulary] on the model's device, to be neither changed nor kept. The latter are None where a
    kernel gives those of the scored tokens alone.
    """

    first: int
    last: int
    logits: Tensor
    log_probabilities: Tensor | None


class Observer(Protocol):
    """An object that sees every scored row in the forward pass that scores it.

    Rows come in no particular order. Each index comes at least once. It comes again where a batch
    ran out of memory and was repeated, so keep results by index.
    """

    def begin(self, instances: Sequence[object], lengths: Sequence[int], head: Any) -> Observer:
        """Return the observer of a call, whose other methods are called with its rows; the next
        call may begin before this one's device has done its work. ``instances`` are its requests in
        order (lm-eval's ``Instance``: ``task_name``, ``doc_id``, ``idx``), ``lengths`` how many
        tokens of each are scored, ``head`` the LM head (``LMHead``)."""

    def prepare(self, scored: Scored) -> Any:
        """Return what ``batch`` takes of one forward's rows. A thread calls this while the device
        computes the rows before; it may be called again, and for rows that never come."""

    def batch(
        self, prepared: Any, hidden: Tensor, projection: Projection
    ) -> Callable[[LogitsPart], None] | None:
        """Take one forward's rows, and return a function that is called with each part of their
        logits, or None. ``hidden`` [R, H] are the LM head's input rows, still being computed where
        the device is asynchronous. ``projection`` says how they go through it."""

    def end(self) -> Callable[[], None]:
        """End a call, whose rows are all queued on the device. Return a function that waits for
        them and stores the results."""


@dataclass(frozen=True, slots=True)
class RowScores:
    """One value per scored token, on the device: its log-probability in nats and whether it was the
    likeliest token.
    """

    log_probability: Tensor
    likeliest: Tensor


def score_rows(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    scored: Scored,
    projection: Projection,
    *,
    softmax_dtype: torch.dtype | None,
    at_once: int,
    by_kernel: bool,
    watch: Callable[[LogitsPart], None] | None,
) -> RowScores:
    """Apply LM head and log-softmax to ``hidden`` [R, H], ``at_once`` rows at a time (rounded up to
    ``projection.multiple``). Return the log-probability of each token ``scored`` and whether it was
    the likeliest, in their order. ``softmax_dtype`` None: the logits' own dtype. ``by_kernel``: not
    by PyTorch's log-softmax, whose sums are rounded otherwise. ``watch``, if given, is called with
    every part."""
    order = np.argsort(scored.row, kind="stable")
    rows = scored.row[order]
    indices = to_device(
        np.stack((rows, scored.token[order], np.argsort(order), scored.row, scored.token)),
        hidden.device,
    )
    count, logits_of = len(hidden), projection.of(head, hidden)
    picked, tops = [], []
    at_once += -at_once % projection.multiple
    for first in range(0, count, at_once):
        last = min(first + at_once, count)
        logits = logits_of(first, last)
        low, high = np.searchsorted(rows, (first, last))
        row, token = indices[0, low:high] - first, indices[1, low:high]
        log_probabilities = None
        if by_kernel:
            from qbench.evaluation.logits import log_sums  # which imports Triton

            sums, top = log_sums(logits)
            picked.append(logits[row, token] - sums[row])
        else:
            log_probabilities = functional.log_softmax(logits, dim=-1, dtype=softmax_dtype)
            picked.append(log_probabilities[row, token])
            top = log_probabilities.argmax(dim=-1)
        tops.append(top)
        if watch is not None:
            watch(LogitsPart(first, last, logits, log_probabilities))
    return RowScores(torch.cat(picked)[indices[2]], torch.cat(tops)[indices[3]] == indices[4])


def to_device(array: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return a copy on ``device`` without waiting for work already queued there; on a CPU the
    memory may be shared with ``array``."""
    tensor = torch.as_tensor(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> Callable[[], list[Tensor]]:
    """Queue copies of ``tensors`` in host memory, behind what computes them. Return a function that
    waits for these alone, not for work queued later, and returns them."""
    copies, done = [tensor.to("cpu", non_blocking=True) for tensor in tensors], None
    if any(tensor.is_cuda for tensor in tensors):
        done = torch.cuda.current_stream(tensors[0].device).record_event()

    def wait() -> list[Tensor]:
        if done is not None:
            done.synchronize()
        return copies

    return wait


LogLikelihood = tuple[float, bool]  # in nats, and whether every token was the likeliest


def in_order(
    results: Sequence[tuple[Batch, RowScores]], copied: Sequence[Tensor], *, exact: bool
) -> list[LogLikelihood]:
    """Return the log-likelihood of each request, in input order, from ``results``, batches in any
    order, of which ``copied`` are all log-probabilities and all flags ``likeliest`` in host memory.
    ``exact``: summed by torch in the dtype of the log-probabilities, which is HFLM's rounding; else
    in float64."""
    values, likeliest = copied[0], copied[1].numpy()
    order = np.argsort(np.concatenate([batch.request_indices for batch, _ in results]))
    counts = np.concatenate([batch.counts for batch, _ in results])
    firsts = np.cumsum(counts) - counts
    greedy = np.logical_and.reduceat(likeliest, firsts)
    if exact:
        ends = (firsts + counts).tolist()
        parts = (values[a:b] for a, b in zip(firsts.tolist(), ends, strict=True))
        sums = np.asarray([float(part.sum()) for part in parts])
    else:
        sums = np.add.reduceat(values.double().numpy(), firsts)
    return list(zip(sums[order].tolist(), greedy[order].tolist(), strict=True))
