"""The function that transformers asks once a forward pass who may attend to whom.

Where it is plain causality no mask is made, so that the causal kernels run. Under torch.compile the
values of padding masks and positions are not known when that is decided. transformers cannot tell
the positions that a model counts by itself from packed ones. So where kernels attend, which
sequences there are is found when the compiled graph runs, by ``varlen.sequence_spans``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig, masking_utils
from transformers.masking_utils import causal_mask_function, sdpa_mask

from qbench.attention.kernels.varlen import padded_spans, sequence_spans

_positions = SimpleNamespace(counted=False)


@contextmanager
def positions_counted() -> Iterator[None]:
    """Models that are given no positions hold whole sequences, none packed. Then torch.compile's
    graph has nothing to find when it runs, which would wait for the GPU."""
    before, _positions.counted = _positions.counted, True
    try:
        yield
    finally:
        _positions.counted = before


@dataclass(frozen=True, slots=True)
class Mask:
    """Who attends to whom. ``dense`` gives the mask, which is quadratic: it is asked only where a
    layer needs it, never for packed sequences with ``cu_seq_lens``, nor where the kernels are given
    ``spans`` or ``window``. ``spans`` says which rows are sequences (see
    :mod:`qbench.attention.kernels.varlen`), of which ``span_count`` count; ``window`` how many keys
    up to its own a query sees. Where ``banded``, these say all there is to say beside causality.
    ``padding`` [B, T]: the model's ``attention_mask``, of which the keys are the part from
    ``kv_offset`` on: a cache of a sliding window has dropped those before. ``written``: how many
    keys a static cache holds; what comes after is room for later ones."""

    dense: Callable[[], Tensor]
    banded: bool = False
    spans: Tensor | None = None
    span_count: Tensor | None = None
    window: int | None = None
    padding: Tensor | None = None
    kv_offset: int = 0
    written: int | None = None
    room: int = 0

    def settings(self, queries: int) -> dict[str, Any]:
        """What attention functions take instead of a mask, where ``banded``."""
        found: dict[str, Any] = {"window": self.window}
        if self.spans is not None:
            found["spans"] = self.spans
        if self.span_count is not None:
            found["span_count"] = self.span_count
            if self.padding is not None:  # with causality, where spans cannot say it
                found["mask"] = self.padding[:, None, None].expand(-1, 1, queries, -1)
        return found

    def contiguous(self) -> Tensor:
        """Of all keys of a static cache: what transformers' ``generate`` makes ahead for one."""
        return pad(self.dense(), (0, self.room))

    def to(self, device: torch.device, **options: Any) -> Mask:
        """For a block that lies on another device."""
        tensors = (self.spans, self.span_count, self.padding)
        spans, count, padding = (t if t is None else t.to(device, **options) for t in tensors)
        return replace(
            self, dense=cache(lambda: self.dense().to(device, **options)),
            spans=spans, span_count=count, padding=padding,
        )  # fmt: skip


def mask_interface(implementation: str) -> Callable[..., Tensor | Mask | None]:
    """For AttentionMaskInterface; ``implementation``: ``reference`` or ``triton``."""

    def mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Callable = causal_mask_function,
        attention_mask: Tensor | None = None,
        local_size: int | None = None,
        allow_is_causal_skip: bool = True,
        use_vmap: bool = False,
        config: PreTrainedConfig | None = None,
        **options: Any,
    ) -> Tensor | Mask | None:
        """None where the mask is plain causality, aligned at the last key; else who sees whom."""
        across = "allow_is_bidirectional_skip" in options  # both ways, or of what was encoded
        options |= {"mask_function": mask_function, "use_vmap": use_vmap, "config": config}
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        compiling, written, room = torch.compiler.is_compiling(), None, 0
        if not compiling:
            q_offset = int(q_offset)  # a static cache's moves on before a layer asks for its mask
            held = q_offset + q_length - int(kv_offset)
            if held < kv_length and not across:
                room = kv_length - held
                kv_length = written = held
        dense = partial(
            sdpa_mask, batch_size=batch_size, q_length=q_length, kv_length=kv_length,
            q_offset=q_offset, kv_offset=kv_offset, attention_mask=attention_mask,
            local_size=local_size, **options,
        )  # fmt: skip
        if not compiling:
            dense = cache(dense)  # all layers ask
        plain = attention_mask is None or (not compiling and bool(attention_mask.all()))
        if compiling and _positions.counted and plain and not use_vmap:
            allow_is_causal_skip |= mask_function.__name__ == "and_mask"  # none is packed
        fixed = isinstance(q_offset, int)
        aligned = fixed and q_offset + q_length == kv_offset + kv_length
        wide = local_size is None or kv_length < local_size
        if allow_is_causal_skip and wide and plain and aligned and written is None:
            return None
        window = None if wide else _window(local_size, config)
        by_kernels = (wide or window is not None) and implementation == "triton"
        banded = allow_is_causal_skip and by_kernels
        rows = {"padding": attention_mask, "kv_offset": kv_offset, "written": written, "room": room}
        if banded and plain and aligned:
            return Mask(dense, banded=True, window=window, **rows)
        whole = aligned and q_length == kv_length
        packed = attention_mask is None and not allow_is_causal_skip and not use_vmap
        joined = None
        if packed and whole and by_kernels and _is_packed(mask_function):
            joined = _joined(mask_function, batch_size, q_length, options["device"])
        if joined is not None or (compiling and banded and whole):
            spans, count = sequence_spans(joined, attention_mask)
            return Mask(dense, banded=True, spans=spans, span_count=count, window=window, **rows)
        if compiling:
            return dense()
        spans = None
        if banded and attention_mask is not None:
            padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
            if padding.shape[1] == kv_length:
                spans = padded_spans(padding, q_length, q_offset - kv_offset)
        return Mask(dense, banded=spans is not None, spans=spans, window=window, **rows)

    return mask


# Before transformers 5.24, blocks of tokens that see each other both ways were joined last, by
# or_masks; since then they are inside of what and_masks cuts into packed sequences.
BLOCKS_JOINED_LAST = hasattr(masking_utils, "packed_sequence_compatibility_function")


def _is_packed(mask_function: Callable) -> bool:
    """Return whether transformers' ``mask_function`` is causal within packed sequences, without
    blocks of tokens that see each other both ways. torch.compile before torch 2.14 cannot look into
    the function: then the answer is False, and a dense mask is made."""
    if BLOCKS_JOINED_LAST or mask_function.__name__ != "and_mask":
        return mask_function.__name__ == "and_mask"
    cells = getattr(mask_function, "__closure__", None)
    if cells is None:
        return False
    return all(part.__name__ != "or_mask" for cell in cells for part in cell.cell_contents)


def _joined(mask_function: Callable, batch: int, length: int, device: torch.device) -> Tensor:
    """Whether each token sees the token before it [B, T], which the first of a sequence does not;
    of a mask that is causal within sequences."""
    row = torch.arange(batch, device=device)[:, None]
    query = torch.arange(length, device=device)[None]
    return mask_function(row, 0, query, (query - 1).clamp(min=0)).expand(batch, length)


def _window(local_size: int | None, config: PreTrainedConfig | None) -> int | None:
    """The sliding window, where ``local_size`` is that and not the size of chunks."""
    if getattr(config, "attention_chunk_size", None) is not None:
        return None
    return local_size if getattr(config, "sliding_window", None) == local_size else None
