"""Load the model of a finished cell again, on the machine that measured it, and write it as a
folder that other libraries load."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from qbench import __version__
from qbench.attention.transformers import set_attention
from qbench.cell import calibration_of, load_copy, quantized_model
from qbench.checkpoints import find
from qbench.checkpoints.load import OURS_ON_GPU, difference, load_model, rounding_tolerance
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.comparison.compare import compare
from qbench.errors import ResultsError, UnavailableError
from qbench.export import card
from qbench.files import new_folder, write_atomically
from qbench.made_copy import MadeCopy, with_copy, with_made_copy
from qbench.plan import Cell
from qbench.quantizers.audit.compare import probe_of
from qbench.quantizers.audit.weights import digest
from qbench.quantizers.config import ActivationEvidence, QuantizationConfig
from qbench.quantizers.formats import WHOLE_ROW, QuantFormat
from qbench.quantizers.linear import Experts, QuantizedEmbedding, bias_of
from qbench.quantizers.methods.library_made import LibraryMade
from qbench.quantizers.packed import unpack_codes
from qbench.quantizers.published import parents
from qbench.quantizers.quantize import evidence_of
from qbench.quantizers.registry import config_of_record
from qbench.quantizers.texts import CalibrationText
from qbench.records import Record
from qbench.store import Store, find_sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class MeasuredCell:
    """A finished cell with its model; ``how`` its quantized weights were obtained, in words."""

    record: Record
    cell: Cell
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    how: str


def load_measured(store: Store, record: Record, cache: Path, device: str) -> MeasuredCell:
    """Return the finished cell of ``record`` with its model on ``device``.

    Quantized weights come from the cache or are computed again; their layers must equal the audited
    ones. Raises ResultsError if this machine did not run the cell, if checkpoint or weights have
    changed, or if the cell is a published copy or another runtime's; DataError if its calibration
    text is gone or changed.
    """
    name, parts = record.cell, record.key_parts
    sources = find_sources(cache, store.manifest())
    if record.checkpoint not in sources.checkpoints:
        raise ResultsError(
            f"{name}: the cache does not say where its checkpoint is; set QBENCH_CACHE to the "
            "run's, or run the cell here"
        )
    checkpoint = find(str(sources.checkpoints[record.checkpoint]))
    if checkpoint.digest != parts["weights"]:
        raise ResultsError(
            f"{name}: {checkpoint.folder} holds other weights now; restore them, or run the cell "
            "again"
        )
    if (text := parts.get("calibration")) is not None:
        assert sources.calibration, "a run with calibrated cells keeps the path of their text"
        text = CalibrationText(
            path=sources.calibration, digest=text["text"], samples=text["samples"],
            length=text["length"], seed=text["seed"], bos=text.get("bos", False),
        )  # fmt: skip
    cell = Cell(
        checkpoint_name=record.checkpoint,
        checkpoint=replace(checkpoint, normalizer=record.normalizer),
        label=record.quantizer,
        quantization=config_of_record(parts["quantizer"]),
        attention=parts["attention"],
        calibration=text,
        key=record.key,
        key_parts=parts,
        scoring=None,  # nothing is scored
        base=None,
    )
    tokenizer, runtime = load_tokenizer(checkpoint), cell.quantization.runtime
    if made := isinstance(cell.quantization.weights, LibraryMade):
        cell, how = with_made_copy(cell, calibration_of(cell, tokenizer), cache, device)
    if runtime != "transformers":
        files = cell.quantization.weights.path if made else "its own files"
        raise ResultsError(
            f"{name}: this cell runs in {runtime}, not in transformers; to ship it, copy {files}"
        )
    if made:
        model = load_copy(cell, device, fallback=True)
    elif cell.quantization.weights is not None and cell.quantization.weights.prequantized:
        raise ResultsError(f"{name}: this cell is a published copy; to export it, copy its files")
    else:
        model = load_model(
            cell.checkpoint,
            dtype=getattr(torch, cell.quantization.compute_dtype),
            device=device,
            attention=cell.attention,
        )
        model, how = quantized_model(cell, model, tokenizer, cache, lambda done, total: None)
        _require_audited(record, model, cell.quantization)
    return MeasuredCell(record=record, cell=cell, model=model, tokenizer=tokenizer, how=how)


def _require_audited(record: Record, model: PreTrainedModel, config: Any) -> None:
    """Raise ResultsError if the weights of ``model`` differ from those that ``record`` audited."""
    audited = {m.name: m.digest for m in record.audit.modules} if record.audit else {}
    stored = evidence_of(model, config, "weights")
    other = [name for name in audited if digest(stored[name]().tensors) != audited[name]]
    if other:
        raise ResultsError(
            f"{record.cell}: {len(other)} layers differ from the audited ones, such as {other[0]}: "
            "libraries or code changed; run the cell again"
        )


Tensors = dict[str, Tensor]
SCALES = {"float8_e4m3fn": "torch.float8_e4m3fn", "float8_e8m0fnu": "torch.uint8"}


def export_model(
    store: Store, record: Record, out: Path, cache: Path, chosen: str | None = None
) -> str:
    """Write the model of the finished cell of ``record`` and a model card to the new folder
    ``out``, in the format ``chosen`` (None: the first that its method has). A copy that a library
    made for the cell is copied as it is. Return a line that says how its weights were obtained, and
    how far the logits of the folder, loaded again, are from the cell's.

    Raises UnavailableError if no format, or not the chosen one, can hold the cell, or if these
    logits differ by more than rounding; ResultsError if the cell cannot be loaded.
    """
    measured = load_measured(store, record, cache, record.key_parts["device"])
    config, name = measured.cell.quantization, record.cell
    if config.weights is None or config.kv_cache is not None:
        what = "has unquantized weights" if config.weights is None else "quantizes the KV cache"
        raise UnavailableError(
            f"{name}: it {what}, for which there is no format; name a cell of quantized weights"
        )
    made = isinstance(config.weights, MadeCopy)
    if made and chosen not in (None, config.weights.format):
        raise UnavailableError(f"{name}: its library wrote {config.weights.format}, which is "
                               "copied as it is; leave --weights out")  # fmt: skip
    with new_folder(out) as making:
        if made:
            shutil.copytree(config.weights.folder, making, dirs_exist_ok=True)
            chosen = config.weights.format
        else:
            chosen = write_model(measured, making, chosen)
        line = f"{chosen}; weights: {measured.how}; loaded again, its logits "
        line += compared(measured, load_written(measured, making, chosen))
        digest = record.audit.digest if record.audit else ""
        more = (f"Format: {line}.", f"Key of the measured cell: {record.key}.",
                f"Digest of its quantized layers: {digest}.", _attention(record))  # fmt: skip
        hub_id = store.manifest().hub_ids.get(record.checkpoint)
        text = card(record, hub_id, compare(store), more)
        write_atomically(making / "README.md", text.encode())
    return f"{name}: {line}"


def _attention(record: Record) -> str:
    """Return the sentence of the model card about the attention function."""
    if record.normalizer in ("softmax", "native"):
        return "Any library that knows the format computes its attention."
    return (f"It attends with {record.normalizer}: transformers alone would compute softmax; load "
            "it by qbench, or set its attention by qbench.api.attend.")  # fmt: skip


def write_model(measured: MeasuredCell, folder: Path, chosen: str | None) -> str:
    """Write weights, config.json and tokenizer to ``folder`` in the format ``chosen`` (None: the
    first of ``formats_of``); return the format's name. Raises UnavailableError if it cannot hold
    the cell."""
    model, config = measured.model, measured.cell.quantization
    formats = formats_of(config.weights)
    chosen = chosen or next(iter(formats), None)
    if chosen not in formats:
        remedy = f"; choose {', '.join(formats)}" if formats else ""
        if config.weights.method == "mixed" and not formats:
            remedy = "; of mixes only those of rtn, gptq, nvfp4, mx, fp8 and int8 have one"
        what = f"the format {chosen}" if chosen else "no format"
        raise UnavailableError(f"{config.name}: {what} can{'not' * bool(chosen)} hold it{remedy}")
    if any(isinstance(module, Experts) for module in model.modules()):
        raise UnavailableError(
            f"{config.name}: no format holds experts that the model's class keeps as one tensor; "
            "make the copy with another library and score it with --quantized LABEL=DIR"
        )
    if isinstance(model.get_input_embeddings(), QuantizedEmbedding):
        raise UnavailableError(
            f"{config.name}: no format holds quantized embeddings; leave them out of layers "
            "(qbench budget: out of --include)"
        )
    model.config.dtype = getattr(torch, config.compute_dtype)
    measured.tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    if chosen == "hqq":
        from hqq.models.hf.base import AutoHQQHFModel

        AutoHQQHFModel.save_quantized(model, str(folder))
        return chosen
    layers, inputs = (evidence_of(model, config, kind) for kind in ("weights", "activations"))
    left_out = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in layers]
    state, tensors = WRITERS[chosen]
    model.config.quantization_config = state(config, left_out, layers)
    model.config.save_pretrained(folder)
    kept = {key: value for key, value in model.state_dict().items()
            if not any(module in layers for module in parents(key))}  # fmt: skip
    if model.config.tie_word_embeddings:
        kept.pop("lm_head.weight", None)
    for name in layers:
        module = model.get_submodule(name)
        of_layer = replace(config, weights=config.weights.for_layer(name))
        stored = tensors(module, of_layer) | (_input_scale(inputs[name]) if inputs else {})
        if (bias := bias_of(module)) is not None:
            stored["bias"] = bias
        kept |= {f"{name}.{part}": tensor for part, tensor in stored.items()}
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in kept.items()}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return chosen


def load_written(measured: MeasuredCell, folder: Path, chosen: str) -> nn.Module:
    """Return the model of ``folder`` as a published copy of its checkpoint; of hqq as that library
    loads it."""
    cell, device = measured.cell, str(measured.model.device)
    dtype = getattr(torch, cell.quantization.compute_dtype)
    if chosen == "hqq":
        from hqq.models.hf.base import AutoHQQHFModel

        model = AutoHQQHFModel.from_quantized(str(folder), compute_dtype=dtype, device=device)
        normalizer, _, implementation = measured.record.attention.partition("/")
        if normalizer != "native":
            set_attention(model, normalizer=normalizer, implementation=implementation)
        return model.eval()
    return load_copy(with_copy(cell, folder, measured.model.device.type), device, fallback=True)


@torch.inference_mode()
def compared(measured: MeasuredCell, reloaded: nn.Module) -> str:
    """Return in words how the logits of ``reloaded`` differ from the cell's. Raises
    UnavailableError if they differ by more than rounding."""
    model = measured.model
    ids = probe_of(model.config.vocab_size).to(model.device)
    ours, theirs = (m(ids, use_cache=False).logits.float() for m in (model, reloaded))
    if torch.equal(ours, theirs):
        return "equal the cell's to the bit"
    off = difference(theirs, ours)
    # some libraries round the weights of float32 cells to float16 too
    if not off <= max(rounding_tolerance(reloaded), OURS_ON_GPU):
        raise UnavailableError(
            f"{measured.record.cell}: the written folder, loaded again, gives logits that differ "
            f"from the cell's by {off:.2g} of their size: this format cannot hold the cell; choose "
            "another"
        )
    if not off:  # at the median token
        share = (ours == theirs).all(-1).float().mean()
        where = f"at {share:.1%} of positions"
        return f"equal the cell's to the bit {where}: its library sums otherwise"
    return f"differ by {off:.2g} of their size from the cell's: its library rounds otherwise"


# compressed-tensors


def _arguments(form: QuantFormat, **more: Any) -> dict[str, Any]:
    """Return ``form`` as compressed-tensors' QuantizationArgs."""
    groups = {} if form.group_size == WHOLE_ROW else {"group_size": form.group_size}
    scale = {"scale_dtype": SCALES[form.scale_dtype]} if form.scale_dtype in SCALES else {}
    local = form.strategy == "tensor_group" and not form.dynamic
    return {"num_bits": form.num_bits, "type": form.type, "symmetric": form.symmetric,
            "strategy": form.strategy, "dynamic": "local" if local else form.dynamic,
            **groups, **scale, **more}  # fmt: skip


