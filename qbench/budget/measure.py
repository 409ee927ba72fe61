"""Measure the KL divergence, on calibration text, of a model with one layer quantized at a time,
and of whole quantized models."""

from __future__ import annotations

import copy
import itertools
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from qbench.analysis.analyze_run import MODEL_PARTS
from qbench.analysis.sensitivity import NOT_FINITE, Baseline, exchanged
from qbench.budget.choose import UNQUANTIZED, Costs
from qbench.cell import as_measured, calibration_of, load, quantized_model
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import EvaluationError, UnavailableError
from qbench.files import content_key, digest_of, write_atomically
from qbench.machine import free
from qbench.plan import Cell, Plan
from qbench.progress import Progress
from qbench.quantizers import linear
from qbench.quantizers.quantize import apply, make, unpack
from qbench.quantizers.texts import CalibrationText
from qbench.records import KEY_DIGITS
from qbench.streaming import decoder_blocks, is_sharded, stream_of

SAVE_EVERY = 20.0  # seconds between two writes of unfinished costs
BATCH_TOKENS = 8192  # read at once
AT_ONCE = 8  # variants of a block
LOGITS = 2**26  # computed at once


class Search:
    """Measures models on the last ``windows`` of the calibration text ``source``, the first
    ``length`` tokens of each. Numbers are kept in the folder ``cache``; ``reused``: some costs were
    there already. ``sizes``: the model's ``Costs`` without costs."""

    def __init__(
        self, *, plan: Plan, source: CalibrationText, windows: int, length: int,
        include: Sequence[str], cache: Path, progress: Progress,
    ) -> None:  # fmt: skip
        """Load the first cell of ``plan``, which is unquantized. ``include``: ``lm_head`` and
        ``embeddings``, which have choices too if named (both if they share one matrix). Raises
        UnavailableError if the model does not fit its device."""
        self.base, self.cache, self.reused, self._plan = plan.cells[0], cache, False, plan
        self._stage = partial(progress.stage, self.base.checkpoint_name)
        self._advance = partial(progress.advance, self.base.checkpoint_name)
        self._stage("load")
        self.tokenizer = load_tokenizer(self.base.checkpoint)
        self.model = model = load(self.base, plan)
        as_measured(self.base, plan, model, [])
        if stream_of(model) is not None or is_sharded(model):
            raise UnavailableError(
                f"{self.base.checkpoint_name}: a budget needs the full model on one device; set "
                "evaluation.stream: false on a larger GPU"
            )
        linear.linearize(model)
        text = calibration_of(replace(self.base, calibration=source), self.tokenizer)
        self.baseline = FromBlocks(model, text.ids[-windows:, :length])
        read = [getattr(source, name) for name in ("digest", "samples", "length", "seed", "bos")]
        code = digest_of([Path(__file__).parent, Path(__file__).parents[1] / "analysis"])
        self.key = {"text": read, "cut": [windows, length], "include": sorted(include),
                    "search": code}  # fmt: skip
        head = model.get_output_embeddings()
        at_ends = {
            name: layer
            for name, layer in linear.ends(model).items()
            if ("lm_head" if layer is head else "embeddings") in include
            or (include and layer is head and head.weight is model.get_input_embeddings().weight)
        }
        self.layers = linear.linears(model) | at_ends
        weights = [layer.weight for layer in self.layers.values()]
        others = [m.weight for n, m in linear.matrices(model).items() if n not in self.layers]
        self.sizes = Costs(
            shapes={name: tuple(layer.weight.shape) for name, layer in self.layers.items()},
            options={},
            ends=list(at_ends),
            others=(sum(weight.numel() for weight in others), bits_of(others)),
            outside=bits_of(model.parameters()) - bits_of([*weights, *others]),
        )

    def costs(self, cells: Mapping[str, Cell]) -> tuple[Costs, dict[str, float]]:
        """Return what each choice of ``cells`` (by its text) costs each layer alone, and the KL
        divergence with all layers quantized, LM head and embeddings left out. A search that was
        stopped goes on.

        Any change of a layer moves the rounding of all that follows, which in bfloat16 costs about
        0.001 nats however small the change is. That floor, measured with weights that differ in
        their last bit, is taken off each cost.
        """
        cells = {UNQUANTIZED: self.base, **cells}
        self._stage(f"costs of {len(self.layers)} layers × {len(cells)} choices", len(cells))
        measured = {choice: self._costs_of(cell, number, len(cells))
                    for number, (choice, cell) in enumerate(cells.items())}  # fmt: skip
        floor = {name: kl for name, (_, kl) in measured[UNQUANTIZED]["layers"].items()}
        options: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in self.layers}
        for choice, values in measured.items():
            for name, (bits, kl) in values["layers"].items():
                options[name][choice] = bits, max(0.0, kl - floor[name])
        kl = {choice: values["kl"] for choice, values in measured.items()}
        return replace(self.sizes, options=options, floor=floor), kl

    def _costs_of(self, cell: Cell, number: int, total: int) -> dict[str, Any]:
        """Return the ``layers`` of the uniform column ``cell``, each with its bits and its KL
        alone, and the ``kl`` of all. It is ``number`` of ``total``, for the progress."""
        path, kept = self._kept("costs", cell)
        self.reused |= bool(kept)
        if "kl" in kept:
            return kept
        if cell.quantization.weights is None:
            modules = {name: (_other_last_bits(layer), bits_of([layer.weight]))
                       for name, layer in self.layers.items()}  # fmt: skip
        else:
            calibration = calibration_of(cell, self.tokenizer)
            advance = lambda done, of: self._advance(number + done / of / 2, total)  # noqa: E731
            quantized = copy.deepcopy(self.model)
            with torch.no_grad():
                tensors, _ = make(quantized, cell.quantization, calibration, advance)
            modules = self._modules(apply(quantized, cell.quantization, tensors), cell)
            del quantized
        layers, saved = kept.setdefault("layers", {}), time.monotonic()
        for _, names in itertools.groupby(modules, self.baseline.block_of):
            missing = [name for name in names if name not in layers]
            places = (linear.in_place(self.model, name, modules[name][0]) for name in missing)
            costs = self.baseline.kl(*places, choice=cell.label)
            for name, kl in zip(missing, costs, strict=True):
                layers[name] = modules[name][1], kl
            self._advance(number + (1 + len(layers) / len(modules)) / 2, total)
            if time.monotonic() - saved >= SAVE_EVERY:
                write_atomically(path, json.dumps(kept).encode())
                saved = time.monotonic()
        inside = {name: m for name, (m, _) in modules.items() if name not in self.sizes.ends}
        (kept["kl"],) = self.baseline.kl(inside, choice=cell.label)
        write_atomically(path, json.dumps(kept).encode())
        return kept

    def _modules(
        self, quantized: PreTrainedModel, cell: Cell
    ) -> dict[str, tuple[nn.Module, float]]:
        """Return the quantized modules by layer's name, with the bits that are stored of each."""
        weights, modules = cell.quantization.weights, {}
        model = self.model
        for name in linear.linears(model, weights.ignore) | linear.named_ends(model, weights):
            module, settings = linear.layer_of(quantized, name), weights.for_layer(name)
            stored = unpack(quantized, name, settings).tensors
            modules[name] = module, bits_of(stored.values())
        return modules

    def whole(self, cell: Cell) -> float:
        """Return the KL divergence, nats per token on the text, of a whole quantized model. Its
        weights stay in the cache, where a run finds them."""
        path, kept = self._kept("whole", cell)
        if "kl" not in kept:
            self._stage(cell.label)
            free(self._plan.device)
            quantized, _ = quantized_model(
                cell, copy.deepcopy(self.model), self.tokenizer, self.cache, self._advance
            )
            places: dict[str, nn.Module] = {}
            for name, (module, _) in self._modules(quantized, cell).items():
                places |= linear.in_place(self.model, name, module)
            (kept["kl"],) = self.baseline.kl(places, choice=cell.label)
            write_atomically(path, json.dumps(kept).encode())
        return kept["kl"]

    def _kept(self, kind: str, cell: Cell) -> tuple[Path, dict[str, Any]]:
        """Return the file of the cache for the numbers ``kind`` of ``cell``, and those in it."""
        parts = {n: cell.key_parts[n] for n in MODEL_PARTS if n in cell.key_parts}
        key = content_key({**parts, "kind": kind, **self.key})
        path = self.cache / "budget" / f"{key[:KEY_DIGITS]}.json"
        with suppress(OSError, ValueError, TypeError):
            return path, dict(json.loads(path.read_bytes()))
        return path, {}


