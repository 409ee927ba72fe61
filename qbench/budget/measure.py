"""Measure the KL divergence, on calibration text, of a model with one layer quantized at a time,
and of whole quantized models."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qbench.analysis.analyze_run import MODEL_PARTS
from qbench.analysis.sensitivity import Baseline
from qbench.budget.choose import UNQUANTIZED, Costs
from qbench.cell import as_measured, calibration_of, load, quantized_model
from qbench.errors import ResultsError, UnavailableError
from qbench.files import content_key, digest_of, write_atomically
from qbench.machine import free
from qbench.plan import Cell, Plan
from qbench.progress import Advance, Progress
from qbench.quantizers.linear import (
    ends,
    in_place,
    layer_of,
    linear_layer,
    linearize,
    linears,
    matrices,
    named_ends,
)
from qbench.quantizers.quantize import apply, backend, make
from qbench.quantizers.texts import CalibrationText
from qbench.records import KEY_DIGITS
from qbench.streaming import decoder_blocks, is_sharded, stream_of

SAVE_EVERY = 20.0  # seconds between two writes of unfinished costs
BATCH_TOKENS = 8192  # read at once

Places = dict[str, nn.Module]  # the modules, by name, that put a layer in its place


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
        self.base, self.cache, self.progress, self.reused = plan.cells[0], cache, progress, False
        self.device = plan.device
        self._stage("load")
        self.model, self.tokenizer = load(self.base, plan)
        as_measured(self.base, plan, self.model, [])
        if stream_of(self.model) is not None or is_sharded(self.model):
            raise UnavailableError(
                f"{self.base.checkpoint_name}: a budget needs the model whole on one device; set "
                "evaluation.stream: false on a larger GPU"
            )
        linearize(self.model)
        text = calibration_of(replace(self.base, calibration=source), self.tokenizer)
        self.baseline = FromBlocks(self.model, text.ids[-windows:, :length])
        read = ("digest", "samples", "length", "seed", "bos")
        code = digest_of([Path(__file__).parent, Path(__file__).parents[1] / "analysis"])
        self._key = {"text": [getattr(source, name) for name in read], "search": code,
                     "cut": [windows, length], "include": sorted(include)}  # fmt: skip
        head, at_ends = self.model.get_output_embeddings(), ends(self.model)
        words = {n: "lm_head" if layer is head else "embeddings" for n, layer in at_ends.items()}
        shared = list(words.values()) == ["lm_head"]
        at_ends = {n: layer for n, layer in at_ends.items()
                   if words[n] in include or (shared and include)}  # fmt: skip
        self.layers = linears(self.model) | at_ends
        self.sizes = self._sizes(list(at_ends))

    def _sizes(self, at_ends: Sequence[str]) -> Costs:
        others = [matrix.weight for name, matrix in matrices(self.model).items()
                  if name not in self.layers]  # fmt: skip
        weights = [layer.weight for layer in self.layers.values()]
        outside = bits_of(self.model.parameters()) - bits_of(weights) - bits_of(others)
        return Costs(
            shapes={name: tuple(layer.weight.shape) for name, layer in self.layers.items()},
            options={},
            ends=at_ends,
            others=(sum(weight.numel() for weight in others), bits_of(others)),
            outside=outside,
        )

    def _stage(self, name: str, total: float | None = None) -> None:
        self.progress.stage(self.base.checkpoint_name, name, total)

    def costs(self, cells: Mapping[str, Cell]) -> tuple[Costs, dict[str, float]]:
        """Return what each choice of ``cells`` (by its text) costs each layer alone, and the KL
        divergence with all layers quantized, LM head and embeddings left out. A search that was
        stopped goes on.

        Any change of a layer moves the rounding of all that follows, which in bfloat16 costs about
        0.001 nats however small the change is. That floor, measured with weights that differ in
        their last bit, is taken off each cost.
        """
        measured: dict[str, dict[str, Any]] = {}
        cells = {UNQUANTIZED: self.base, **cells}
        total = 2 * len(cells) * len(self.layers)
        self._stage(f"costs of {len(self.layers)} layers × {len(cells)} choices", total)
        for number, (choice, cell) in enumerate(cells.items()):
            first = number * total / len(cells)
            advance = partial(self._advance, first, total / len(cells), total)
            measured[choice] = self._costs_of(cell, advance)
        floor = {name: kl for name, (_, kl) in measured[UNQUANTIZED]["layers"].items()}
        options = {
            name: {choice: (bits, max(0.0, kl - floor[name]))
                   for choice, values in measured.items()
                   for bits, kl in [values["layers"].get(name, (None, 0))] if bits}
            for name in self.layers
        }  # fmt: skip
        return replace(self.sizes, options=options, floor=floor), {
            choice: values["kl"] for choice, values in measured.items()
        }

    def _advance(self, first: float, share: float, total: float, done: float, of: float) -> None:
        self.progress.advance(self.base.checkpoint_name, first + share * done / of, total)

    def _costs_of(self, cell: Cell, advance: Advance) -> dict[str, Any]:
        """Return the ``layers`` of ``cell``, each with bits and KL alone, and the ``kl`` of all."""
        kept = Kept(self, "costs", cell)
        self.reused |= bool(kept.values)
        values = kept.values = {"layers": {}, **kept.values}
        if "kl" in values:
            return values
        weights, config = cell.quantization.weights, cell.quantization
        if weights is None:
            modules = {name: _other_last_bits(layer) for name, layer in self.layers.items()}
            bits = {name: bits_of([layer.weight]) for name, layer in self.layers.items()}
        else:
            quantized, half = copy.deepcopy(self.model), lambda done, of: advance(done, 2 * of)
            calibration = calibration_of(cell, self.tokenizer)
            with torch.no_grad():
                quantized = apply(quantized, config, make(quantized, config, calibration, half)[0])
            modules = self._quantized(quantized, cell)
            settings = {name: weights.for_layer(name) for name in modules}
            bits = {n: bits_of(backend(s).unpack(modules[n], s).tensors.values())
                    for n, s in settings.items()}  # fmt: skip
            del quantized
        for done, (name, module) in enumerate(modules.items(), start=len(modules)):
            if name not in values["layers"]:
                kl = self.baseline.kl(in_place(self.model, name, module))
                values["layers"][name] = bits[name], kl
                kept.save(now=False)
            advance(done, 2 * len(modules))
        inside = {name: m for name, m in modules.items() if name not in self.sizes.ends}
        values["kl"] = self.baseline.kl(inside)
        kept.save()
        del modules, inside
        free(self.device)
        return values

    def _quantized(self, quantized: PreTrainedModel, cell: Cell) -> dict[str, nn.Module]:
        weights = cell.quantization.weights
        names = linears(self.model, weights.ignore) | named_ends(self.model, weights)
        return {name: layer_of(quantized, name) for name in names}

    def whole(self, cell: Cell) -> float:
        """Return the KL divergence, nats per token on the text, of a whole quantized model. Its
        weights stay in the cache, where a run finds them."""
        kept = Kept(self, "whole", cell)
        if "kl" not in kept.values:
            self._stage(cell.label, 1.0)
            quantized, _ = quantized_model(
                cell, copy.deepcopy(self.model), self.tokenizer, self.cache,
                partial(self.progress.advance, self.base.checkpoint_name),
            )  # fmt: skip
            places: Places = {}
            for name, module in self._quantized(quantized, cell).items():
                places |= in_place(self.model, name, module)
            kept.values["kl"] = self.baseline.kl(places)
            kept.save()
            del quantized, places
            free(self.device)
        return kept.values["kl"]


class Kept:
    """Holds numbers by name, ``values``, of a ``cell`` in a file of the cache; an intact file is
    read, a damaged one begins anew. ``kind``: what they are."""

    def __init__(self, search: Search, kind: str, cell: Cell) -> None:
        parts = {n: cell.key_parts[n] for n in MODEL_PARTS if n in cell.key_parts}
        self.key = content_key({**parts, "kind": kind, **search._key})
        self.path = search.cache / "budget" / f"{self.key[:KEY_DIGITS]}.json"
        self.values: dict[str, Any] = {}
        self._saved = time.monotonic()
        with suppress(ResultsError, OSError, ValueError, KeyError, TypeError):
            content = json.loads(self.path.read_bytes())
            if content["key"] == self.key:
                self.values = content["values"]

    def save(self, *, now: bool = True) -> None:
        """Write the values; unless ``now``, only if the last write is a while ago."""
        if now or time.monotonic() - self._saved > SAVE_EVERY:
            content = json.dumps({"key": self.key, "values": self.values})
            write_atomically(self.path, content.encode())
            self._saved = time.monotonic()


class FromBlocks(Baseline):
    """Holds the unquantized model's predictions on texts ``ids`` [N, T], and the inputs of its
    decoder blocks: of a changed model only the changed block and those after it are computed."""

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.root, self.blocks = decoder_blocks(model)
        self._inputs: list[list[Tensor]] = []  # by batch and block, [B, T, H]
        self._batch: int | None = None
        self._start = 0  # the first block that is computed
        handles = [block.register_forward_pre_hook(self._keep, with_kwargs=True)
                   for block in self.blocks]  # fmt: skip
        try:
            super().__init__(model, ids, batch=max(1, BATCH_TOKENS // ids.shape[1]))
        finally:
            for handle in handles:
                handle.remove()
        self._start = len(self.blocks) - 1
        with torch.inference_mode():
            self.skips = all(  # False: blocks read more than the output of the block before
                torch.equal(row, self._hidden(tokens))
                for row, tokens in zip(self.rows, self._batches(), strict=True)
            )
        self._start = 0

    def kl(self, modules: Mapping[str, nn.Module]) -> float:
        """Return the KL divergence, nats per token, with ``modules``, by name, in the places of the
        model's. Raises EvaluationError if the logits are not numbers."""
        places = [name.removeprefix(f"{self.root}.").partition(".")[0] for name in modules]
        inside = self.skips and all(place.isdigit() for place in places)
        self._start = min(map(int, places)) if inside else 0
        try:
            return float(self.losses(", ".join(list(modules)[:3]), modules)[0].mean())
        finally:
            self._start = 0

    def _keep(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._batch is None:  # a probe of the model, no text
            return
        if self._batch == len(self._inputs):
            self._inputs.append([])
        self._inputs[self._batch].append(args[0] if args else kwargs["hidden_states"])

    def _batches(self) -> Iterator[Tensor]:
        for number, tokens in enumerate(super()._batches()):
            self._batch = number
            yield tokens

    def _hidden(self, tokens: Tensor) -> Tensor:
        skipped = self.blocks[: self._start]
        for block in skipped:  # each returns the input of the first block that is computed
            block.forward = lambda *_, **__: self._inputs[self._batch][self._start]
        try:
            return super()._hidden(tokens)
        finally:
            for block in skipped:
                del block.forward


def bits_of(tensors: Iterator[Tensor] | Sequence[Tensor]) -> float:
    """Return the bits that ``tensors`` take."""
    return sum(8.0 * tensor.nbytes for tensor in tensors)


def _other_last_bits(layer: nn.Linear) -> nn.Linear:
    """Return ``layer`` with its weights moved by about half a unit in their last place, up or down
    at random, then rounded."""
    weight = layer.weight.detach()
    signs = torch.randint(0, 2, weight.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    moved = weight.float() * (1 + torch.finfo(weight.dtype).eps * signs.to(weight.device))
    return linear_layer(moved.to(weight.dtype), layer.bias)