def _packed(weights: Any, inputs: Any) -> bool:
    """Say whether integer codes are packed into int32. Of unquantized ``inputs``, None, vLLM reads
    no other layout of them."""
    of_int8 = weights.method == "int8" and inputs is None
    return of_int8 or weights.method in ("gptq", "rtn")


def _weight_arguments(weights: Any, inputs: Any) -> tuple[str, dict[str, Any]]:
    """Return compressed-tensors' name of the storage layout, and its QuantizationArgs of
    ``weights``, beside those of the inputs, or None."""
    arguments = _arguments(weights.format, dynamic=False)
    if arguments["strategy"] == "token":
        arguments["strategy"] = "channel"
    if _packed(weights, inputs):
        return "pack-quantized", arguments
    if weights.method in ("nvfp4", "mx"):
        return f"{weights.name}{'-pack' if weights.num_bits == 4 else ''}-quantized", arguments
    return f"{weights.format.type}-quantized", arguments


def _by_settings(weights: Any, layers: Iterable[str]) -> dict[Any, list[str]]:
    """Return the names of ``layers`` by their settings."""
    by_settings: dict[Any, list[str]] = {}
    for name in layers:
        by_settings.setdefault(weights.for_layer(name), []).append(name)
    return by_settings


def _compressed_config(
    config: QuantizationConfig, left_out: list[str], layers: Iterable[str]
) -> dict[str, Any]:
    """Return compressed-tensors' quantization_config. Raises UnavailableError for settings that it
    cannot express."""
    inputs, weights = config.activations, config.weights
    if inputs is not None and set(inputs.ignore) != set(weights.ignore):
        raise UnavailableError(
            f"{config.name}: no format holds weights and inputs that ignore different layers; give "
            "both the same ignore"
        )
    by_settings = _by_settings(weights, layers)
    groups: dict[str, dict[str, Any]] = {}
    for settings, names in by_settings.items():
        if getattr(settings, "order", "") == "activation":
            raise UnavailableError(
                f"{config.name}: use --weights gptq, which alone holds order: activation"
            )
        layout, arguments = _weight_arguments(settings, inputs)
        groups[f"group_{len(groups)}"] = {
            "targets": names if len(by_settings) > 1 else ["Linear"], "weights": arguments,
            "format": layout, "input_activations": inputs and _arguments(inputs.format),
        }  # fmt: skip
    layouts = {group["format"] for group in groups.values()}
    return {"quant_method": "compressed-tensors", "ignore": left_out, "config_groups": groups,
            "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
            "quantization_status": "compressed"}  # fmt: skip


