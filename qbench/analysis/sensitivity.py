"""Measure how much a model loses if one linear layer, or one decoder layer, is quantized alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from qbench.analysis.hidden import decoder_layers
from qbench.errors import EvaluationError
from qbench.evaluation.kl_observer import ratio
from qbench.evaluation.scoring.forward import LMHead, decoder_and_head
from qbench.files import GIB
from qbench.machine import memory_gib
from qbench.metrics import perplexity
from qbench.records import UnitSensitivity
from qbench.streaming import decoder_blocks, free_gpu_bytes, is_sharded, stream_of

AT_ONCE = 8  # variants of a block
LOGITS = 2**26  # computed at once
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
    """Return a unit per linear layer of ``linears``, in their order. With ``blocks``: a unit per
    decoder layer that holds some of them, in the model's order, of these linear layers. With
    ``blocks`` and ``with_norms``: of the complete decoder layer, for methods that change norms too.
    Without ``blocks`` ``with_norms`` has no effect."""
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
    inputs of its LM head: exact over the whole vocabulary, and small. The inputs of its decoder
    blocks are kept too: if one block changes, only this one and those after it are computed."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, *, batch: int) -> None:
        self.model, self.ids, self.batch = model, ids, batch
        self.decoder, self.head = decoder_and_head(model, "; leave this checkpoint out")
        self.root, self.blocks = decoder_blocks(model)
        self._inputs: list[list[Tensor]] = []  # by batch and block, [B, T, H]
        self._beside: dict[nn.Module, tuple] = {}  # what a block returns beside these, not read
        # False: blocks do not lie on one device, or read more than the output of the block before,
        # or their inputs would take half of the free memory
        self.skips = stream_of(model) is None and not is_sharded(model) and self._have_room()
        with torch.inference_mode():
            self.rows = [self._recorded(tokens) for tokens in self._batches()]
            inputs = [*zip(self._inputs, self._batches(), strict=False)]
            last = len(self.blocks) - 1
            self.skips = self.skips and all(
                torch.equal(rows, self._from_block(last, *each, [{}]))
                for rows, each in zip(self.rows, inputs, strict=True)
            )
            losses = [
                functional.cross_entropy(self.head(row).float(), targets, reduction="none")
                for rows, tokens in zip(self.rows, self._batches(), strict=True)
                for row, targets in zip(rows, tokens[:, 1:], strict=True)
            ]
        self.perplexity = perplexity(torch.cat(losses).double().mean().item())

    def against(self, unit: Unit, quantized: nn.Module) -> UnitSensitivity:
        """Return the damage if the modules of ``unit`` are replaced by those of ``quantized``; the
        model is restored. Raises EvaluationError if the changed model's logits are not numbers."""
        modules = {name: quantized.get_submodule(name) for name in unit.modules}
        kl, change = (ratio(each, np.ones(len(each))) for each in self.losses(modules)[0])
        return UnitSensitivity(name=unit.name, layer=unit.layer, kl=kl, ln_perplexity_ratio=change)

    def block_of(self, name: str) -> int | None:
        """Return the number of the decoder block with the module ``name``; None if it is in none,
        or if no block can be skipped."""
        place, inside, _ = name.removeprefix(f"{self.root}.").partition(".")
        return int(place) if self.skips and inside and place.isdigit() else None

    @torch.inference_mode()
    def losses(self, *variants: Mapping[str, nn.Module], choice: str = "") -> np.ndarray:
        """Return the KL divergence and the rise of the loss of each text, float64 [V, 2, N] in nats
        per token, with each of V ``variants``, modules by name, in the model's places. If all lie
        in one block they run as one batch from it on, else each by a pass through the model. Raises
        EvaluationError, which names the quantizer ``choice``, if the logits are not numbers."""
        blocks = {self.block_of(name) for modules in variants for name in modules}
        index = blocks.pop() if len(blocks) == 1 else None
        most = 1 if index is None else AT_ONCE
        if len(variants) > most:
            parts = variants[:most], variants[most:]
            return np.concatenate([self.losses(*part, choice=choice) for part in parts])
        with exchanged(self.model, variants[0] if index is None else {}):
            head = LMHead(self.model, plain=self.head.plain)  # may be one of the modules
            texts = []
            for number, tokens in enumerate(self._batches()):
                if index is None:
                    hidden = self._hidden(tokens)
                else:
                    inputs = self._inputs[number]
                    hidden = self._from_block(index, inputs, tokens, variants)
                after = hidden.chunk(len(variants))
                texts.append(self._compare(head, self.rows[number], after, tokens[:, 1:]))
        values = torch.cat(texts, -1).cpu().numpy()
        for modules, (kl, _) in zip(variants, values, strict=True):
            if not np.isfinite(kl).all():
                names = ", ".join([*modules][:3]) + (choice and f" by {choice}")
                raise EvaluationError(f"{names}: {NOT_FINITE}")
        return values

    def _have_room(self) -> bool:
        """Return whether the inputs of all blocks fit into half of the free memory."""
        width, device = self.model.get_input_embeddings().weight.shape[1], self.model.device
        needed = len(self.blocks) * self.ids.numel() * width * self.model.dtype.itemsize
        free = memory_gib("cpu") * GIB if device.type == "cpu" else free_gpu_bytes(device)
        return needed < free / 2

    def _batches(self) -> Iterator[Tensor]:
        for first in range(0, len(self.ids), self.batch):
            yield self.ids[first : first + self.batch].to(self.model.device)

    def _hidden(self, tokens: Tensor) -> Tensor:
        """Return the LM head's input [B, T − 1, H] at positions whose next token is known."""
        return self.decoder(input_ids=tokens, use_cache=False)[0][:, :-1]

    def _recorded(self, tokens: Tensor) -> Tensor:
        """Return the LM head's input as ``_hidden`` does, and keep those of the blocks."""
        inputs: list[Tensor] = []

        def keep(block: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            inputs.append(args[0] if args else kwargs["hidden_states"])
            if isinstance(output, tuple):
                self._beside[block] = (None,) * (len(output) - 1)

        with ExitStack() as stack:
            for block in self.blocks if self.skips else ():
                stack.enter_context(block.register_forward_hook(keep, with_kwargs=True))
            self._inputs.append(inputs)
            return self._hidden(tokens)

    def _from_block(
        self, index: int, inputs: Sequence[Tensor], tokens: Tensor, variants: Sequence[Mapping]
    ) -> Tensor:
        """Return the LM head's input [V · B, T − 1, H] with each of the V ``variants``, from the
        blocks' ``inputs``, each [B, T, H]. Only block ``index`` has changed modules."""
        block, rows, hidden = self.blocks[index], len(variants) * len(tokens), inputs[index]
        forward = block.forward

        def once(x: Tensor) -> Tensor:  # a mask of all rows, or of their heads: they are copies
            of_rows = x.ndim > 0 and x.shape[0] % rows == 0
            return x[: x.shape[0] // len(variants)] if of_rows else x

        def each(*args: Any, **kwargs: Any) -> Any:
            first = (hidden, *args[1:]) if args else ()
            named = kwargs if args else {**kwargs, "hidden_states": hidden}
            first, named = tree_map_only(Tensor, once, (first, named))
            outputs = []
            for modules in variants:
                with exchanged(self.model, modules):
                    outputs.append(forward(*first, **named))
            if isinstance(outputs[0], tuple):  # with attention weights or a state, not read
                return torch.cat([output[0] for output in outputs]), *outputs[0][1:]
            return torch.cat(outputs)

        try:
            for skipped in self.blocks[:index]:
                beside = self._beside.get(skipped)
                output = hidden if beside is None else (hidden, *beside)
                skipped.forward = lambda *_, output=output, **__: output
            block.forward = each
            return self._hidden(tokens.repeat(len(variants), 1))
        finally:
            for changed in self.blocks[: index + 1]:
                vars(changed).pop("forward", None)

    def _compare(
        self, head: LMHead, old: Tensor, variants: Sequence[Tensor], targets: Tensor
    ) -> Tensor:
        """Return Σ p ln(p/q) and the rise of the loss per variant and text, [V, 2, B]. ``old``,
        ``variants``: the LM head's inputs [B, T − 1, H]; ``head``: the changed model's."""
        rows, differences = max(1, LOGITS // self.head.linear.weight.shape[0]), []
        pieces = (tensor.flatten(0, 1).split(rows) for tensor in (targets, old, *variants))
        for expected, before, *after in zip(*pieces, strict=True):
            log_p = functional.log_softmax(self.head(before).float(), -1)
            p, parts = log_p.exp(), []
            for x in after:
                difference = log_p - functional.log_softmax(head(x).float(), -1)
                # Rounding alone can bring it below 0.
                kl = (p * difference).sum(-1).clamp(min=0)
                parts.append(torch.stack([kl, difference.gather(-1, expected[:, None])[:, 0]]))
            differences.append(torch.stack(parts))
        return torch.cat(differences, -1).unflatten(-1, targets.shape).double().mean(-1)


@contextmanager
def exchanged(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replace the modules of ``model`` by those of their names in ``modules``, within the body;
    put the originals back after it."""
    originals = {name: model.get_submodule(name) for name in modules}
    try:
        for name, module in modules.items():
            model.set_submodule(name, module)
        yield
    finally:
        for name, module in originals.items():
            model.set_submodule(name, module)
