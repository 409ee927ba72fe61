"""Measure how much a model loses if one linear layer, or one decoder layer, is quantized alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from qbench.analysis.hidden import decoder_layers
from qbench.errors import EvaluationError
from qbench.evaluation.degradation import ratio
from qbench.evaluation.scoring.hidden_states import LMHead, decoder_and_head
from qbench.metrics import perplexity
from qbench.records import UnitSensitivity

ROWS = 2048  # of logits at once
NOT_FINITE = (
    "if quantized, the model's logits are NaN or infinite; name these layers in ignore, or leave "
    "the quantizer out"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Modules that are quantized together; ``layer``: index of their decoder layer, if any."""

    name: str
    layer: int | None
    modules: tuple[str, ...]


def units(
    model: PreTrainedModel, linears: Sequence[str], *, blocks: bool, with_norms: bool = False
) -> list[Unit]:
    """Return a unit per linear layer of ``linears``, or with ``blocks`` per decoder layer that has
    some, in the model's order. ``with_norms``: units are complete decoder layers, for methods that
    change norms too."""
    names = {module: name for name, module in model.named_modules()}
    prefixes = [f"{names[layer]}." for layer in decoder_layers(model)]

    def layer_of(name: str) -> int | None:
        layers = (index for index, prefix in enumerate(prefixes) if name.startswith(prefix))
        return next(layers, None)

    if not blocks:
        return [Unit(name=name, layer=layer_of(name), modules=(name,)) for name in linears]
    return [
        Unit(name=prefix[:-1], layer=index, modules=(prefix[:-1],) if with_norms else inside)
        for index, prefix in enumerate(prefixes)
        if (inside := tuple(name for name in linears if layer_of(name) == index))
    ]


class Baseline:
    """The unquantized model's next-token distributions on texts ``ids`` [N, T] int64, kept as the
    inputs of its LM head: exact over the whole vocabulary, and small."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, *, batch: int) -> None:
        self.model, self.ids, self.batch = model, ids, batch
        self.decoder, self.head = decoder_and_head(model)
        with torch.inference_mode():
            self.rows = [self._hidden(tokens) for tokens in self._batches()]
            losses = [
                functional.cross_entropy(self.head(row).float(), targets, reduction="none")
                for rows, tokens in zip(self.rows, self._batches(), strict=True)
                for row, targets in zip(rows, tokens[:, 1:], strict=True)
            ]
        self.perplexity = perplexity(torch.cat(losses).double().mean().item())

    def against(self, unit: Unit, quantized: nn.Module) -> UnitSensitivity:
        """Return what the model loses if the modules of ``unit`` are taken from ``quantized``; the
        model is restored. Raises EvaluationError if the changed model's logits are not numbers."""
        modules = {name: quantized.get_submodule(name) for name in unit.modules}
        kl, change = (ratio(each, np.ones(len(each))) for each in self.losses(unit.name, modules))
        return UnitSensitivity(name=unit.name, layer=unit.layer, kl=kl, ln_perplexity_ratio=change)

    @torch.inference_mode()
    def losses(self, name: str, modules: Mapping[str, nn.Module]) -> np.ndarray:
        """Return the KL divergence and the rise of the loss of each text, float64 [2, N] in nats
        per token, with ``modules`` in the model's places. Raises EvaluationError, whose message
        begins with ``name``, if the changed model's logits are not numbers."""
        texts = []
        with exchanged(self.model, modules):
            head = LMHead(self.model, plain=self.head.plain)  # may be one of ``modules``
            for rows, tokens in zip(self.rows, self._batches(), strict=True):
                for parts_of_text in zip(rows, self._hidden(tokens), tokens[:, 1:], strict=True):
                    parts = zip(*(values.split(ROWS) for values in parts_of_text), strict=True)
                    differences = torch.cat([self._compare(head, *part) for part in parts], 1)
                    texts.append(differences.double().mean(1))
        values = torch.stack(texts, 1).cpu().numpy()
        if not np.isfinite(values[0]).all():
            raise EvaluationError(f"{name}: {NOT_FINITE}")
        return values

    def _batches(self) -> Iterator[Tensor]:
        for first in range(0, len(self.ids), self.batch):
            yield self.ids[first : first + self.batch].to(self.model.device)

    def _hidden(self, tokens: Tensor) -> Tensor:
        """Return the LM head's input [B, T − 1, H] at positions whose next token is known."""
        return self.decoder(input_ids=tokens, use_cache=False)[0][:, :-1]

    def _compare(self, head: LMHead, old: Tensor, new: Tensor, targets: Tensor) -> Tensor:
        """Return Σ p ln(p/q) and the rise of the loss at R positions, [2, R]. ``old``, ``new``: the
        LM head's inputs [R, H]; ``head``: the changed model's."""
        products = (self.head.linear(old), head.linear(new))
        log_p, log_q = (functional.log_softmax(head.finish(x).float(), -1) for x in products)
        difference = log_p - log_q
        # Rounding alone can bring it below 0.
        kl = (log_p.exp() * difference).sum(-1).clamp(min=0)
        return torch.stack([kl, difference.gather(-1, targets[:, None])[:, 0]])


@contextmanager
def exchanged(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replace the modules of ``model`` with the names in ``modules``, within the body."""
    originals = {name: model.get_submodule(name) for name in modules}
    try:
        for name, module in modules.items():
            model.set_submodule(name, module)
        yield
    finally:
        for name, module in originals.items():
            model.set_submodule(name, module)
