"""Measure a model in one pass over a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qbench.analysis import hidden
from qbench.analysis.attention_weights import DORMANT, THRESHOLDS, measure_weights, measures
from qbench.attention.observed import Call, attention_observed
from qbench.errors import EvaluationError
from qbench.metrics import perplexity
from qbench.progress import Advance
from qbench.records import Head, Layer, MassiveActivation, Measured, PositionBin, Sinks

STRETCH = 128  # positions over which losses and weights are averaged


@dataclass(kw_only=True, eq=False)
class Pass:
    """Collects measurements during a pass over the text."""

    states: list[hidden.States]
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)  # ``input_sizes`` of each batch
    attention: dict[int, list[dict[str, Tensor]]] = field(default_factory=dict)  # by layer
    massive: list[hidden.Massive] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)  # [B, T − 1] each: nats
    left_out: set[str] = field(default_factory=set)
    first: int = 0  # text of the batch that is read
    shape: tuple[int, int] = (0, 0)  # B, T of it
    last: tuple[Tensor, Tensor] | None = None  # the last input, and its sizes

    def see_attention(self, module: nn.Module, call: Call) -> None:
        """Add the measures of one layer's attention, as an observer of ``attention_observed``."""
        layer_measures = measures(measure_weights(call), call.output, stretch=STRETCH)
        self.attention.setdefault(module.layer_idx, []).append(layer_measures)

    def see_states(self, layer: int, module: nn.Module, inputs: Any, output: Any) -> None:
        """Add the output [B, T, D] of a decoder layer, as a forward hook."""
        states = output[0] if isinstance(output, tuple) else output
        self.massive += self.states[layer].add(states, layer=layer, first=self.first)

    def see_input(self, name: str, module: nn.Module, inputs: tuple, options: dict) -> None:
        """Add the input of the linear layer ``name``, as a pre-hook: the first tensor of ``inputs``
        or the named ``options``. Layers with the same input (q, k, v; gate, up) share its
        statistics; one that sees only some of the tokens (an expert) is left out."""
        given = next(x for x in (*inputs, *options.values()) if isinstance(x, Tensor))
        batch, length = self.shape
        if given.numel() != batch * length * given.shape[-1]:
            self.left_out.add(name)  # experts, which see some of the tokens
            return
        if self.last is None or given is not self.last[0]:
            self.last = given, hidden.input_sizes(given.reshape(batch, length, -1))
        self.inputs.setdefault(name, []).append(self.last[1])


@torch.inference_mode()
def measure(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    tokenizer: PreTrainedTokenizerBase,
    linears: Sequence[str],
    batch: int,
    progress: Advance = lambda done, total: None,
) -> Measured:
    """Run ``model`` over texts ``ids`` [N, T] int64, ``batch`` at a time, and measure it.
    ``linears``: names of the linear layers whose inputs are measured, those of the unquantized
    model. Raises UnavailableError for a model that cannot be observed, EvaluationError if its loss
    is not finite."""
    layers = hidden.decoder_layers(model)
    seen = Pass(states=[hidden.States() for _ in layers])
    device = next(model.parameters()).device
    with attention_observed(model, seen.see_attention), ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.enter_context(layer.register_forward_hook(partial(seen.see_states, index)))
        for name in linears:
            module, hook = model.get_submodule(name), partial(seen.see_input, name)
            stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        for first in range(0, len(ids), batch):
            tokens = ids[first : first + batch].to(device)
            seen.first, seen.shape, seen.last = first, tuple(tokens.shape), None
            logits = model(input_ids=tokens, use_cache=False).logits
            seen.losses.append(_losses(logits, tokens))
            progress(first + len(tokens), len(ids))
    return _measured(seen, ids, tokenizer, linears)


def _losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the loss of each text's tokens but the first, [B, T − 1], in nats."""
    return torch.stack(
        [
            torch.nn.functional.cross_entropy(rows[:-1].float(), ids[1:], reduction="none")
            for rows, ids in zip(logits, tokens, strict=True)
        ]
    )


