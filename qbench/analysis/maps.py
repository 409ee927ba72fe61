"""Attention maps of chosen heads on three kinds of short texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qbench.analysis.attention import Call, chunks
from qbench.analysis.capture import attention_observed
from qbench.errors import RecipeError
from qbench.records import AttentionMap, Measured

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


def choose(found: Measured) -> tuple[Head, ...]:
    """The head that weighs the first key most, and of the others the one whose queries have the
    largest weights: the first shows a sink if there is one, the second what is attended to."""
    heads = [
        (layer, head, one)
        for layer, part in enumerate(found.layers)
        for head, one in enumerate(part.heads)
    ]
    if not heads:
        return ()
    first = max(heads, key=lambda one: one[2].sinks[0].attention)
    others = [one for one in heads if one[:2] != first[:2]]
    chosen = [first]
    if others:
        chosen.append(max(others, key=lambda one: one[2].largest or 0.0))
    return tuple((layer, head) for layer, head, _ in chosen)


@torch.inference_mode()
def attention_maps(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prose: Tensor,
    heads: Sequence[Head],
) -> tuple[AttentionMap, ...]:
    """Weights of ``heads`` on the beginning of ``prose`` [T] and on ``TEXTS``, by kind of text.
    Raises RecipeError for a head that the model has not."""
    begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    texts: Mapping[str, list[int]] = {
        "prose": prose[:TOKENS].tolist(),
        **{
            kind: [*begin, *tokenizer.encode(text, add_special_tokens=False)][:TOKENS]
            for kind, text in TEXTS.items()
        },
    }
    found = []
    for kind, ids in texts.items():
        weights = _weights(model, torch.tensor([ids], device=model.device), heads)
        tokens = tuple(tokenizer.decode([token]) for token in ids)
        for (layer, head), one in zip(heads, weights, strict=True):
            rows = tuple(
                tuple(float(f"{weight:.4g}") for weight in row[: query + 1])
                for query, row in enumerate(one.tolist())
            )
            found.append(AttentionMap(text=kind, layer=layer, head=head, tokens=tokens, rows=rows))
    return tuple(found)


def _weights(model: PreTrainedModel, ids: Tensor, heads: Sequence[Head]) -> list[Tensor]:
    """[T, T] of each of ``heads``."""
    seen: dict[int, Tensor] = {}
    wanted = {layer for layer, _ in heads}

    def see(layer: int, call: Call) -> None:
        if layer in wanted:
            length = ids.shape[1]
            rows = [
                torch.nn.functional.pad(part, (0, length - part.shape[-1]))
                for part, _ in chunks(call)
            ]
            seen[layer] = torch.cat(rows, dim=2)[0].cpu()

    with attention_observed(model, see):
        model(input_ids=ids, use_cache=False)
    for layer, head in heads:
        if layer not in seen or head >= len(seen[layer]):
            raise RecipeError(f"--heads {layer}.{head}: the model has no such head")
    return [seen[layer][head] for layer, head in heads]
