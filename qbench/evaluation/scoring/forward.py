"""A batch's hidden states: the decoder over padded sequences, or over packs.

Both leave the LM head to ``logits``, which takes only the rows that are scored. In a pack every
prefix and suffix is a sequence of its own with its own keys, for attention that takes
``cu_seqlens`` with fewer queries than keys, as all of ours does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qbench.attention.kv_cache import KV_CACHE, READ, read_apart, rotate
from qbench.checkpoints.supported import model_support, unlike_a_pack
from qbench.errors import EvaluationError, UnavailableError
from qbench.evaluation.scoring.batching import PackedBatch, Packing
from qbench.evaluation.scoring.logits import is_out_of_memory, to_device
from qbench.evaluation.scoring.requests import Batch, Request
from qbench.streaming import together

NAME = "qbench-packed"


@dataclass(frozen=True, slots=True)
class Segments:
    """``cu_seqlens_q``, ``cu_seqlens_k`` int32 [S + 1]; ``keys`` [K] tokens whose keys are seen,
    or None where every segment sees just itself."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    longest_q: int
    longest_k: int
    keys: Tensor | None

    def to(self, device: torch.device, **options: Any) -> Segments:
        """For a block that lies on another device."""
        tensors = (self.cu_seqlens_q, self.cu_seqlens_k, self.keys)
        q, k, keys = (None if t is None else t.to(device, **options) for t in tensors)
        return replace(self, cu_seqlens_q=q, cu_seqlens_k=k, keys=keys)


def make_segments(pack: PackedBatch, device: torch.device) -> Segments:
    queries, keys = pack.segments()
    index = pack.key_index()
    cu_seqlens = [np.concatenate(([0], np.cumsum(n))).astype(np.int32) for n in (queries, keys)]
    return Segments(
        cu_seqlens_q=to_device(cu_seqlens[0], device),
        cu_seqlens_k=to_device(cu_seqlens[1], device),
        longest_q=int(queries.max()),
        longest_k=int(keys.max()),
        keys=None if index is None else to_device(index, device),
    )


@contextlib.contextmanager
def packed(model: Any) -> Iterator[str]:
    """Within it the model attends by ``qbench_segments``; gives the name of what does the work."""
    name = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        yield name
    finally:
        model.config._attn_implementation = name


def _attend_segments(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    qbench_segments: Segments,
    qbench_attention: str,
    **options: Any,
) -> tuple[Tensor, Any]:
    segments = qbench_segments
    query, key = rotate(module, query, key, options)
    once = read_apart(module, key, value)
    if once is not None:  # before keys are laid out for each segment that sees them
        key, value = once
        options[READ] = True
    if segments.keys is not None:
        key, value = (
            tensor.transpose(1, 2).index_select(1, segments.keys).transpose(1, 2)
            for tensor in (key, value)
        )  # tokens stay the outer dimension in memory
    # The pack's positions are no packed sequences in transformers' sense.
    options.pop("position_ids", None)
    return ALL_ATTENTION_FUNCTIONS[qbench_attention](
        module,
        query,
        key,
        value,
        None,
        cu_seq_lens_q=segments.cu_seqlens_q,
        cu_seq_lens_k=segments.cu_seqlens_k,
        max_length_q=segments.longest_q,
        max_length_k=segments.longest_k,
        **options,
    )


AttentionInterface.register(NAME, _attend_segments)


INPUTS = "qbench_inputs"  # attribute of a model whose activations are quantized, see quantizers


@contextlib.contextmanager
def unquantized_activations(model: nn.Module) -> Iterator[None]:
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


# Of a pack's hidden states, relative to those of single sequences. Rounding in 24 layers of
# bfloat16 stays far below it; an attention that sees other tokens does not.
PROBE_DIFFERENCE = 0.25
PROBE = ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 7, 8), (8, 6, 4))  # the first two share a prefix