def _compressed(module: nn.Module, config: QuantizationConfig) -> Tensors:
    """Return the tensors that compressed-tensors stores of a layer, by name."""
    weights = config.weights
    if _packed(weights, config.activations):
        if weights.method == "int8":
            codes = (module.codes.short() + 128).to(torch.uint8)
        else:
            codes = unpack_codes(module.codes, module.bits, module.in_features)
        shape = torch.tensor([module.out_features, module.in_features])
        stored = {"weight_packed": bitstream(codes, weights.num_bits), "weight_scale": module.scale,
                  "weight_shape": shape}  # fmt: skip
        if not getattr(weights, "symmetric", True):
            stored["weight_zero_point"] = bitstream(module.zero.T, module.bits).T
    else:
        packed = module.codes.dtype == torch.uint8
        scale = module.scale.reshape(-1) if module.scale.numel() == 1 else module.scale
        stored = {"weight_packed" if packed else "weight": module.codes, "weight_scale": scale}
        if "tensor_scale" in module.stored:
            stored["weight_global_scale"] = module.tensor_scale
    return stored


def _input_scale(inputs: ActivationEvidence) -> Tensors:
    """Return what compressed-tensors stores of a layer whose inputs have a static scale."""
    if inputs.fixed is None:
        return {}
    scale, zero, form = inputs.fixed.scale.reshape(1), inputs.fixed.zero, inputs.format
    if form.strategy == "tensor_group":
        return {"input_global_scale": 1 / scale}
    if zero is None:
        return {"input_scale": scale}
    signed = (zero - 2 ** (form.num_bits - 1)).reshape(1).to(torch.int8)
    return {"input_scale": scale, "input_zero_point": signed}


