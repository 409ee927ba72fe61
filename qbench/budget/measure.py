"""Measure the KL divergence, on calibration text, of a model with one layer quantized at a time,
and of whole quantized models."""

from __future__ import annotations

import copy
import itertools
import json
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from qbench.analysis.analyze_run import MODEL_PARTS
from qbench.analysis.sensitivity import Baseline
from qbench.budget.choose import UNQUANTIZED, Costs
from qbench.cell import as_measured, calibration_of, load, quantized_model
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import UnavailableError
from qbench.files import content_key, digest_of, replacing
from qbench.machine import free
from qbench.plan import Cell, Plan
from qbench.progress import Advance, Progress
from qbench.quantizers import linear
from qbench.quantizers.quantize import apply, make, unpack
from qbench.quantizers.texts import CalibrationText
from qbench.records import KEY_DIGITS
from qbench.streaming import is_sharded, stream_of

Layers = Mapping[str, tuple[nn.Module, float]]  # by name: a quantized layer, the bits stored of it
BATCH_TOKENS = 8192  # read at once


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
        batch = max(1, BATCH_TOKENS // length)
        self.baseline = Baseline(model, text.ids[-windows:, :length], batch=batch)
        code = digest_of([Path(__file__).parent, Path(__file__).parents[1] / "analysis"])
        self.key = {"text": astuple(source)[1:], "cut": [windows, length],
                    "include": sorted(include), "search": code}  # fmt: skip
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
            ends=list(at_ends),
            others=(sum(weight.numel() for weight in others), bits_of(others)),
            outside=bits_of(model.parameters()) - bits_of([*weights, *others]),
        )

    def costs(self, cells: Mapping[str, Cell]) -> tuple[Costs, dict[str, float]]:
        """Return the ``Costs`` of each layer quantized alone by each choice of ``cells`` (by its
        text), and choice → KL divergence with all layers quantized, LM head and embeddings left
        out. A search that was stopped is resumed. Any change of a layer moves the rounding of all
        that follows, which in bfloat16 costs about 0.001 nats however small the change is. That
        floor, measured with weights that differ in their last bit, is taken off each cost."""
        cells = {UNQUANTIZED: self.base, **cells}
        of = len(cells)
        self._stage(f"costs of {len(self.layers)} layers × {of} choices", of)
        measured = {
            choice: self._costs_of(cell, lambda share, done=done: self._advance(done + share, of))
            for done, (choice, cell) in enumerate(cells.items())
        }
        floor = {name: kl for name, (_, kl) in measured[UNQUANTIZED]["layers"].items()}
        table = pd.DataFrame(
            [(name, choice, bits, bits / layer.weight.numel(), max(0.0, kl - floor[name]))
             for name, layer in self.layers.items() for choice, values in measured.items()
             if name in values["layers"] for bits, kl in [values["layers"][name]]],
            columns=["layer", "choice", "bits", "width", "kl"],
        ).set_index(["layer", "choice"])  # fmt: skip
        kl = {choice: values["kl"] for choice, values in measured.items()}
        return replace(self.sizes, table=table, floor=floor), kl

    def _costs_of(self, cell: Cell, advance: Callable[[float], None]) -> dict[str, Any]:
        """Return the ``layers`` of the uniform column ``cell``, each with its bits and its KL
        alone, and the ``kl`` of all. ``advance`` is called with the share that is done."""
        path, kept = self._kept("costs", cell)
        self.reused |= bool(kept)
        if "kl" in kept:
            return kept
        made = self._quantized(cell, lambda done, total: advance(done / total / 2), alone=True)
        layers = kept.setdefault("layers", {})
        missing = [name for name in made if name not in layers]
        for _, block in itertools.groupby(missing, self.baseline.block_of):
            names = [*block]
            measured = self._kl(cell, *({name: made[name]} for name in names))
            layers |= {n: (made[n][1], kl) for n, kl in zip(names, measured, strict=True)}
            _keep(path, kept)
            advance((1 + len(layers) / len(made)) / 2)
        weights = cell.quantization.weights
        if weights is not None and weights.needs_calibration:
            made = self._quantized(cell, lambda done, total: None)
        inside = {name: each for name, each in made.items() if name not in self.sizes.ends}
        [kept["kl"]] = self._kl(cell, inside)
        _keep(path, kept)
        return kept

    def whole(self, cell: Cell) -> float:
        """Return the KL divergence, nats per token on the text, of a whole quantized model."""
        path, kept = self._kept("whole", cell)
        if "kl" not in kept:
            self._stage(cell.label)
            [kept["kl"]] = self._kl(cell, self._quantized(cell, self._advance))
            _keep(path, kept)
        return kept["kl"]

    def _quantized(self, cell: Cell, advance: Advance, *, alone: bool = False) -> Layers:
        """Return the layers of the quantized ``cell``, whose weights stay in the cache, where a run
        finds them; of an unquantized one, layers with other last bits. ``alone``: all layers are
        calibrated on the unquantized model's inputs; nothing is kept."""
        weights = cell.quantization.weights
        if weights is None:
            return {name: (_other_last_bits(layer), bits_of([layer.weight]))
                    for name, layer in self.layers.items()}  # fmt: skip
        free(self._plan.device)
        model = copy.deepcopy(self.model)
        if alone:
            for name, layer in linear.linears(model).items():
                layer.forward = self.layers[name].forward  # whatever becomes of its weights
            calibration = calibration_of(cell, self.tokenizer)
            with torch.no_grad():
                tensors, _ = make(model, cell.quantization, calibration, advance)
            model = apply(model, cell.quantization, tensors)
        else:
            model, _ = quantized_model(cell, model, self.tokenizer, self.cache, advance)
        names = linear.linears(self.model, weights.ignore) | linear.named_ends(self.model, weights)
        return {
            n: (linear.layer_of(model, n), bits_of(unpack(model, n, of_layer).tensors.values()))
            for n, of_layer in ((name, weights.for_layer(name)) for name in names)
        }

    def _kl(self, cell: Cell, *variants: Layers) -> list[float]:
        """Return the KL divergence, nats per token, with each of ``variants``, layers of the
        quantized ``cell``, in the model."""
        places = (
            ChainMap(*(linear.in_place(self.model, n, layer) for n, (layer, _) in each.items()))
            for each in variants
        )
        return self.baseline.losses(*places, choice=cell.label)[:, 0].mean(1).tolist()

    def _kept(self, kind: str, cell: Cell) -> tuple[Path, dict[str, Any]]:
        """Return the file of the cache for the numbers ``kind`` of ``cell``, and those in it."""
        parts = {n: cell.key_parts[n] for n in MODEL_PARTS if n in cell.key_parts}
        key = content_key({**parts, "kind": kind, **self.key})
        path = self.cache / "budget" / f"{key[:KEY_DIGITS]}.json"
        with suppress(OSError, ValueError, TypeError):
            return path, dict(json.loads(path.read_bytes()))
        return path, {}


def _keep(path: Path, numbers: dict[str, Any]) -> None:
    """Write ``numbers`` into the file ``path`` of the cache."""
    with replacing(path, sync=False) as making:
        making.write_text(json.dumps(numbers))


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
