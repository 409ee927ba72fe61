"""Sequences inside the rows of a batch, the metadata of variable-length attention.

``seq_bounds``, int32 [S, 6], has one row per sequence: batch row, query start and end, key start
and end (ends exclusive), and the shift: query row i stands at key row i + shift, which is what
causality and windows go by. It holds what ``cu_seqlens`` say, and padded batches too.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_bounds(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Tensor:
    """Return int32 [S, 6], one row per packed sequence: batch row 0, query start and end, key start
    and end, key end − query end.

    ``cu_seqlens_q``, ``cu_seqlens_k``: cumulative lengths [S + 1], 0 first. The last query of each
    sequence is aligned with its last key.
    """
    cu_seqlens_q, cu_seqlens_k = cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32)
    end_q, end_k = cu_seqlens_q[1:], cu_seqlens_k[1:]
    shift = end_k - end_q
    row = torch.zeros_like(shift)
    return torch.stack([row, cu_seqlens_q[:-1], end_q, cu_seqlens_k[:-1], end_k, shift], 1)


def token_bounds(padding: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the first and last + 1 token of each row, int32 [B] each; None if the tokens of a row
    do not lie side by side. ``padding``: bool [B, T], True = a token."""
    first = padding.to(torch.int8).argmax(1).to(torch.int32)
    last = first + padding.sum(1, dtype=torch.int32)
    index = torch.arange(padding.shape[1], device=padding.device)
    inside = (index >= first[:, None]) & (index < last[:, None])
    return (first, last) if torch.equal(inside, padding) else None


def padded_bounds(padding: Tensor, queries: int, shift: int) -> Tensor | None:
    """Return the bounds of one sequence per batch row, [B, 6]; None if the tokens of a row do not
    lie side by side. ``padding``: bool [B, Tk], True = a token; ``queries``: number of query rows;
    ``shift``: query row i stands at key row i + shift."""
    bounds = token_bounds(padding)
    if bounds is None:
        return None
    first, last = bounds
    rows = torch.arange(padding.shape[0], device=padding.device, dtype=torch.int32)
    first_q = (first - shift).clamp(0, queries)
    last_q = (last - shift).clamp(0, queries)
    shifts = torch.full_like(rows, shift)
    return torch.stack([rows, first_q, last_q, first, last, shifts], 1)


@torch.library.custom_op("qbench::sequence_bounds", mutates_args=())
def sequence_bounds(joined: Tensor | None, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the bounds of sequences whose queries and keys stand at the same rows, and how many of
    them count, int64 [1] on the CPU: 0 if every batch row is one sequence, so that no bounds are
    needed; -1 if bounds cannot describe the sequences.

    One argument is given: ``joined`` bool [B, T], whether each token belongs to the sequence of the
    token before it, or ``padding`` bool [B, T], True = a token. Waits for the GPU. It is a custom
    operator because torch.compile cannot know these values, on which the choice of kernels depends.
    """
    if padding is not None:
        batch, length = padding.shape
        seq_bounds = padded_bounds(padding, length, 0)
        count = -1 if seq_bounds is None else 0 if bool(padding.all()) else batch
        if seq_bounds is None:
            seq_bounds = padding.new_zeros((batch, 6), dtype=torch.int32)
        return seq_bounds, torch.tensor([count])
    assert joined is not None
    batch, length = joined.shape
    starts = ~joined
    starts[:, 0] = True
    row, first = starts.nonzero(as_tuple=True)
    last = torch.where(row.diff(append=row.new_tensor([batch])) == 0, first.roll(-1), length)
    seq_bounds = joined.new_zeros((batch * length, 6), dtype=torch.int32)
    count = first.shape[0]
    seq_bounds[:count] = torch.stack(
        [row, first, last, first, last, torch.zeros_like(row)], 1
    ).int()
    return seq_bounds, torch.tensor([0 if count == batch else count])


@sequence_bounds.register_fake
def _(joined: Tensor | None, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    given = padding if joined is None else joined
    assert given is not None
    rows = given.shape[0] if joined is None else given.shape[0] * given.shape[1]
    return given.new_empty((rows, 6), dtype=torch.int32), torch.empty(1, dtype=torch.int64)