class FromBlocks(Baseline):
    """Holds the unquantized model's predictions on texts ``ids`` [N, T], and the inputs of its
    decoder blocks: of a changed model only the changed block and those after it are computed."""

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.root, self.blocks = decoder_blocks(model)
        super().__init__(model, ids, batch=max(1, BATCH_TOKENS // ids.shape[1]))
        self._inputs: list[list[Tensor]] = []  # by batch and block, [B, T, H]
        handles = [block.register_forward_pre_hook(self._keep, with_kwargs=True)
                   for block in self.blocks]  # fmt: skip
        with torch.inference_mode():
            for tokens in self._batches():
                self._inputs.append([])
                self._hidden(tokens)
            for handle in handles:
                handle.remove()
            last = len(self.blocks) - 1
            self.skips = all(  # False: blocks read more than the output of the block before
                torch.equal(row, self._from_block(last, inputs[last], tokens, [{}]))
                for row, inputs, tokens in zip(
                    self.rows, self._inputs, self._batches(), strict=True
                )
            )

    def _keep(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        self._inputs[-1].append(args[0] if args else kwargs["hidden_states"])

    def block_of(self, name: str) -> int | None:
        """Return the number of the decoder block with the module ``name``; None if it is in none,
        or if no block can be skipped."""
        place = name.removeprefix(f"{self.root}.").partition(".")[0]
        return int(place) if self.skips and place.isdigit() else None

    @torch.inference_mode()
    def kl(self, *variants: Mapping[str, nn.Module], choice: str = "") -> list[float]:
        """Return the KL divergence, nats per token, with each of ``variants``, modules by name, in
        the places of the model's. If all lie in one block they run as one batch from it on, else
        each by a pass through the model. Raises EvaluationError, which names the quantizer
        ``choice``, if the logits are not numbers."""
        labels = [
            ", ".join(list(modules)[:3]) + (choice and f" by {choice}") for modules in variants
        ]
        blocks = {self.block_of(name) for modules in variants for name in modules}
        if len(blocks) != 1 or None in blocks:
            losses = [self.losses(*each) for each in zip(labels, variants, strict=True)]
            return [float(each[0].mean()) for each in losses]
        if len(variants) > AT_ONCE:
            rest = self.kl(*variants[AT_ONCE:], choice=choice)
            return self.kl(*variants[:AT_ONCE], choice=choice) + rest
        (index,), divergences = blocks, []
        for rows, inputs, tokens in zip(self.rows, self._inputs, self._batches(), strict=True):
            hidden = self._from_block(index, inputs[index], tokens, variants)
            divergences.append(self._compared(rows, hidden.chunk(len(variants))))
        means = torch.cat(divergences, 1).mean(1).tolist()
        for label, mean in zip(labels, means, strict=True):
            if not math.isfinite(mean):
                raise EvaluationError(f"{label}: {NOT_FINITE}")
        return means

    def _from_block(
        self, index: int, hidden: Tensor, tokens: Tensor, variants: Sequence[Mapping]
    ) -> Tensor:
        """Return the LM head's input [V · B, T − 1, H] with each of the V ``variants``, from the
        input ``hidden`` [B, T, H] of block ``index``."""
        block, rows = self.blocks[index], len(variants) * len(tokens)
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
            if isinstance(outputs[0], tuple):  # with attention weights, which are not read
                return torch.cat([output[0] for output in outputs]), *outputs[0][1:]
            return torch.cat(outputs)

        try:
            for skipped in self.blocks[:index]:
                skipped.forward = lambda *_, **__: hidden
            block.forward = each
            return self._hidden(tokens.repeat(len(variants), 1))
        finally:
            for changed in self.blocks[: index + 1]:
                vars(changed).pop("forward", None)

    def _compared(self, old: Tensor, variants: Sequence[Tensor]) -> Tensor:
        """Return Σ p ln(p/q) per variant and position, [V, B · (T − 1)]; inputs are the LM
        head's."""
        rows, divergences = max(1, LOGITS // self.head.linear.weight.shape[0]), []
        pieces = (tensor.flatten(0, 1).split(rows) for tensor in (old, *variants))
        for before, *after in zip(*pieces, strict=True):
            log_p = functional.log_softmax(self.head(before).float(), -1)
            p = log_p.exp()
            logs_q = (functional.log_softmax(self.head(x).float(), -1) for x in after)
            parts = [(p * (log_p - log_q)).sum(-1).clamp(min=0) for log_q in logs_q]
            divergences.append(torch.stack(parts).double())
        return torch.cat(divergences, 1)


def bits_of(tensors: Iterable[Tensor]) -> float:
    """Return the bits that ``tensors`` take."""
    return sum(8.0 * tensor.nbytes for tensor in tensors)


def _other_last_bits(layer: nn.Linear) -> nn.Linear:
    """Return ``layer`` with its weights moved by about half a unit in their last place, up or down
    at random, then rounded."""
    weight = layer.weight.detach()
    random = torch.Generator(weight.device).manual_seed(0)  # a processor would take minutes at 7 B
    signs = torch.randint(0, 2, weight.shape, generator=random, device=weight.device) - 0.5
    moved = weight.float() * (1 + torch.finfo(weight.dtype).eps * signs)
    return linear.linear_layer(moved.to(weight.dtype), layer.bias)
