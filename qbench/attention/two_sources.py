"""Attention from two sources of keys and values: as they are, and as a quantized cache gives them
back. Which of the two each query reads is in :mod:`qbench.attention.kv_cache`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qbench.attention import reference
from qbench.attention.kv_cache import Residual, Sources
from qbench.attention.normalizers import NORMALIZERS


def attention(
    query: Tensor,
    sources: Sources,
    *,
    residual: Residual,
    positions: Tensor,
    normalizer: str,
    parameters: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """``reference.attention`` where each query reads each key and value from its source.

    ``positions`` [B or 1, Tk]: each key's in its own sequence; the last query stands at the last
    key's. Other arguments, result and errors as there.
    """
    chosen = NORMALIZERS.get(normalizer)
    key, value, coded_key, coded_value = sources
    reference.check(query, key, value, mask)
    given = chosen.checked(parameters, query.shape[1])
    settings = (chosen, given, scale, softcap, mask, causal, window)
    own = positions[:, key.shape[2] - query.shape[2] :]
    values, coded_values = (reference.wide(v).contiguous() for v in (value, coded_value))
    outputs, start = [], 0
    plain_chunks = reference.chunks(query, key, *settings)
    coded_chunks = reference.chunks(query, coded_key, *settings)
    for plain, coded in zip(plain_chunks, coded_chunks, strict=True):
        stop = start + plain.scores.shape[2]
        at, keys = own[:, None, start:stop, None], positions[:, None, None, plain.keys]
        written = keys >= residual.keep_first
        of_key = written & (keys < residual.bound(at, residual.key_group))
        of_value = written & (keys < residual.bound(at, 1))
        weights = chosen.weights(
            torch.where(of_key, coded.scores, plain.scores),
            allowed=plain.allowed, parameters=given, distances=plain.distances,
        )  # fmt: skip
        outputs.append(
            reference.mix(weights.masked_fill(of_value, 0), values[:, :, plain.keys])
            + reference.mix(weights.masked_fill(~of_value, 0), coded_values[:, :, plain.keys])
        )
        start = stop
    return torch.cat(outputs, dim=2).to(query.dtype)


def by_kernel(
    query: Tensor,
    sources: Sources,
    *,
    residual: Residual,
    positions: Tensor,
    normalizer: str,
    parameters: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    spans: Tensor | None = None,
    max_seqlen_q: int | None = None,
) -> Tensor:
    """:func:`attention` by a kernel, for inference; ``spans`` as ``kernels.attention``. Raises
    UnavailableError for a normalizer or a parameter that the kernels do not have."""
    from qbench.attention.kernels import two_sources
    from qbench.attention.kernels.families import require
    from qbench.attention.kernels.settings import Parameters

    reference.check(query, sources.key, sources.value, mask)
    given = NORMALIZERS.get(normalizer).checked(parameters, query.shape[1])
    require(normalizer, given)
    return two_sources.attention(
        query, sources, keep_first=residual.keep_first, keep_recent=residual.keep_recent,
        key_group=residual.key_group, positions=positions, normalizer=normalizer,
        parameters=Parameters.of(given), scale=scale, softcap=softcap or 0.0, mask=mask,
        causal=causal, window=window, spans=spans, max_seqlen_q=max_seqlen_q,
    )  # fmt: skip


def packed_attention(
    query: Tensor,
    sources: Sources,
    *,
    implementation: str,
    residual: Residual,
    positions: Tensor,
    normalizer: str,
    parameters: Mapping[str, Tensor] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
) -> Tensor:
    """:func:`attention` of sequences laid in a row, see ``reference.packed_attention``."""
    if implementation == "triton":
        from qbench.attention.kernels.spans import packed_spans

        return by_kernel(
            query, sources, residual=residual, positions=positions, normalizer=normalizer,
            parameters=parameters, scale=scale, softcap=softcap, causal=causal,
            spans=packed_spans(cu_seqlens_q, cu_seqlens_k), max_seqlen_q=max_seqlen_q,
        )  # fmt: skip
    output = sources.value.new_zeros(*query.shape[:3], sources.value.shape[3])
    for rows, keys in reference.sequences(cu_seqlens_q, cu_seqlens_k):
        output[:, :, rows] = attention(
            query[:, :, rows],
            Sources(*(tensor[:, :, keys] for tensor in sources)),
            residual=residual,
            positions=positions[:, keys],
            normalizer=normalizer,
            parameters=parameters,
            scale=scale,
            softcap=softcap,
            causal=causal,
        )
    return output
