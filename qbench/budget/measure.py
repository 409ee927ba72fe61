"""Measure the KL divergence, on calibration text, of a model with one layer quantized at a time,
and of whole quantized models."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qbench.analysis.analyze_run import MODEL_PARTS
from qbench.analysis.sensitivity import Baseline
from qbench.budget.choose import UNQUANTIZED, Costs
from qbench.cell import as_measured, calibration_of, load, load_original, quantized_model
from qbench.errors import ResultsError, UnavailableError
from qbench.files import content_key, digest_of, write_atomically
from qbench.machine import free
from qbench.plan import Cell, Plan
from qbench.progress import Progress
from qbench.quantizers import gptq
from qbench.quantizers.calibration import SequentialCalibrator
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
from qbench.quantizers.methods.weight_only import Gptq
from qbench.quantizers.quantize import WHOLE_MODEL, backend
from qbench.quantizers.texts import CalibrationText
from qbench.records import KEY_DIGITS
from qbench.streaming import decoder_blocks, is_sharded, stream_of

SAVE_EVERY = 20.0  # seconds between two writes of unfinished costs
BATCH_TOKENS = 8192  # read at once

Hessians = list[tuple[list[str], Tensor | None]]  # of the layers with the same inputs


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """Says what costs are measured of. ``base``: the unquantized cell of ``plan``. ``source``: the
    calibration text, whose last ``windows`` costs are measured on, their first ``length`` tokens;
    the others calibrate. ``include``: ``lm_head`` and ``embeddings``, which have choices too if
    named (both if they share one matrix). Finished numbers are kept in the folder ``cache``."""

    plan: Plan
    base: Cell
    source: CalibrationText
    windows: int
    length: int
    include: Sequence[str]
    cache: Path
    progress: Progress

    def log(self, stage: str, total: float | None = None) -> None:
        self.progress.stage(self.base.checkpoint_name, stage, total)

    def load(self) -> tuple[PreTrainedModel, Any, FromBlocks]:
        """Return the unquantized model, its experts taken apart, its tokenizer, and its predictions
        on the text. Raises UnavailableError if it does not fit its device."""
        base, plan = self.base, self.plan
        model, tokenizer = load(base, plan)
        as_measured(base, plan, model, [])
        if stream_of(model) is not None or is_sharded(model):
            raise UnavailableError(
                f"{base.checkpoint_name}: a budget needs the model whole on one device; set "
                "evaluation.stream: false on a larger GPU"
            )
        linearize(model)
        text = calibration_of(replace(base, calibration=self.source), tokenizer)
        return model, tokenizer, FromBlocks(model, text.ids[-self.windows :, : self.length])


class Kept:
    """Holds numbers by name, ``values``, of a ``cell`` in a file of the cache; an intact file is
    read, a damaged one begins anew. ``kind``: what they are."""

    def __init__(self, search: Search, kind: str, cell: Cell) -> None:
        text = {name: getattr(search.source, name)
                for name in ("digest", "samples", "length", "seed", "bos")}  # fmt: skip
        text |= {"windows": search.windows, "cut": search.length}
        code = digest_of([Path(__file__).parent, Path(__file__).parents[1] / "analysis"])
        parts = {n: cell.key_parts[n] for n in MODEL_PARTS if n in cell.key_parts}
        self.key = content_key({**parts, "kind": kind, "text": text, "search": code})
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
        start = self._start
        if not start:
            return super()._hidden(tokens)
        kept = self._inputs[self._batch][start]

        def enter(block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            return ((kept, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": kept})

        handle = self.blocks[start].register_forward_pre_hook(enter, with_kwargs=True)
        skipped = self.blocks[:start]
        for block in skipped:  # each returns its input, which block ``start`` does not read
            block.forward = lambda *args, **kwargs: args[0] if args else kwargs["hidden_states"]
        try:
            return super()._hidden(tokens)
        finally:
            handle.remove()
            for block in skipped:
                del block.forward


def measure_costs(search: Search, cells: Mapping[str, Cell]) -> Costs:
    """Return what each choice of ``cells`` (by its text, cells of one checkpoint) costs each linear
    layer alone. A search that was stopped goes on.

    Any change of a layer moves the rounding of all that follows, which in bfloat16 costs about
    0.001 nats however small the change is. That floor, measured with weights that differ in their
    last bit, is taken off each cost.

    Raises UnavailableError for a model that does not fit its device or a method that needs the
    whole model, QuantizationError for a layer that cannot be quantized.
    """
    cells = {**cells, UNQUANTIZED: search.base}
    kept = {choice: Kept(search, "costs", cell) for choice, cell in cells.items()}
    needed = {"", *search.include}
    if not all(needed <= set(each.values.get("finished", ())) for each in kept.values()):
        _measure(search, cells, kept, needed)
        free(search.plan.device)
    values = kept[UNQUANTIZED].values
    plain = values["layers"]
    at_ends = _included(search, values["ends"])
    layers = [name for name in values["shapes"] if name in at_ends or name not in values["ends"]]
    options = {
        name: {
            choice: (bits, max(0.0, kl - plain[name][1]))
            for choice, each in kept.items()
            if name in each.values["layers"]
            for bits, kl in [each.values["layers"][name]]
        }
        for name in layers
    }
    return Costs(
        shapes={name: values["shapes"][name] for name in layers},
        options=options,
        ends=at_ends,
        floor={name: plain[name][1] for name in layers},
        others=tuple(values["others"]),
        outside=values["total"] - values["others"][1] - sum(plain[name][0] for name in layers),
    )


def _included(search: Search, words: Mapping[str, str]) -> list[str]:
    """Return which of the ends, ``words`` by name, have choices: those that ``include`` names; a
    matrix that LM head and embeddings share has two words."""
    return [name for name, word in words.items() if set(word.split()) & set(search.include)]


@torch.no_grad()
def _measure(
    search: Search, cells: Mapping[str, Cell], kept: Mapping[str, Kept], needed: set[str]
) -> None:
    """Measure the costs that ``kept`` lacks; then ``needed``, the ends and "", are finished."""
    search.log("load")
    model, tokenizer, baseline = search.load()
    at_ends, inside = ends(model), linears(model)
    sizes = _sizes(model, inside, at_ends)
    for each in kept.values():
        each.values = {"layers": {}, "finished": [], **each.values, **sizes}
    included = _included(search, sizes["ends"])
    layers = inside | {name: at_ends[name] for name in included}
    walk, choices = None, {}
    for choice, cell in cells.items():
        weights = cell.quantization.weights
        takes = weights is None or weights.of_ends
        choices[choice] = [n for n in layers if takes or n not in included]
        if walk is None and isinstance(weights, Gptq):
            calibration = calibration_of(cell, tokenizer)
            walk = SequentialCalibrator(model, inside, calibration, weights.batch_size)

    @lru_cache(maxsize=1)
    def hessians(index: int) -> Hessians:
        groups = walk.groups[index]
        matrices = walk.hessians(index, [group[0] for group in groups])
        return [([f"{walk.root}.{index}.{n}" for n in group], hessian)
                for group, hessian in zip(groups, matrices, strict=True)]  # fmt: skip

    total = sum(map(len, choices.values()))
    search.log(f"costs of {len(layers)} layers × {len(cells)} choices", total)
    blocks = [f"{baseline.root}.{index}." for index in range(len(baseline.blocks))]
    for index, prefix in enumerate([*blocks, ""]):  # what lies in no block last
        for choice, cell in cells.items():
            costs = kept[choice].values["layers"]
            missing = [n for n in choices[choice] if n not in costs and n.startswith(prefix)]
            weights = cell.quantization.weights
            for name, layer, bits in _quantized(weights, layers, missing, partial(hessians, index)):
                costs[name] = bits, baseline.kl(in_place(model, name, layer))
                done = sum(len(each.values["layers"]) for each in kept.values())
                search.progress.advance(search.base.checkpoint_name, done, total)
            kept[choice].save(now=False)
        if walk is not None and prefix:
            walk.advance(index)
    for each in kept.values():
        each.values["finished"] = sorted({*each.values["finished"], *needed})
        each.save()


def _sizes(
    model: PreTrainedModel, inside: Mapping[str, nn.Linear], at_ends: Mapping[str, nn.Linear]
) -> dict[str, Any]:
    """Return the numbers of ``Costs`` that no choice changes."""
    rest = matrices(model)
    for name in inside:
        rest.pop(name)
    head = model.get_output_embeddings()
    words = {name: "lm_head" if layer is head else "embeddings" for name, layer in at_ends.items()}
    if list(words.values()) == ["lm_head"]:  # it is the embeddings too
        words = dict.fromkeys(words, "lm_head embeddings")
    return {
        "shapes": {n: list(layer.weight.shape) for n, layer in {**inside, **at_ends}.items()},
        "ends": words,
        "others": [sum(matrix.weight.numel() for matrix in rest.values()),
                   sum(8.0 * matrix.weight.nbytes for matrix in rest.values())],
        "total": sum(8.0 * parameter.nbytes for parameter in model.parameters()),
    }  # fmt: skip


def _quantized(
    settings: Any, layers: Mapping[str, nn.Linear], names: Sequence[str],
    hessians: Callable[[], Hessians],
) -> Iterator[tuple[str, nn.Module, float]]:  # fmt: skip
    """Yield each of ``names``, layers of one block, with the module that quantizes it, and the bits
    that are stored of its matrix. Without ``settings`` the module differs in last bits. GPTQ has
    the Hessians of the unquantized model's inputs."""
    if settings is None:
        for name in names:
            yield name, _other_last_bits(layers[name]), 8.0 * layers[name].weight.nbytes
        return
    functions = backend(settings)
    if isinstance(settings, Gptq):
        groups = [(group, h) for group, h in (hessians() if names else ()) if {*group} & {*names}]
    else:
        groups = [([name], None) for name in names]
    for group, hessian in groups:
        chosen = [name for name in group if name in names]
        if isinstance(settings, Gptq):
            made = gptq.quantize_group([layers[n] for n in chosen], hessian, settings, chosen)
        elif hasattr(functions, WHOLE_MODEL):
            raise UnavailableError(f"{settings.name}: no layer can be quantized alone")
        else:
            made = [functions.quantize(name, layers[name], settings) for name in chosen]
        for name, tensors in zip(chosen, made, strict=True):
            module = functions.from_packed(layers[name], tensors, settings)
            stored = functions.unpack(module, settings).tensors
            yield name, module, 8.0 * sum(tensor.nbytes for tensor in stored.values())