def _measured(
    seen: Pass, ids: Tensor, tokenizer: PreTrainedTokenizerBase, linears: Sequence[str]
) -> Measured:
    """Return the record of a pass that saw the texts ``ids`` [N, T]: means over texts and heads,
    layers, massive activations, inputs of ``linears``, and bins of positions. Raises
    EvaluationError if the loss is not finite."""
    losses = torch.cat(seen.losses).double().cpu()
    loss = losses.mean().item()
    if not math.isfinite(loss):
        raise EvaluationError(
            f"the loss on the text is {loss}, since the model gives NaN or infinite logits; look "
            "at its weights, quantizer and dtype"
        )
    inside = seen.inputs.keys() - seen.left_out
    layers = {
        index: {name: torch.cat([part[name] for part in batches]).cpu() for name in batches[0]}
        for index, batches in sorted(seen.attention.items())
    }
    rows = {
        name: torch.cat([part[name] for part in layers.values()], dim=1)
        for name in next(iter(layers.values()), {})
    }
    massive = sorted(seen.massive, key=lambda each: -abs(each.value))[: hidden.MASSIVE_KEPT]
    tokens = [int(ids[each.sample, each.position]) for each in massive]
    texts, length = losses.shape[0], losses.shape[1] + 1
    bins = []
    for index, first in enumerate(range(0, length, STRETCH)):
        last = min(first + STRETCH, length) - 1
        bin_losses = losses[:, max(0, first - 1) : last].mean(1)
        bins.append(
            PositionBin(
                first=first,
                last=last,
                loss=bin_losses.mean().item(),
                loss_stderr=(bin_losses.std() / texts**0.5).item() if texts > 1 else None,
                mass=rows["mass_stretch"][..., index].mean().item(),
                largest=rows["largest_stretch"][..., index].mean().item(),
                entropy=_mean(rows["entropy_stretch"][..., index]),
            )
        )
    return Measured(
        **_means(rows),
        perplexity=perplexity(loss),
        silent_heads=(rows["silent"] == 1).double().mean().item(),
        dormant_heads=(rows["output"] < DORMANT).double().mean().item(),
        hidden=hidden.summary(seen.states),
        layers=tuple(
            Layer(
                heads=_heads(layers[index]) if index in layers else (),
                hidden=hidden.summary([states]),
            )
            for index, states in enumerate(seen.states)
        ),
        massive=tuple(
            MassiveActivation(**each._asdict(), token=token, text=tokenizer.decode([token]))
            for each, token in zip(massive, tokens, strict=True)
        ),
        inputs=tuple(hidden.input_summary(n, seen.inputs[n]) for n in linears if n in inside),
        inputs_left_out=tuple(name for name in linears if name not in inside),
        stretches=tuple(bins),
    )


def _means(rows: dict[str, Tensor]) -> dict[str, Any]:
    """Return means over texts and heads of ``rows`` [N, H, …], the result of :func:`measures`."""
    columns = zip(rows["attention"].unbind(-1), rows["attention_gu"].unbind(-1), strict=True)
    return {
        "sinks": tuple(
            Sinks(
                position=position,
                attention=mean.mean().item(),
                rates=_rates(mean),
                attention_gu=mean_gu.mean().item(),
                rates_gu=_rates(mean_gu),
            )
            for position, (mean, mean_gu) in enumerate(columns)
        ),
        "zeros": rows["zeros"].mean().item(),
        "mass": rows["mass"].mean().item(),
        "entropy": _mean(rows["entropy"]),
    }


def _rates(means: Tensor) -> dict[str, float]:
    """Return, by threshold, the share of ``means`` above it."""
    return {str(least): (means > least).double().mean().item() for least in THRESHOLDS}


def _heads(rows: dict[str, Tensor]) -> tuple[Head, ...]:
    """Return the record of each head of one layer from its ``rows`` [N, H, …]."""
    heads = []
    for head in range(rows["zeros"].shape[1]):
        head_rows = {name: values[:, head : head + 1] for name, values in rows.items()}
        heads.append(
            Head(
                **_means(head_rows),
                silent=head_rows["silent"].mean().item(),
                output=head_rows["output"].mean().item(),
                dormant=(head_rows["output"] < DORMANT).double().mean().item(),
                largest=head_rows["largest"].mean().item(),
            )
        )
    return tuple(heads)


def _mean(values: Tensor) -> float | None:
    """Return the mean of the values that are not NaN; None if all are."""
    numbers = values[~values.isnan()]
    return numbers.mean().item() if len(numbers) else None
