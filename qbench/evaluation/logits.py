"""Kernels over rows of logits: the log of the sum of exponentials with the likeliest entry, and the
divergence of two models. They read logits once and twice; PyTorch takes four and nine passes, and
writes log-probabilities of four bytes between them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # entries of the vocabulary at a time


@triton.jit
def _add(logits, at, inside, most, where, total):
    """Add ``logits`` at entries of the vocabulary to each lane's largest, its first entry, and the
    sum of exponentials relative to it."""
    x = tl.load(logits + at, mask=inside, other=float("-inf")).to(tl.float32)
    larger = tl.maximum(most, x)
    total = total * tl.exp(most - larger) + tl.exp(x - larger)
    return larger, tl.where(x > most, at, where), total


@triton.jit
def _finish(most, where, total, VOCABULARY: tl.constexpr):
    """Return the log of the sum of exponentials, and the first entry with the largest logit."""
    largest = tl.max(most, 0)
    log_total = largest + tl.log(tl.sum(total * tl.exp(most - largest), 0))
    return log_total, tl.min(tl.where(most == largest, where, VOCABULARY), 0)


@triton.jit
def _divergence(before, after, out, agrees, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Write a row's KL and the logs of both sums to ``out`` [R, 3], and to ``agrees`` [R] whether
    the likeliest entries are the same."""
    row = tl.program_id(0).to(tl.int64)
    before += row * VOCABULARY
    after += row * VOCABULARY
    lane = tl.arange(0, BLOCK)
    p_most = tl.full((BLOCK,), -3e38, tl.float32)
    q_most = p_most
    p_total = tl.zeros((BLOCK,), tl.float32)
    q_total = p_total
    p_where = lane
    q_where = lane
    for first in range(0, VOCABULARY, BLOCK):
        at = first + lane
        inside = at < VOCABULARY
        p_most, p_where, p_total = _add(before, at, inside, p_most, p_where, p_total)
        q_most, q_where, q_total = _add(after, at, inside, q_most, q_where, q_total)
    log_p, p_top = _finish(p_most, p_where, p_total, VOCABULARY)
    log_q, q_top = _finish(q_most, q_where, q_total, VOCABULARY)
    kl = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, VOCABULARY, BLOCK):
        at = first + lane
        inside = at < VOCABULARY
        x = tl.load(before + at, mask=inside, other=0.0).to(tl.float32) - log_p
        y = tl.load(after + at, mask=inside, other=0.0).to(tl.float32) - log_q
        kl += tl.where(inside, tl.exp(x) * (x - y), 0.0)
    tl.store(out + row * 3, tl.sum(kl, 0))
    tl.store(out + row * 3 + 1, log_p)
    tl.store(out + row * 3 + 2, log_q)
    tl.store(agrees + row, (p_top == q_top).to(tl.int8))


@triton.jit
def _log_sums(logits, out, tops, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    """Write what ``_finish`` returns of a row to ``out`` and ``tops`` [R]."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), -3e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    where = lane
    for first in range(0, VOCABULARY, BLOCK):
        at = first + lane
        inside = at < VOCABULARY
        most, where, total = _add(logits + row * VOCABULARY, at, inside, most, where, total)
    log_total, top = _finish(most, where, total, VOCABULARY)
    tl.store(out + row, log_total)
    tl.store(tops + row, top)


def log_sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return of each row of ``logits`` [R, V], on a GPU, the log of the sum of exponentials in
    float32, and the first of its likeliest entries."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    tops = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _log_sums[(rows,)](
        logits.contiguous(), out, tops, VOCABULARY=vocabulary, BLOCK=BLOCK, num_warps=8
    )
    return out, tops


def divergence(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return of each row of the logits ``before`` and ``after`` [R, V], on a GPU: KL Σ p ln(p/q) in
    nats, the log of the sum of exponentials of each, and whether the likeliest entries agree."""
    assert before.shape == after.shape
    rows, vocabulary = before.shape
    out = torch.empty(rows, 3, dtype=torch.float32, device=before.device)
    agrees = torch.empty(rows, dtype=torch.int8, device=before.device)
    _divergence[(rows,)](
        before.contiguous(), after.contiguous(), out, agrees, VOCABULARY=vocabulary, BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip
    return *out.unbind(-1), agrees.bool()
