"""Ways to score: a batching plan, the forward that fits it, and how log-likelihoods add up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from qbench.evaluation.scoring.answers import Total, as_hflm, in_float64
from qbench.evaluation.scoring.forward import Forward, PackedForward, PaddedForward
from qbench.evaluation.scoring.packing import Packing
from qbench.evaluation.scoring.padding import Padding
from qbench.evaluation.scoring.requests import Batching
from qbench.evaluation.scoring.side_by_side import packs_at_once
from qbench.evaluation.settings import ScoringSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """``as_whole``: the LM head must round as it does over the whole batch."""

    batching: Batching
    forward: Forward
    total: Total
    as_whole: bool
    at_once: int  # batches side by side


def exact_way(settings: ScoringSettings, decoder: torch.nn.Module, device: torch.device) -> Way:
    """HFLM's scores to the bit, without what does not change them: the LM head and log-softmax
    of rows that nobody scores, the KV cache, a [B, L, V] tensor, one tokenizer call a request,
    and two waits for the device a request.

    For the sample of fast scoring the right scores, even where HFLM misreads.
    """
    sample = settings.mode == "fast"
    padding = Padding(
        max_length=settings.max_length,
        batch_size=settings.batch_size,
        window_batch_size=1 if sample else settings.window_batch_size,
        misread=not sample,
        shuffle=None if sample else settings.shuffle,
    )
    forward = PaddedForward(decoder, device)
    return Way(batching=padding, forward=forward, total=as_hflm, as_whole=True, at_once=1)


def fast_way(settings: ScoringSettings, model: Any, decoder: torch.nn.Module) -> Way:
    """Shared prefixes once and no padding. Batch-mates change rounding only, so that a pack that
    was halved for want of memory gives the same scores but for rounding.

    Raises UnavailableError where the model cannot be scored so.
    """
    assert settings.batch_tokens is not None
    packing = Packing(
        max_length=settings.max_length,
        batch_tokens=settings.batch_tokens,
        shuffle=settings.shuffle,
    )
    return Way(
        batching=packing,
        forward=PackedForward(model, decoder),
        total=in_float64,
        as_whole=False,
        at_once=packs_at_once(model.device),
    )
