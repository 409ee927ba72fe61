"""Which rows of a batch are sequences: int32 [S, 6], one row a sequence.

A row is (batch row, first query, last query + 1, first key, last key + 1, shift); query row i
stands at key row i + shift, which is what causality and windows go by.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_spans(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Sequences in a row of one batch row, from their cumulative lengths [S + 1], 0 first;
    the last query of each is aligned with its last key."""
    cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32)
    end_q, end_k = cu_seqlens_q[1:], cu_seqlens_k[1:]
    shift = end_k - end_q
    row = torch.zeros_like(shift)
    return torch.stack(
        [row, cu_seqlens_q[:-1], end_q, cu_seqlens_k[:-1], end_k, shift], 1
    ).contiguous()


def padded_spans(padding: Tensor, queries: int, shift: int) -> Tensor | None:
    """One sequence a batch row, from ``padding`` bool [B, Tk] (True = a token), where the tokens of
    each row lie side by side; None where they do not. Query row i stands at key row i + shift."""
    batch, keys = padding.shape
    count = padding.sum(1, dtype=torch.int32)
    first = padding.to(torch.int8).argmax(1).to(torch.int32)
    last = first + count
    index = torch.arange(keys, device=padding.device)
    inside = (index >= first[:, None]) & (index < last[:, None])
    if not torch.equal(inside, padding):
        return None
    rows = torch.arange(batch, device=padding.device, dtype=torch.int32)
    first_q = (first - shift).clamp(0, queries)
    last_q = (last - shift).clamp(0, queries)
    shifts = torch.full_like(rows, shift)
    return torch.stack([rows, first_q, last_q, first, last, shifts], 1).contiguous()