def bitstream(codes: Tensor, bits: int) -> Tensor:
    """Return codes uint8 [n, m] packed along rows, least bits first, int32 [n, ⌈m / 32⌉ · bits]."""
    codes = nn.functional.pad(codes.cpu(), (0, -codes.shape[1] % 32))
    planes = codes[..., None] >> torch.arange(bits, dtype=torch.uint8) & 1
    packed = np.packbits(planes.flatten(1).numpy(), axis=1, bitorder="little")
    return torch.from_numpy(packed.view("<i4"))


# GPTQ


def _gptq_config(
    config: QuantizationConfig, left_out: list[str], layers: Iterable[str]
) -> dict[str, Any]:
    """Return GPTQ's quantization_config: the commonest settings; under GPTQModel's key ``dynamic``,
    by patterns over full names, layers with other settings and unquantized ones."""
    if config.activations is not None:
        raise UnavailableError(
            f"{config.name}: use --weights compressed-tensors, which holds quantized inputs too"
        )
    by_settings = _by_settings(config.weights, layers)
    options = {settings: {"bits": settings.num_bits, "group_size": settings.group_size,
                          "sym": settings.symmetric,
                          "desc_act": getattr(settings, "order", "") == "activation"}
               for settings in by_settings}  # fmt: skip
    usual = max(by_settings, key=lambda settings: len(by_settings[settings]))
    if len({settings.symmetric for settings in options}) > 1:
        raise UnavailableError(
            f"{config.name}: use --weights compressed-tensors, which alone holds symmetric beside "
            "asymmetric layers"
        )
    dynamic = {_pattern("+", by_settings[each]): options[each] for each in options if each != usual}
    if inside := [name for name in left_out if "." in name]:  # not the LM head
        dynamic[_pattern("-", inside)] = {}
    return {
        "quant_method": "gptq", **options[usual], **({"dynamic": dynamic} if dynamic else {}),
        "lm_head": False, "pack_dtype": "int32",
        "checkpoint_format": "gptq" if usual.symmetric else "gptq_v2",
        "meta": {"quantizer": [f"qbench:{__version__}"]},
    }  # fmt: skip


