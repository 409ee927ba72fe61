"""Measure the KL divergence, on calibration text, of a model with one layer quantized at a time,
and of whole quantized models."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qbench.analysis.analyze_run import MODEL_PARTS
from qbench.analysis.sensitivity import Baseline
from qbench.budget.choose import UNQUANTIZED, Costs, SearchText
from qbench.cell import as_measured, calibration_of, load, load_original, quantized_model
from qbench.errors import ResultsError, UnavailableError
from qbench.files import content_key, digest_of, read_regular, write_atomically
from qbench.machine import free
from qbench.plan import Cell, Plan
from qbench.progress import Progress
from qbench.quantizers import gptq
from qbench.quantizers.calibration import SequentialCalibrator
from qbench.quantizers.linear import Tensors, linearize, linears, matrices
from qbench.quantizers.methods.weight_only import Gptq
from qbench.quantizers.quantize import WHOLE_MODEL, backend
from qbench.records import KEY_DIGITS
from qbench.streaming import decoder_blocks, is_sharded, stream_of

SAVE_EVERY = 20.0  # seconds between two writes of unfinished costs
BATCH_TOKENS = 8192  # read at once

Hessians = list[tuple[list[str], Tensor | None]]  # of the layers with the same inputs


class Kept:
    """Holds numbers by name, ``values``, in a file of the cache under the key of a ``cell`` and a
    search ``text``; an intact file is read, a damaged one begins anew. ``kind``: what they are."""

    def __init__(self, cache: Path, kind: str, cell: Cell, text: SearchText) -> None:
        code = digest_of([Path(__file__).parent, Path(__file__).parents[1] / "analysis"])
        parts = {n: cell.key_parts[n] for n in MODEL_PARTS if n in cell.key_parts}
        self.key = content_key({**parts, "kind": kind, "text": text.key_parts(), "search": code})
        self.path = cache / "budget" / f"{self.key[:KEY_DIGITS]}.json"
        self.values: dict[str, Any] = {}
        self._saved = time.monotonic()
        with suppress(ResultsError, OSError, ValueError, KeyError, TypeError):
            content = json.loads(read_regular(self.path))
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


def measure_costs(
    plan: Plan, base: Cell, cells: Mapping[str, Cell], text: SearchText, cache: Path,
    progress: Progress,
) -> Costs:  # fmt: skip
    """Return what each choice of ``cells`` (by its text, cells of one checkpoint) costs each linear
    layer alone. ``base``: the unquantized cell. Finished costs are kept in ``cache``, so that a
    search that was stopped goes on.

    Any change of a layer moves the rounding of all that follows, which in bfloat16 costs about
    0.001 nats however small the change is. That floor, measured with weights that differ in their
    last bit, is taken off each cost.

    Raises UnavailableError for a model that does not fit its device or a method that needs the
    whole model, QuantizationError for a layer that cannot be quantized.
    """
    cells = {**cells, UNQUANTIZED: base}
    kept = {choice: Kept(cache, "costs", cell, text) for choice, cell in cells.items()}
    if not all(each.values.get("finished") for each in kept.values()):
        _search(plan, base, cells, kept, text, progress)
        free(plan.device)
    values = kept[UNQUANTIZED].values
    floor = {name: kl for name, (_, kl) in values["layers"].items()}
    measured = {choice: each.values["layers"] for choice, each in kept.items()}
    return Costs(
        parameters=values["parameters"],
        bits={choice: {n: bits for n, (bits, _) in of.items()} for choice, of in measured.items()},
        kl={choice: {n: max(0.0, kl - floor[n]) for n, (_, kl) in of.items()}
            for choice, of in measured.items()},
        floor=floor,
        others=tuple(values["others"]),
        outside=values["outside"],
    )  # fmt: skip


@torch.no_grad()
def _search(
    plan: Plan, base: Cell, cells: Mapping[str, Cell], kept: Mapping[str, Kept], text: SearchText,
    progress: Progress,
) -> None:  # fmt: skip
    """Measure the costs that ``kept`` lacks."""
    name = base.checkpoint_name
    progress.stage(name, "load")
    model, tokenizer = _load(base, plan)
    layers, sizes = linears(model), _sizes(model)
    baseline = FromBlocks(model, _read(text, base, tokenizer))
    for each in kept.values():
        each.values = {"layers": {}, **each.values, **sizes}
    total = len(layers) * len(cells)
    progress.stage(name, f"costs of {len(layers)} layers × {len(cells)} choices", total)
    walk = None
    for cell in cells.values():
        if walk is None and isinstance(weights := cell.quantization.weights, Gptq):
            calibration = calibration_of(cell, tokenizer)
            walk = SequentialCalibrator(model, layers, calibration, weights.batch_size)

    @lru_cache(maxsize=1)
    def hessians(index: int) -> Hessians:
        groups = walk.groups[index]
        matrices = walk.hessians(index, [group[0] for group in groups])
        return [([f"{walk.root}.{index}.{n}" for n in group], hessian)
                for group, hessian in zip(groups, matrices, strict=True)]  # fmt: skip

    prefixes = [f"{baseline.root}.{index}." for index in range(len(baseline.blocks))]
    inside = [[n for n in layers if n.startswith(prefix)] for prefix in prefixes]
    outside = [n for n in layers if not n.startswith(tuple(prefixes))]
    for index, names in enumerate([*inside, outside]):
        for choice, cell in cells.items():
            costs = kept[choice].values["layers"]
            missing = [n for n in names if n not in costs]
            if missing:
                for layer, module, bits in _modules(
                    cell, layers, missing, partial(hessians, index)
                ):
                    costs[layer] = [bits, baseline.kl({layer: module})]
                    progress.advance(
                        name, sum(len(k.values["layers"]) for k in kept.values()), total
                    )
                kept[choice].save(now=False)
        if walk is not None and index < len(prefixes):
            walk.advance(index)
    for each in kept.values():
        each.values["finished"] = True
        each.save()


def _load(base: Cell, plan: Plan) -> tuple[PreTrainedModel, Any]:
    """Return the unquantized model, its experts taken apart, and the tokenizer."""
    model, tokenizer = load(base, plan)
    as_measured(base, plan, model, [])
    if stream_of(model) is not None or is_sharded(model):
        raise UnavailableError(
            f"{base.checkpoint_name}: a budget needs the model whole on one device; set "
            "evaluation.stream: false on a larger GPU"
        )
    linearize(model)
    return model, tokenizer


def _read(text: SearchText, cell: Cell, tokenizer: Any) -> Tensor:
    """Return the token ids of ``text``, int64 [windows, length]."""
    everything = calibration_of(replace(cell, calibration=text.source), tokenizer)
    return everything.ids[-text.windows :, : text.length]


def _sizes(model: PreTrainedModel) -> dict[str, Any]:
    """Return the numbers of ``Costs`` that no choice changes."""
    layers, rest = linears(model), matrices(model)
    inside = sum(8.0 * rest.pop(name).weight.nbytes for name in layers)
    unquantized = sum(8.0 * parameter.nbytes for parameter in model.parameters())
    others = sum(8.0 * matrix.weight.nbytes for matrix in rest.values())
    return {
        "parameters": {name: layer.weight.numel() for name, layer in layers.items()},
        "others": [sum(matrix.weight.numel() for matrix in rest.values()), others],
        "outside": unquantized - inside - others,
    }


def _modules(
    cell: Cell, layers: Mapping[str, nn.Linear], names: Sequence[str],
    hessians: Callable[[], Hessians],
) -> Iterator[tuple[str, nn.Module, float]]:  # fmt: skip
    """Yield each of ``names``, layers of one block, with the module that quantizes it, or differs
    in last bits if the cell is unquantized, and the bits that are stored of its matrix."""
    settings = cell.quantization.weights
    if settings is None:
        for name in names:
            yield name, _other_last_bits(layers[name]), 8.0 * layers[name].weight.nbytes
        return
    functions = backend(settings)
    for name, tensors in _tensors(settings, layers, names, hessians):
        module = functions.from_packed(layers[name], tensors, settings)
        stored = functions.unpack(module, settings).tensors
        yield name, module, 8.0 * sum(tensor.nbytes for tensor in stored.values())


def _other_last_bits(layer: nn.Linear) -> nn.Linear:
    """Return ``layer`` with its weights moved by about half a unit in their last place, up or down
    at random, then rounded."""
    weight = layer.weight.detach()
    signs = torch.randint(0, 2, weight.shape, generator=torch.Generator().manual_seed(0)) - 0.5
    moved = weight.float() * (1 + torch.finfo(weight.dtype).eps * signs.to(weight.device))
    changed = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    changed.weight = nn.Parameter(moved.to(weight.dtype), requires_grad=False)
    changed.bias = layer.bias
    return changed


def _tensors(
    settings: Any, layers: Mapping[str, nn.Linear], names: Sequence[str],
    hessians: Callable[[], Hessians],
) -> Iterator[tuple[str, Tensors]]:  # fmt: skip
    """Yield the tensors that are stored of each of ``names``; of GPTQ under the Hessians of the
    unquantized model's inputs."""
    if not isinstance(settings, Gptq):
        functions = backend(settings)
        if hasattr(functions, WHOLE_MODEL):
            raise UnavailableError(f"{settings.name}: no layer can be quantized alone")
        for name in names:
            yield name, functions.quantize(name, layers[name], settings)
        return
    for group, hessian in hessians():
        if chosen := [name for name in group if name in names]:
            made = gptq.quantize_group([layers[n] for n in chosen], hessian, settings, chosen)
            yield from zip(chosen, made, strict=True)


def measure_whole(
    plan: Plan, base: Cell, cells: Sequence[Cell], text: SearchText, cache: Path, progress: Progress
) -> dict[str, float]:
    """Return the KL divergence, nats per token on ``text``, of each of ``cells``, whole quantized
    models, by label. Their quantized weights stay in ``cache``, where a run finds them."""
    kept = {cell.label: Kept(cache, "whole", cell, text) for cell in cells}
    missing = [cell for cell in cells if "kl" not in kept[cell.label].values]
    if missing:
        name = base.checkpoint_name
        model, tokenizer = _load(base, plan)
        baseline = FromBlocks(model, _read(text, base, tokenizer))
        for number, cell in enumerate(missing, start=1):
            progress.stage(name, f"{cell.label}, {number} of {len(missing)}")
            quantized, _ = quantized_model(
                cell, load_original(cell, plan, verify=False), tokenizer, cache,
                partial(progress.advance, name),
            )  # fmt: skip
            layers = linears(model, cell.quantization.weights.ignore)
            kept[cell.label].values["kl"] = baseline.kl(
                {layer: quantized.get_submodule(layer) for layer in layers}
            )
            kept[cell.label].save()
            del quantized
            free(plan.device)
    return {label: each.values["kl"] for label, each in kept.items()}