class PaddedForward:
    """Sequences padded on the right, under the model's own causal mask."""

    def __init__(self, decoder: torch.nn.Module, device: torch.device) -> None:
        self.decoder, self.device = decoder, device
        # A KV cache copies keys and values, and where they lie decides how the products of eager
        # attention round (AVX2, odd lengths). HFLM has one; other attention rounds alike without.
        config = getattr(decoder, "config", None)
        self._cached = getattr(config, "_attn_implementation", None) == "eager"

    def ready(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __call__(self, batch: Batch) -> Tensor:
        ids = to_device(batch.ids, self.device)
        return self.decoder(ids, use_cache=self._cached)[0].flatten(0, 1)


class PackedForward:
    """Packs: prefix groups one after another, each attending to itself.

    Raises UnavailableError for models whose attention a pack cannot reproduce.
    """

    def __init__(self, model: Any, decoder: torch.nn.Module) -> None:
        self.model, self.decoder, self.device = model, decoder, model.device
        self._attention = model.config._attn_implementation
        check_attention(model)
        self._try_out()

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        with packed(self.model):
            yield

    def __call__(self, batch: PackedBatch) -> Tensor:
        return self.decoder(
            to_device(batch.ids, self.device),
            position_ids=to_device(batch.positions, self.device),
            use_cache=False,
            qbench_segments=make_segments(batch, self.device),
            qbench_attention=self._attention,
        )[0][0]

    def _try_out(self) -> None:
        """A small pack against its sequences one by one: some models hand nothing on to their
        attention, some see more of a row than attention shows. Activations and the KV cache stay
        unquantized, for their steps would hide what this is about."""
        requests = [Request([*ids, 0], len(ids), i) for i, ids in enumerate(PROBE)]
        (pack,) = Packing(max_length=64, batch_tokens=64).plan(requests, windows=False)
        batch = pack.collate(requests)
        rows = [batch.rows[batch.scored.row[list(batch.scored.request).index(i)]] for i in range(3)]

        def in_a_pack() -> Tensor:
            with self.ready():
                return self(batch)[rows].float()

        def alone(ids: Sequence[int]) -> Tensor:
            text = torch.tensor([ids], device=self.device)
            return self.decoder(text, use_cache=False)[0][0, -1].float()

        try:
            with torch.no_grad(), unquantized_activations(self.model):
                each = [partial(alone, ids) for ids in PROBE]
                found, *single = together(self.model, [in_a_pack, *each])
                plain = torch.stack(single)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise UnavailableError(self._refusal(f"{type(error).__name__}: {error}")) from error
        off = float((found - plain).norm() / plain.norm())
        if off > PROBE_DIFFERENCE:
            raise UnavailableError(self._refusal(f"hidden states are {off:.0%} off"))

    def _refusal(self, reason: str) -> str:
        lines = reason.strip().splitlines()
        return (
            f"{type(self.model).__name__} does not compute in a pack what it computes of single "
            f"sequences ({lines[0] if lines else reason}), so fast scoring does not fit it; "
            "use scoring: exact"
        )


def decoder_and_head(model: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Decoder and LM head, checked to be all there is between token ids and logits.

    Raises EvaluationError where the model's logits are not numbers, UnavailableError where it
    does more than these two.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if decoder is None or head is None:
        raise UnavailableError(
            f"{type(model).__name__} has no decoder and LM head that exact and fast scoring know; "
            "use scoring: lm-eval"
        )
    probe = torch.arange(1, 9, device=model.device)[None]
    calls = [
        lambda: model(probe, use_cache=False).logits,
        lambda: decoder(probe, use_cache=False)[0],
    ]
    with torch.no_grad():
        whole, hidden = together(model, calls)
        try:
            parts = head(hidden)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise UnavailableError(
                f"the decoder of {type(model).__name__} does not return the input of its LM head "
                f"({(str(error).splitlines() or [''])[0]}); use scoring: lm-eval"
            ) from error
    if not torch.isfinite(whole).all():
        raise EvaluationError(
            f"the logits of {type(model).__name__} are NaN or infinite on eight ordinary tokens, "
            "which no scoring mode can fix; check its weights, its quantizer and its dtype"
        )
    if not torch.equal(whole, parts):
        raise UnavailableError(
            f"{type(model).__name__} changes its logits after the LM head, by scaling or capping "
            "them, which exact and fast scoring do not do; use scoring: lm-eval"
        )
    return decoder, head


def check_attention(model: Any) -> None:
    """Raises UnavailableError for models whose attention a pack cannot reproduce."""
    config = model.config
    name = config._attn_implementation
    if not str(name).startswith(("qbench-", "flash_attention")):
        raise UnavailableError(
            f"fast scoring needs an attention that takes cu_seqlens, not {name!r}; use scoring: "
            "exact or another attention"
        )
    stated = config.to_dict()
    known = model_support(stated)
    by_table = known.slower if known.tried and known.scoring != "fast" else None
    if reason := by_table or unlike_a_pack(stated):
        raise UnavailableError(
            f"fast scoring computes in packs, and {type(model).__name__} does not: {reason}; use "
            "scoring: exact"
        )