def _pattern(sign: str, names: Iterable[str]) -> str:
    """Return GPTQModel's pattern that includes (``+``) or excludes (``-``) the layers ``names``."""
    return f"{sign}:^(?:{'|'.join(map(re.escape, names))})$"


def _gptq(module: nn.Module, config: QuantizationConfig) -> Tensors:
    """Return the tensors of a layer in GPTQ's layout; its first version, for symmetric grids,
    stores zero points minus 1."""
    codes, columns = unpack_codes(module.codes, module.bits, module.in_features), module.order
    columns = torch.arange(module.in_features) if columns is None else columns.long()
    return {
        "qweight": bitstream(codes.cpu()[:, columns.cpu()], module.bits).T,
        "qzeros": bitstream(module.zero.T - int(config.weights.symmetric), module.bits),
        "scales": module.scale.T,
        "g_idx": (columns // module.group_size).to(torch.int32),
    }


# bitsandbytes


def _bnb_config(
    config: QuantizationConfig, left_out: list[str], layers: Iterable[str]
) -> dict[str, Any]:
    """Return bitsandbytes' config. Raises UnavailableError for quantized activations."""
    weights = config.weights
    if config.activations is not None:
        raise UnavailableError(
            f"{config.name}: the format of bitsandbytes holds no quantized inputs; name a cell of "
            "quantized weights only"
        )
    if weights.num_bits == 8:
        settings = {"load_in_8bit": True, "llm_int8_threshold": weights.threshold}
    else:
        settings = {"load_in_4bit": True, "bnb_4bit_quant_type": weights.quant_type,
                    "bnb_4bit_use_double_quant": weights.double_quant,
                    "bnb_4bit_compute_dtype": weights.compute_dtype}  # fmt: skip
    return transformers.BitsAndBytesConfig(**settings, llm_int8_skip_modules=left_out).to_dict()


FORMATS = {
    "gptq": ("gptq", "compressed-tensors"), "rtn": ("gptq", "compressed-tensors"),
    "nvfp4": ("compressed-tensors",), "mx": ("compressed-tensors",),
    "fp8": ("compressed-tensors",), "int8": ("compressed-tensors",),
    "bnb": ("bitsandbytes",), "hqq": ("hqq",),
}  # fmt: skip


def formats_of(weights: Any) -> tuple[str, ...]:
    """Return the formats that can hold cells of these settings of weights, the default first, () if
    none; for a mix those that can hold each of its settings, compressed-tensors first, since
    transformers ignores the key ``dynamic``."""
    if weights.method != "mixed":
        return FORMATS.get(weights.method, ())
    return tuple(name for name in ("compressed-tensors", "gptq")
                 if all(name in formats_of(chosen) for _, chosen in weights.layers))  # fmt: skip


# What config.json says of a format, and the tensors of a layer
WRITERS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[..., Tensors]]] = {
    "gptq": (_gptq_config, _gptq), "compressed-tensors": (_compressed_config, _compressed),
    "bitsandbytes": (_bnb_config, lambda module, _: dict(module.state_dict())),
}  # fmt: skip
