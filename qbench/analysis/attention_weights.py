"""Measure attention weights, a chunk of queries at a time, without keeping them; and keep the maps
of chosen heads on three short texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qbench.attention import reference
from qbench.attention.normalizers import NORMALIZERS
from qbench.attention.observed import Call, attention_observed
from qbench.errors import UnavailableError
from qbench.records import AttentionMap, Measured

POSITIONS = 4  # first key positions whose sinks are measured
GU_LENGTH = 64  # T of Gu et al. 2024
THRESHOLDS = (0.2, 0.3, 0.4)  # ε: the softpick paper's two (its section 6.2), and one above
DORMANT = 0.01  # of the mean output norm of a layer's heads
CHUNK_WEIGHTS = {"cpu": 1 << 20, "cuda": 1 << 26}  # held at once: 4 MiB and 256 MiB in float32


def column_means(columns: Tensor, queries: int) -> Tensor:
    """Return the softpick paper's measure of a sink (section 6.2) for each key k: α_k = Σ_q A(q, k)
    / T over all T queries, also those that cannot see the key ("the average value of the first
    column in A"). ``columns`` [B, H, N]: sums over queries. A head has a sink at k on a text if α_k
    > ε; the sink rate is the share of such heads, averaged over texts."""
    return columns / queries


def column_means_gu(columns: Tensor, queries: int) -> Tensor:
    """Return the measure of Gu et al. 2024 (arXiv 2410.10781, section 3.2): α_k = Σ_{q ≥ k} A(q, k)
    / (T − k), k from 0, over the queries that see the key, for the first T = 64 tokens of a text.
    ``columns`` [B, H, POSITIONS]: sums over the first T queries. No key sees a later token, so the
    first 64 rows of a longer text are those of the text cut there."""
    length = min(queries, GU_LENGTH)
    seen = torch.arange(length, length - POSITIONS, -1, device=columns.device)
    return columns / seen.clamp(min=1)


def chunks(call: Call) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every weight [B, H, R, N] of ``call`` by the definition of its attention function in
    float32, R queries at a time over the N keys that causality lets any of them see; and which
    pairs attention allows, bool, broadcastable to the weights."""
    normalizer = NORMALIZERS[call.normalizer]
    given = normalizer.checked(call.parameters, call.query.shape[1])
    for scores, allowed, _ in reference.chunks(
        call.query, call.key, normalizer, given, scale=call.scale, softcap=call.softcap,
        mask=call.mask, causal=True, size=CHUNK_WEIGHTS["cuda" if call.query.is_cuda else "cpu"],
    ):  # fmt: skip
        settings = {"allowed": allowed, "parameters": given}
        fraction = normalizer.fraction(scores, **settings)
        if fraction is None:
            yield normalizer.weights(scores, **settings), allowed
        else:
            numerator, denominator = fraction
            yield numerator.div_(denominator), allowed


@torch.no_grad()
def measure_weights(call: Call) -> dict[str, Tensor]:
    """Return sums over every weight of ``call``, on its device.

    ``columns`` [B, H, T]: Σ over queries of the weight on each key; ``columns_gu``
    [B, H, POSITIONS]: on the first keys, over the first GU_LENGTH queries; both float64.
    Of each query, float32 [B, H, T]: ``largest`` max_k a(q, k); ``mass`` Σ_k a(q, k), 1 for
    softmax; ``entropy`` −Σ p ln p with p = a / Σ a, in nats, NaN of a query without any weight.
    ``zeros`` [B, H]: share of the pairs that attention allows whose weight is exactly 0: the
    softpick paper's sparsity (section 6.1, table 4: "exact zeros in the lower triangle"); its
    published script counts |a| ≤ 1e-5 by default."""
    batch, heads, length, _ = call.query.shape
    empty = partial(torch.zeros, batch, heads, device=call.query.device)
    columns, columns_gu = (empty(keys, dtype=torch.float64) for keys in (length, POSITIONS))
    mass, entropy, largest = (empty(length) for _ in range(3))
    nonzero, pairs = (empty(dtype=torch.int64) for _ in range(2))
    first = 0
    for weights, allowed in chunks(call):  # each measure reads them once, only the last writes
        keys, rows = weights.shape[-1], slice(first, first + weights.shape[2])
        columns[..., :keys] += weights.sum(2)
        early = weights[:, :, : max(0, GU_LENGTH - first), :POSITIONS]
        columns_gu[..., : early.shape[-1]] += early.sum(2, dtype=torch.float64)
        nonzero += torch.count_nonzero(weights, dim=(2, 3))
        pairs += allowed.sum((-2, -1))
        mass[:, :, rows] = total = weights.sum(-1)
        largest[:, :, rows] = weights.amax(-1)
        # −Σ (a/S) ln (a/S) = (Σ −a ln a) / S + ln S
        terms = torch.special.entr(weights, out=weights).sum(-1)
        entropy[:, :, rows] = (terms / total + total.log()).where(total > 0, torch.nan)
        first = rows.stop
    return {
        "columns": columns,
        "columns_gu": columns_gu,
        "mass": mass,
        "entropy": entropy,
        "largest": largest,
        "zeros": 1 - nonzero / pairs,
    }


def output_ratios(output: Tensor) -> Tensor:
    """Return the mean norm of each head's output over a text, divided by the mean of its layer's
    heads: [B, H] float64; 0 if the whole layer gives 0. ``output`` [B, T, H, D] is attention's
    output before the output projection. This is the average head output norm, normalized by layer
    (AHON LN), of Sandoval-Segura et al. 2025 (arXiv 2504.03889), who choose thresholds by what
    removing heads costs; here a head is dormant on a text below ``DORMANT``."""
    norms = output.float().norm(dim=-1).double().mean(1)
    layer = norms.mean(1, keepdim=True)
    return torch.where(layer > 0, norms / layer, 0.0)


def measures(weights: dict[str, Tensor], output: Tensor, *, stretch: int) -> dict[str, Tensor]:
    """Return the measures of one layer by name, float64, one row per text, from the sums
    ``weights`` of :func:`measure_weights`: [B, H]; [B, H, POSITIONS] for ``attention`` and
    ``attention_gu``, the means on the first keys; [B, H, S] for ``…_stretch``, means over each
    ``stretch`` of queries. ``output``: see :func:`output_ratios`."""
    queries = weights["columns"].shape[-1]
    means = column_means(weights["columns"], queries)[..., :POSITIONS]
    result = {
        "attention": nn.functional.pad(means, (0, POSITIONS - means.shape[-1])),
        "attention_gu": column_means_gu(weights["columns_gu"], queries),
        "zeros": weights["zeros"],
        "silent": (weights["mass"] == 0).double().mean(-1),
        "output": output_ratios(output),
    }
    for name in ("mass", "entropy", "largest"):
        values = weights[name].double()
        # NaN where no query has any weight, which has no entropy then
        result[name] = values.nanmean(-1)
        parts = values.split(stretch, dim=-1)
        result[f"{name}_stretch"] = torch.stack([part.nanmean(-1) for part in parts], -1)
    return result


TOKENS = 48  # of each text
# The softpick paper's appendix E shows maps of an abstract, of prose and of a description. Ours:
# the analyzed text itself, and two kinds that the same head may treat otherwise.
TEXTS = {
    "code": (
        "def mean(values):\n    total = 0\n    for value in values:\n        total = total + "
        "value\n    return total / len(values)\n\nprint(mean([1, 2, 3]))  # 2\n"
    ),
    "few-shot": (
        "Question: What is the opposite of hot?\nAnswer: cold\n\nQuestion: What is the opposite of "
        "small?\nAnswer: large\n\nQuestion: What is the opposite of early?\nAnswer: late\n"
    ),
}
Head = tuple[int, int]  # layer and head, from 0


def choose_heads(measured: Measured) -> tuple[Head, ...]:
    """Return two heads to draw: the one with the most weight on the first key, which shows a sink
    if there is one, and of the others, if any, the one whose queries have the largest weights."""
    heads = {
        (layer, head): measures
        for layer, part in enumerate(measured.layers)
        for head, measures in enumerate(part.heads)
    }
    first = sorted(heads, key=lambda at: -heads[at].sinks[0].attention)[:1]
    others = [at for at in heads if at not in first]
    return (*first, *sorted(others, key=lambda at: -(heads[at].largest or 0.0))[:1])


@torch.inference_mode()
def attention_maps(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prose: Tensor, heads: Sequence[Head]
) -> tuple[AttentionMap, ...]:
    """Return the weights of ``heads`` on the first TOKENS tokens of ``prose`` [T] and of each of
    ``TEXTS``: per query those on the keys up to its own. Raises UnavailableError for a head that
    the model does not have."""
    begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    texts = {"prose": prose.tolist()} | {
        kind: [*begin, *tokenizer.encode(text, add_special_tokens=False)]
        for kind, text in TEXTS.items()
    }
    maps = []
    for kind, tokenized in texts.items():
        ids = tokenized[:TOKENS]
        weights = _weights(model, torch.tensor([ids], device=model.device), heads)
        tokens = tuple(tokenizer.decode([token]) for token in ids)
        for (layer, head), head_weights in zip(heads, weights, strict=True):
            rows = tuple(
                tuple(float(f"{weight:.4g}") for weight in row[: query + 1])
                for query, row in enumerate(head_weights.tolist())
            )
            maps.append(AttentionMap(text=kind, layer=layer, head=head, tokens=tokens, rows=rows))
    return tuple(maps)


def _weights(model: PreTrainedModel, ids: Tensor, heads: Sequence[Head]) -> list[Tensor]:
    """Return the weights of each of ``heads`` on the text ``ids`` [1, T], [T, T] each."""
    seen: dict[int, Tensor] = {}
    layers = {layer for layer, _ in heads}

    def see(module: nn.Module, call: Call) -> None:
        if module.layer_idx in layers:
            weights, _ = next(chunks(call))  # so short a text is one chunk
            seen[module.layer_idx] = weights[0].cpu()

    with attention_observed(model, see):
        model(input_ids=ids, use_cache=False)
    for layer, head in heads:
        if layer not in seen or head >= len(seen[layer]):
            raise UnavailableError(
                f"layer {layer} has no head {head}; name layers and heads of the model, from 0"
            )
    return [seen[layer][head] for layer, head in heads]