def _other_last_bits(layer: nn.Linear) -> nn.Linear:
    """Return ``layer`` with its weights moved by about half a unit in their last place, up or down
    at random, then rounded."""
    weight = layer.weight.detach()
    signs = torch.randint(0, 2, weight.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    moved = weight.float() * (1 + torch.finfo(weight.dtype).eps * signs.to(weight.device))
    return linear_layer(moved.to(weight.dtype), layer.bias)


def measure_whole(search: Search, cells: Sequence[Cell]) -> dict[str, float]:
    """Return the KL divergence, nats per token on the text, of each of ``cells``, whole quantized
    models, by label. Their quantized weights stay in the cache, where a run finds them."""
    kept = {cell.label: Kept(search, "whole", cell) for cell in cells}
    missing = [cell for cell in cells if "kl" not in kept[cell.label].values]
    if missing:
        model, tokenizer, baseline = search.load()
        for number, cell in enumerate(missing, start=1):
            search.log(f"{cell.label}, {number} of {len(missing)}")
            quantized, _ = quantized_model(
                cell, load_original(cell, search.plan, verify=False), tokenizer, search.cache,
                partial(search.progress.advance, search.base.checkpoint_name),
            )  # fmt: skip
            weights, modules = cell.quantization.weights, {}
            for name in linears(model, weights.ignore) | named_ends(model, weights):
                modules |= in_place(model, name, layer_of(quantized, name))
            kept[cell.label].values["kl"] = baseline.kl(modules)
            kept[cell.label].save()
            del quantized, modules
            free(search.plan.device)
    return {label: each.values["kl"] for label, each in kept.items()}
