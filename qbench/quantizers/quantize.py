"""Quantize a model: compute the tensors once, store them on disk, build the model from them.

The model that is scored is built from the stored tensors, also on the first run. So a library whose
model differs before and after saving cannot give two different scores.

    ROOT/<digest of the original, 16 digits>/<config>-<key, 16 digits>.safetensors

The file holds tensors, named as ``make`` says, and as metadata its key, the parts of that, and a
note. A damaged one is detected by the digest beside it, and written again."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from qbench.errors import OutputError, QbenchError, QuantizationError, first_line, some
from qbench.files import (
    QUANTIZING,
    clean_temporaries,
    code_digest,
    content_key,
    verify_tensors,
    write_tensors,
)
from qbench.machine import version_of
from qbench.progress import Advance
from qbench.quantizers.calibration import CORES, Calibration
from qbench.quantizers.config import (
    PackedWeight,
    QuantizationConfig,
    WeightSettings,
    backend,
    require_matches,
)
from qbench.quantizers.linear import (
    DequantizedLinear,
    Tensors,
    in_place,
    layer_of,
    linearize,
    linears,
    matrices,
    named_ends,
)
from qbench.streaming import load_block, offload_device, stream_of

DIGITS = 16


class Artifact:
    """Reads and writes the stored tensors of one checkpoint under one config."""

    def __init__(
        self,
        root: Path,
        *,
        original: str,
        config: QuantizationConfig,
        calibration: Calibration | None,
        attention: str,
        normalizer_source: str | None,
        device: torch.device,
    ) -> None:
        """Derive key and path from what determines the tensors. ``original``: digest of the
        unquantized weights. ``attention``: name of the attention function during calibration.
        ``normalizer_source``: digest of the plug-in that defines its normalizer, if any. The last
        two count only with ``calibration``."""
        libraries = ("torch", "transformers", "triton", *config.requirements)
        self.parts = {  # all that can change the tensors
            "original": original,
            "quantizer": config.to_dict(),
            "calibration": calibration
            and {
                "digest": calibration.digest,
                "attention": attention,
                **({"normalizer source": normalizer_source} if normalizer_source else {}),
            },
            "versions": {name: version_of(name) for name in libraries},
            "code": code_digest(QUANTIZING),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        }
        self.key = content_key(self.parts)
        name = f"{config.name}-{self.key[:DIGITS]}.safetensors"
        self.path = Path(root) / original[:DIGITS] / name

    def read(self, device: torch.device) -> tuple[dict[str, Tensor], str] | None:
        """Return the tensors by name, on ``device``, and their note; None if there is no artifact.
        Raises OSError or ValueError if the file is damaged."""
        if not self.path.exists():
            return None
        about = verify_tensors(self.path)
        if about["key"] != self.key:
            raise ValueError("it was made for another content key")
        with safe_open(self.path, framework="pt") as file:
            # Copied: a mapped file could change, or end, under a running model.
            tensors = {n: file.get_tensor(n).to(device, copy=True) for n in file.keys()}  # noqa: SIM118
        return tensors, about["note"]

    def write(self, tensors: dict[str, Tensor], note: str) -> None:
        """Write the tensors with ``note``, replacing an earlier artifact in one step. Raises
        OutputError if they cannot be written."""
        clean_temporaries(self.path.parent.parent)  # a killed process may have left GiBs
        try:
            write_tensors(self.path, tensors, {"key": self.key, "parts": self.parts, "note": note})
        except OutputError as error:
            raise OutputError(
                f"quantized weights are not kept: {error}, or set QBENCH_CACHE to another folder"
            ) from None


WHOLE_MODEL = "quantize_model"  # function of a backend that goes through a whole model
TRANSFORM = "qbench_transform"  # attribute of a quantized model: tensors of its transform


def quantize(
    model: PreTrainedModel,
    config: QuantizationConfig,
    *,
    calibration: Calibration | None,
    digest: str,
    artifacts: Path,
    normalizer_source: str | None = None,
    progress: Advance = lambda done, total: None,
) -> tuple[PreTrainedModel, str]:
    """Return ``model`` quantized by ``config``, and a line that says how it was made. An
    unquantized config, and one whose model is loaded quantized, return ``model`` as it is.
    ``model``, on its device in ``config.compute_dtype``, must not be used afterwards.
    ``calibration`` is only read if ``config`` needs it. ``digest``: of the original weights.
    ``artifacts``: root folder of quantized weights, read and written. ``normalizer_source``: digest
    of the plug-in that defines the model's normalizer, if any. ``progress(done, total)`` is called
    meanwhile. The model's attention function does not change. Raises QuantizationError if a method
    refuses the model, UnavailableError without its library."""
    if not config.precision.quantized:
        return model, f"unquantized, {config.compute_dtype}"
    if config.weights is not None and config.weights.prequantized:
        return model, config.weights.note
    linearize(model)
    config = config.fitted(shapes_of(model, config.weights))
    if config.weights is not None:
        if not linears(model):
            raise QuantizationError(
                f"{config.name}: {type(model).__name__} has no linear layers; leave weights out"
            )
        require_matches(matrices(model), config.weights.ignore, config.name)
    attention = model.config._attn_implementation
    # Cells that share a stage compute it once. Weights that are not transformed are those of any
    # other cell; what is calibrated beside them comes first, since quantizing consumes the model.
    stages = [config]
    if config.weights is not None and config.transform is None:
        beside = replace(config, weights=None, dtype=config.compute_dtype)
        stages = [*([beside] if beside.needs_calibration else []),
                  QuantizationConfig(weights=config.weights)]  # fmt: skip
    tensors: Tensors = {}
    details = []
    for stage in stages:
        store = Artifact(
            artifacts,
            original=digest,
            config=stage,
            calibration=calibration if stage.needs_calibration else None,
            attention=attention,
            normalizer_source=normalizer_source,
            device=model.device,
        )
        with FileLock(store.path.with_name(f".{store.path.stem}.lock")):
            stored, detail = _obtain(store, model, stage, calibration, progress)
        tensors |= stored
        details.append(detail)
    model = apply(model, config, tensors)
    progress(1, 1)
    return model.eval(), "; ".join(details)


def make(
    model: PreTrainedModel,
    config: QuantizationConfig,
    calibration: Calibration | None,
    progress: Advance,
) -> tuple[Tensors, str]:
    """Return the tensors to store, and a line on how they were made; ``model`` may be overwritten.
    Tensors ``weights:<module>/<part>`` belong to the module that replaces a layer; other kinds' are
    named ``<kind>:…`` by their backend. Raises QuantizationError if a method refuses the model."""
    tensors: Tensors = {}
    if config.transform is not None:  # apply() transforms the model that it is given
        model = copy.deepcopy(model)
    for kind, settings in config.beside_weights.items():
        functions, calibrated = backend(settings), {}
        if hasattr(functions, "calibrate"):
            calibrated = functions.calibrate(model, settings, calibration, progress)
        if kind == "transform":
            functions.transform(model, settings, calibrated)
        tensors |= {f"{kind}:{name}": tensor for name, tensor in calibrated.items()}
    note = f"unquantized, {config.compute_dtype}"
    if config.weights is not None:
        layers, note = _quantize_weights(config.weights, model, calibration, progress)
        for name, parts in layers.items():
            tensors |= {f"weights:{name}/{part}": tensor for part, tensor in parts.items()}
    names = [note, *(settings.name for settings in config.beside_weights.values())]
    return tensors, ", ".join(names)


def apply(model: PreTrainedModel, config: QuantizationConfig, tensors: Tensors) -> PreTrainedModel:
    """Return the quantized model: the unquantized ``model``, which is changed, with the ``tensors``
    that ``make`` returned for ``config``. They are removed from the dictionary to free memory."""
    by_field: dict[str, Tensors] = {}
    for name in list(tensors):
        kind, _, rest = name.partition(":")
        by_field.setdefault(kind, {})[rest] = tensors.pop(name)
    if config.transform is not None:
        backend(config.transform).transform(model, config.transform, by_field.get("transform", {}))
    if config.weights is not None:
        _replace_layers(model, config.weights, by_field.pop("weights", {}))
    for kind, settings in config.beside_weights.items():
        if kind != "transform":
            backend(settings).install(model, settings, by_field.get(kind, {}))
    setattr(model, TRANSFORM, by_field.get("transform", {}))
    return model


def evidence_of(model: nn.Module, config: QuantizationConfig, kind: str) -> dict[str, Any]:
    """Return, by module's name, what the backend reports of the part ``kind`` in ``model``, for the
    audit: for weights functions that unpack them; {} if ``config`` does not quantize that part."""
    settings = getattr(config, kind)
    if settings is None:
        return {}
    functions, streamed = backend(settings), stream_of(model)
    if hasattr(functions, "evidence"):  # not of weights, but for files that somebody else wrote
        return functions.evidence(model, settings)
    return {
        name: partial(unpack, model, name, of_layer)
        for name in (streamed.replaced if streamed else dict(model.named_modules()))
        if (of_layer := settings.for_layer(name)) is not None
        and (streamed or unpack(model, name, of_layer))
    }


def unpack(model: nn.Module, name: str, settings: WeightSettings) -> PackedWeight | None:
    """Return the stored tensors of the layer ``name``; None if ``settings`` did not make it."""
    load_block(model, name)
    layer, functions = layer_of(model, name), backend(settings)
    kind = getattr(functions, "from_packed", DequantizedLinear)
    if not isinstance(kind, type):
        return functions.unpack(layer, settings)
    return layer.unpack(settings) if isinstance(layer, kind) else None


def shapes_of(model: nn.Module, chosen: WeightSettings | None = None) -> dict[str, tuple[int, int]]:
    """Return the shape [out, in] of each linear layer of ``model`` by name; LM head and embeddings
    only if the settings ``chosen`` name them."""
    layers = linears(model) | named_ends(model, chosen)
    return {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}


def _quantize_weights(
    settings: WeightSettings,
    model: PreTrainedModel,
    calibration: Calibration | None,
    progress: Advance,
) -> tuple[dict[str, Tensors], str]:
    """Return the tensors of all quantized layers by ``<layer>/<part>``, and a note on the methods.
    Layers are quantized in parallel on a CPU."""
    settings.check_layers(shapes_of(model, settings))
    layers, result, notes = _to_quantize(model, settings), {}, []
    by_backend: dict[Any, dict[str, WeightSettings]] = {}
    for name in layers:
        chosen = settings.for_layer(name)
        by_backend.setdefault(backend(chosen), {})[name] = chosen

    @torch.no_grad()  # which each thread needs anew
    def quantize_layer(name: str) -> dict[str, Tensors]:
        load_block(model, name)
        chosen = settings.for_layer(name)
        made = backend(chosen).quantize(name, layers[name], chosen)
        return {name: {part: tensor.to(offload_device(model)) for part, tensor in made.items()}}

    # Those of a whole model last: they overwrite weights.
    for functions, chosen in sorted(by_backend.items(), key=lambda x: hasattr(x[0], WHOLE_MODEL)):
        if hasattr(functions, WHOLE_MODEL):
            made, note = functions.quantize_model(model, chosen, calibration, progress)
            result |= made
            notes.append(note)
            continue
        one_thread = torch.set_num_threads, (1,)
        with ThreadPoolExecutor(CORES, "layer", *one_thread) as pool:
            at_once = model.device.type == "cpu" and stream_of(model) is None
            several = pool.map if at_once else map
            for done, made in enumerate(several(quantize_layer, chosen)):
                progress(done, len(chosen))
                result |= made
        notes += [of_layer.note or of_layer.method for of_layer in chosen.values()]
    return result, " and ".join(dict.fromkeys(notes))


def _to_quantize(model: nn.Module, settings: WeightSettings) -> dict[str, nn.Linear]:
    """Return the layers to quantize by name: linear layers, and LM head and embeddings if the
    settings name them. Raises QuantizationError for these in a streamed model."""
    at_ends = named_ends(model, settings)
    if at_ends and stream_of(model) is not None:
        raise QuantizationError(
            f"{settings.name}: {', '.join(at_ends)}: cannot be quantized block by block; set "
            "evaluation.stream: false"
        )
    return linears(model, settings.ignore) | at_ends


def _replace_layers(model: PreTrainedModel, settings: WeightSettings, tensors: Tensors) -> None:
    """Replace the layers of ``model`` by quantized ones, built from ``tensors`` (emptied); in a
    streamed model whenever their block runs. Raises QuantizationError if the names differ."""
    modules: dict[str, Tensors] = {}
    for name in list(tensors):
        module, _, part = name.rpartition("/")
        modules.setdefault(module, {})[part] = tensors.pop(name)
    layers = _to_quantize(model, settings)
    if different := sorted(modules.keys() ^ layers.keys()):  # of a plug-in's quantizer
        raise QuantizationError(
            f"{settings.name}: its plug-in gave tensors for other layers than the model's; correct "
            f"the plug-in: {some(different)}"
        )
    streamed = stream_of(model)
    for name, layer in layers.items():
        chosen = settings.for_layer(name)

        def build(layer: nn.Linear, tensors: Tensors, chosen: Any = chosen) -> nn.Module:
            made_by = getattr(backend(chosen), "from_packed", DequantizedLinear)
            return made_by(layer, tensors, chosen).eval()

        if streamed is None:
            moved = {part: t.to(layer.weight.device) for part, t in modules.pop(name).items()}
            modules_in_place = in_place(model, name, build(layer, moved))
            if len(modules_in_place) > 1:  # tie_weights() would look for the embeddings' parameter
                model.config.get_text_config().tie_word_embeddings = False
            for place, module in modules_in_place.items():
                model.set_submodule(place, module)
        else:
            streamed.replace(name, modules.pop(name), build)


def _obtain(
    store: Artifact,
    model: PreTrainedModel,
    config: QuantizationConfig,
    calibration: Calibration | None,
    progress: Advance,
) -> tuple[dict[str, Tensor], str]:
    """Return the tensors by name, read from disk or computed and written, and a line on which."""
    again = ""
    try:
        stored = store.read(offload_device(model))
        if stored is not None:
            return stored[0], f"artifact reused: {stored[1]}"
    except (OSError, ValueError) as damage:
        again = f"artifact was damaged ({damage}) and made again: "
    threads = torch.get_num_threads()
    if model.device.type == "cpu":
        # The order of a sum, and with it the last bits that decide a rounding, depends on threads
        torch.set_num_threads(1)
    try:
        with torch.no_grad():
            made, note = make(model, config, calibration, progress)
    except QbenchError:
        raise
    except Exception as error:
        raise QuantizationError(
            f"{config.name}: {type(error).__name__}: {first_line(error)}"
        ) from error
    finally:
        torch.set_num_threads(threads)
    # The bits that are written: modules are made of these, not of what made them.
    tensors = {name: t.detach().to(offload_device(model)).contiguous() for name, t in made.items()}
    store.write(tensors, note)
    return tensors, f"{again}{note}"
