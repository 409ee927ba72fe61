"""Attention weights measured as they are made: a chunk of queries at a time, then forgotten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qbench.attention import reference

POSITIONS = 4  # first key positions whose sinks are measured
GU_LENGTH = 64  # T of Gu et al. 2024
THRESHOLDS = (0.2, 0.3, 0.4)  # ε: the softpick paper's two (its section 6.2), and one above
DORMANT = 0.01  # of the mean output norm of a layer's heads
CHUNK_WEIGHTS = {"cpu": 1 << 20, "cuda": 1 << 27}  # held at once: 4 MiB and 512 MiB in float32


@dataclass(kw_only=True, eq=False)
class Weights:
    """Sums over the queries of one layer, on the model's device, float64.

    ``columns``, ``columns_gu`` [B, H, POSITIONS]: Σ over queries of the weight on the first keys,
    over all of them and over the first GU_LENGTH. ``zeros``, ``mass``, ``silent``, ``entropy``
    [B, H] as in :func:`add`. ``pairs``: query and key pairs that attention allows, of one head.
    """

    columns: Tensor
    columns_gu: Tensor
    zeros: Tensor
    mass: Tensor
    silent: Tensor
    entropy: Tensor
    pairs: Tensor
    queries: int = 0

    @classmethod
    def empty(cls, batch: int, heads: int, device: torch.device) -> Weights:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.float64, device=device)

        sums = [zeros(batch, heads) for _ in range(4)]
        columns, columns_gu = (zeros(batch, heads, POSITIONS) for _ in range(2))
        return cls(
            columns=columns,
            columns_gu=columns_gu,
            zeros=sums[0],
            mass=sums[1],
            silent=sums[2],
            entropy=sums[3],
            pairs=zeros(batch, 1),
        )

    def add(self, weights: Tensor, allowed: Tensor) -> None:
        """Take in the next queries' ``weights`` [B, H, R, N]; ``allowed`` bool [B or 1, 1, R, N]:
        which of the pairs attention may use, N keys from the first on.

        ``zeros`` counts weights of exactly 0 among these pairs, the softpick paper's sparsity
        (section 6.1, table 4: "exact zeros in the lower triangle"); its published script counts
        |a| ≤ 1e-5 unless told otherwise. ``mass`` is Σ_k a(q, k), 1 for softmax. ``entropy`` is
        −Σ p ln p with p = a / Σ a, in nats, of queries with any weight; ``silent`` counts others.
        """
        first = weights[..., :POSITIONS].double()
        room = first.shape[-1]
        self.columns[..., :room] += first.sum(2)
        early = max(0, min(weights.shape[2], GU_LENGTH - self.queries))
        self.columns_gu[..., :room] += first[:, :, :early].sum(2)
        self.zeros += ((weights == 0) & allowed).sum((2, 3))
        self.pairs += allowed.sum((2, 3))
        mass = weights.sum(-1, dtype=torch.float64)
        self.mass += mass.sum(-1)
        self.silent += (mass == 0).sum(-1)
        # −Σ (a/S) ln (a/S) = (Σ −a ln a) / S + ln S
        some = mass > 0
        safe = torch.where(some, mass, 1.0)
        entropy = torch.special.entr(weights).sum(-1, dtype=torch.float64) / safe + safe.log()
        self.entropy += torch.where(some, entropy, 0.0).sum(-1)
        self.queries += weights.shape[2]


def column_means(columns: Tensor, queries: int) -> Tensor:
    """The softpick paper's measure of a sink (section 6.2): α_k, "the average value of the first
    column in A", for the first keys k: Σ_q A(q, k) / T over all T queries, those that cannot see
    the key too. ``columns`` [B, H, POSITIONS] are the sums. A head of a text has a sink at k
    where α_k > ε; the sink rate is the share of such heads, averaged over texts."""
    return columns / queries


def column_means_gu(columns: Tensor, queries: int) -> Tensor:
    """Gu et al. 2024 (arXiv 2410.10781, section 3.2): α_k = Σ_{q ≥ k} A(q, k) / (T − k) with k
    from 0: over the queries that see the key, of the first T = 64 tokens of a text. ``columns``
    [B, H, POSITIONS] are the sums over the first T queries. A key sees no later token, so that
    the first 64 rows of a longer text are those of the text cut there."""
    length = min(queries, GU_LENGTH)
    seen = torch.arange(length, length - POSITIONS, -1, device=columns.device)
    return columns / seen.clamp(min=1)


@torch.no_grad()
def measure_weights(
    query: Tensor,
    key: Tensor,
    *,
    normalizer: str,
    parameters: Mapping[str, Tensor] | None,
    scale: float | None,
    mask: Tensor | None,
) -> Weights:
    """Every weight of causal self-attention of query [B, Hq, T, D] over key [B, Hkv, T, D], by
    the normalizer's definition in float32 (``reference.weights``), a chunk of queries at a time.

    ``mask``: bool [B or 1, 1, T, T], True = attend, used as it is; None: causal.
    """
    batch, heads, length, _ = query.shape
    total = Weights.empty(batch, heads, query.device)
    room = CHUNK_WEIGHTS["cuda" if query.is_cuda else "cpu"]
    step = max(1, min(length, room // (batch * heads * length)))
    positions = torch.arange(length, device=query.device)
    for start in range(0, length, step):
        stop = min(start + step, length)
        if mask is None:
            allowed = (positions[:stop] <= positions[start:stop, None])[None, None]
        else:
            allowed = mask[:, :, start:stop, :stop]
        weights = reference.weights(
            query[:, :, start:stop],
            key[:, :, :stop],
            normalizer=normalizer,
            parameters=parameters,
            scale=scale,
            mask=None if mask is None else allowed,
            causal=mask is None,
        )
        total.add(weights, allowed)
    return total


def output_ratios(output: Tensor) -> Tensor:
    """Mean norm of each head's output over a text, divided by the mean of its layer's heads.

    ``output`` [B, T, H, D] is what attention gives before its output projection. This is the
    average head output norm, normalized by layer (AHON LN), of Sandoval-Segura et al. 2025
    (arXiv 2504.03889, first as HONOR). A head is called dormant on a text here where it is below
    ``DORMANT``: it gives about nothing. They choose thresholds by what removing heads costs.
    Returns [B, H], float64; 0 where the whole layer gives nothing.
    """
    norms = output.float().norm(dim=-1).double().mean(1)
    layer = norms.mean(1, keepdim=True)
    return torch.where(layer > 0, norms / layer, 0.0)


@dataclass(kw_only=True, eq=False)
class LayerAttention:
    """What was measured of one layer's heads, a row a text; float64 on the CPU."""

    rows: dict[str, list[Tensor]] = field(default_factory=dict)

    def add(self, weights: Weights, output: Tensor) -> None:
        """Take in one batch; ``output`` as in :func:`output_ratios`."""
        queries = weights.queries
        spoke = queries - weights.silent
        measures = {
            "attention": column_means(weights.columns, queries),
            "attention_gu": column_means_gu(weights.columns_gu, queries),
            "zeros": weights.zeros / weights.pairs,
            "mass": weights.mass / queries,
            "silent": weights.silent / queries,
            "entropy": weights.entropy / spoke,  # NaN where no query has any weight
            "output": output_ratios(output),
        }
        for name, values in measures.items():
            self.rows.setdefault(name, []).append(values.cpu())

    def of(self, name: str) -> Tensor:
        """A measure of every text: [N, H], or [N, H, POSITIONS] for attention on positions."""
        return torch.cat(self.rows[name])


Observe = Callable[[int, Weights, Tensor], None]  # layer, what was measured, output [B, T, H, D]
