"""Which rows of a batch are sequences, the metadata of variable-length attention: ``spans``, int32
[S, 6], one row a sequence.

A row is (batch row, first query, last query + 1, first key, last key + 1, shift); query row i
stands at key row i + shift, which is what causality and windows go by. It is what FlashAttention's
``cu_seqlens`` say, and of padded batches too.
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
    return torch.stack([row, cu_seqlens_q[:-1], end_q, cu_seqlens_k[:-1], end_k, shift], 1)


def token_bounds(padding: Tensor) -> tuple[Tensor, Tensor] | None:
    """First and last + 1 token of each row, int32 [B], from ``padding`` bool [B, T] (True = a
    token); None where the tokens of a row do not lie side by side."""
    first = padding.to(torch.int8).argmax(1).to(torch.int32)
    last = first + padding.sum(1, dtype=torch.int32)
    index = torch.arange(padding.shape[1], device=padding.device)
    inside = (index >= first[:, None]) & (index < last[:, None])
    return (first, last) if torch.equal(inside, padding) else None


def padded_spans(padding: Tensor, queries: int, shift: int) -> Tensor | None:
    """One sequence a batch row, from ``padding`` bool [B, Tk] (True = a token), where the tokens of
    each row lie side by side; None where they do not. Query row i stands at key row i + shift."""
    bounds = token_bounds(padding)
    if bounds is None:
        return None
    first, last = bounds
    rows = torch.arange(padding.shape[0], device=padding.device, dtype=torch.int32)
    first_q = (first - shift).clamp(0, queries)
    last_q = (last - shift).clamp(0, queries)
    shifts = torch.full_like(rows, shift)
    return torch.stack([rows, first_q, last_q, first, last, shifts], 1)


@torch.library.custom_op("qbench::sequence_spans", mutates_args=())
def sequence_spans(joined: Tensor | None, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Spans of queries and keys that stand at the same rows, and in int64 [1] on the CPU how many
    of them count: 0 where every batch row is one whole sequence, so that no spans are needed, and
    -1 where spans cannot say it. One or the other is given: ``joined`` bool [B, T], whether each
    token belongs to the sequence of the token before it; ``padding`` bool [B, T], True = a token.

    Waits for the GPU. An operator, so that torch.compile takes it as it is: its kernels are chosen
    by values that a compiler does not know.
    """
    if padding is not None:
        batch, length = padding.shape
        spans = padded_spans(padding, length, 0)
        count = -1 if spans is None else 0 if bool(padding.all()) else batch
        if spans is None:
            spans = padding.new_zeros((batch, 6), dtype=torch.int32)
        return spans, torch.tensor([count])
    assert joined is not None
    batch, length = joined.shape
    starts = ~joined
    starts[:, 0] = True
    row, first = starts.nonzero(as_tuple=True)
    last = torch.where(row.diff(append=row.new_tensor([batch])) == 0, first.roll(-1), length)
    spans = joined.new_zeros((batch * length, 6), dtype=torch.int32)
    count = first.shape[0]
    spans[:count] = torch.stack([row, first, last, first, last, torch.zeros_like(row)], 1).int()
    return spans, torch.tensor([0 if count == batch else count])


@sequence_spans.register_fake
def _(joined: Tensor | None, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    given = padding if joined is None else joined
    assert given is not None
    rows = given.shape[0] if joined is None else given.shape[0] * given.shape[1]
    return given.new_empty((rows, 6), dtype=torch.int32), torch.empty(1, dtype=torch.int64)
