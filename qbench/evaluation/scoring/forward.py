"""A batch's hidden states: the decoder over padded sequences, or over packs.

Both leave the LM head to ``rows``, which takes only the rows that are scored.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qbench.attention.interface import measures_distances
from qbench.attention.kv_cache import needs_sequences
from qbench.errors import EvaluationError, UnavailableError
from qbench.evaluation.scoring.memory import is_out_of_memory
from qbench.evaluation.scoring.packed_attention import (
    Layout,
    lay_blocks,
    lay_segments,
    packed,
    takes_segments,
)
from qbench.evaluation.scoring.packing import PackedBatch, Packing
from qbench.evaluation.scoring.requests import Batch, Request
from qbench.evaluation.scoring.rows import to_device
from qbench.evaluation.scoring.unrounded import unrounded

MOVING_ROPES = ("longrope", "dynamic")
# Of a pack's hidden states, relative to those of single sequences. Rounding in 24 layers of
# bfloat16 stays far below it; an attention that sees other tokens does not.
PROBE_DIFFERENCE = 0.25
PROBE = ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4, 7, 8), (8, 6, 4))  # the first two share a prefix


class Forward(Protocol):
    """Makes hidden states; ``stopped``, once set, lets forwards that nobody waits for end."""

    stopped: threading.Event
    fused_steps: bool | None  # whether kernels stood in for a model's small steps

    def ready(self) -> contextlib.AbstractContextManager[None]:
        """Within it the model is set up for this kind of batches."""

    def __call__(self, batch: Any) -> Tensor:
        """The LM head's input [B · L, H] after the final norm."""


class PaddedForward:
    """Sequences padded on the right, under the model's own causal mask."""

    fused_steps = None

    def __init__(self, decoder: torch.nn.Module, device: torch.device) -> None:
        self.decoder, self.device = decoder, device
        self.stopped = threading.Event()
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
        self.stopped = threading.Event()
        self.fused_steps = False
        self._attention = model.config._attn_implementation
        self._in_segments = (
            takes_segments(self._attention) or needs_sequences(model) or measures_distances(model)
        )
        check_attention(model)
        self._try_out()

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        with packed(self.model), self._small_steps() as self.fused_steps:
            yield

    def __call__(self, batch: PackedBatch) -> Tensor:
        if self._in_segments:
            layout: Layout = lay_segments(batch, self.device)
        else:
            layout = lay_blocks(batch, self.device, self.stopped)
        return self.decoder(
            to_device(batch.ids, self.device),
            position_ids=to_device(batch.positions, self.device),
            use_cache=False,
            qbench_layout=layout,
            qbench_attention=self._attention,
        )[0][0]

    def _small_steps(self) -> contextlib.AbstractContextManager[bool]:
        """Kernels for what stands between a Llama's matrix products, on CUDA."""
        if self.device.type != "cuda":
            return contextlib.nullcontext(False)
        from qbench.evaluation.scoring.fused import fused  # needs Triton

        return fused(self.model)

    def _try_out(self) -> None:
        """A small pack against its sequences one by one: some models hand nothing on to their
        attention, some see more of a row than attention shows. Activations and the KV cache stay
        unquantized, for their steps would hide what this is about."""
        requests = [Request([*ids, 0], len(ids), i) for i, ids in enumerate(PROBE)]
        (pack,) = Packing(max_length=64, batch_tokens=64).plan(requests, windows=False)
        batch = pack.lay(requests)
        rows = [batch.rows[batch.scored.row[list(batch.scored.request).index(i)]] for i in range(3)]
        try:
            with torch.no_grad(), unrounded(self.model):
                with self.ready():
                    found = self(batch)[rows].float()
                plain = torch.stack(
                    [
                        self.decoder(torch.tensor([ids], device=self.device), use_cache=False)[0][
                            0, -1
                        ].float()
                        for ids in PROBE
                    ]
                )
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
    with torch.no_grad():
        whole = model(probe, use_cache=False).logits
        parts = head(decoder(probe, use_cache=False)[0])
    if not torch.isfinite(whole).all():
        raise EvaluationError(
            f"the logits of {type(model).__name__} are NaN or infinite on eight ordinary tokens, "
            "which no scoring mode can mend; look at its weights, its quantizer and its dtype"
        )
    if not torch.equal(whole, parts):
        raise UnavailableError(
            f"{type(model).__name__} changes its logits after the LM head, by scaling or capping "
            "them, which exact and fast scoring leave out; use scoring: lm-eval"
        )
    return decoder, head


def check_attention(model: Any) -> None:
    """Raises UnavailableError for models whose attention a pack cannot reproduce."""
    config = model.config
    name = config._attn_implementation
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise UnavailableError(
            f"fast scoring needs an attention of AttentionInterface, not {name!r}; use scoring: "
            "exact or another attention"
        )
    kinds = set(getattr(config, "layer_types", None) or ())
    windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", 1)
    if kinds - {"full_attention"} or (windowed and not kinds):
        raise UnavailableError(
            f"fast scoring knows full causal attention only, and {type(model).__name__} has "
            "windows or other layers; use scoring: exact"
        )
    if moving := [kind for kind in _rope_types(config) if kind.startswith(MOVING_ROPES)]:
        raise UnavailableError(
            "fast scoring needs rotary angles that depend on a token's position alone, and those "
            f"of {moving[0]} depend on the longest sequence of a batch; use scoring: exact"
        )


def _rope_types(config: Any) -> list[str]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return [str(kind.get("rope_type") or kind.get("type") or "") for kind in kinds]
