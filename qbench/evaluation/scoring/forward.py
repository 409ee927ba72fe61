"""A batch's hidden states: the decoder over padded sequences, or over packs.

Both leave the LM head to ``logits``, which takes only the rows that are scored. In a pack every
prefix and suffix is a sequence of its own with its own keys, for attention that takes
``cu_seqlens`` with fewer queries than keys, as all of ours does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qbench.attention.quantized_kv import READ, read_apart, rotate
from qbench.checkpoints.supported import model_support
from qbench.errors import EvaluationError, UnavailableError
from qbench.evaluation.scoring.batching import PackedBatch
from qbench.evaluation.scoring.logits import to_device
from qbench.evaluation.scoring.requests import Batch
from qbench.streaming import together

NAME = "qbench-packed"


def _attend_segments(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    qbench_keys: Tensor | None,
    qbench_attention: str,
    **options: Any,
) -> tuple[Tensor, Any]:
    """``qbench_keys`` [K]: the tokens whose keys are seen, one segment after another; None where
    every segment sees just itself. ``options`` hold ``cu_seq_lens_q`` and its like."""
    query, key = rotate(module, query, key, options)
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


AttentionInterface.register(NAME, _attend_segments)


class PaddedForward:
    """Sequences padded on the right, under the model's own causal mask."""

    def __init__(self, decoder: torch.nn.Module, device: torch.device) -> None:
        self.decoder, self.device = decoder, device
        # A KV cache copies keys and values, and where they lie decides how the products of eager
        # attention round (AVX2, odd lengths). HFLM has one; other attention rounds alike without.
        config = getattr(decoder, "config", None)
        self._cached = getattr(config, "_attn_implementation", None) == "eager"

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
        if not str(self._attention).startswith(("qbench-", "flash_attention")):
            raise UnavailableError(
                f"fast scoring needs an attention that takes cu_seqlens, not {self._attention!r}; "
                "use scoring: exact or another attention"
            )
        can = model_support(model.config.to_dict())
        if can.scoring != "fast":
            raise UnavailableError(
                f"fast scoring computes in packs, and {type(model).__name__} does not: "
                f"{can.slower}; use scoring: exact"
            )

    def __call__(self, batch: PackedBatch) -> Tensor:
        self.model.config._attn_implementation = NAME
        try:
            return self.decoder(
                to_device(batch.ids, self.device),
                position_ids=to_device(batch.positions, self.device),
                use_cache=False,
                cu_seq_lens_q=to_device(batch.cu_seqlens_q, self.device),
                cu_seq_lens_k=to_device(batch.cu_seqlens_k, self.device),
                max_length_q=int(np.diff(batch.cu_seqlens_q).max()),
                max_length_k=int(np.diff(batch.cu_seqlens_k).max()),
                qbench_keys=None if batch.keys is None else to_device(batch.keys, self.device),
                qbench_attention=self._attention,
            )[0][0]
        finally:
            self.model.config._attn_implementation = self._attention


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
            same = torch.equal(whole, head(hidden))
        except RuntimeError:  # of another width than the head takes
            same = False
    if not torch.isfinite(whole).all():
        raise EvaluationError(
            f"the logits of {type(model).__name__} are NaN or infinite on eight ordinary tokens, "
            "which no scoring mode can fix; check its weights, its quantizer and its dtype"
        )
    if not same:
        raise UnavailableError(
            f"the logits of {type(model).__name__} are not its LM head's of what its decoder "
            "returns: it scales or caps them, or something lies between the two; use scoring: "
            "lm-eval"
        )
    return decoder, head
