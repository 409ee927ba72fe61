"""Quantized copies of the bundled softmax model, each saved by the library of its format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from qbench.checkpoints import find
from qbench.checkpoints.convert import convert

DEMO = Path(__file__).parents[2] / "recipes" / "demo"
BF16 = {"dtype": torch.bfloat16, "device_map": {"": "cpu"}}
FORMATS = ("bnb-nf4", "bnb-int8", "torchao-int8", "torchao-w8a8", "ct-w4a16", "ct-w8a8", "ct-fp8")


def original(folder: Path) -> Path:
    """The bundled model as transformers' Llama."""
    if not folder.exists():
        convert(find(str(DEMO / "softmax")), "llama", folder)
    return folder


def copy_of(source: Path, name: str, folder: Path) -> Path:
    """``source`` quantized as ``name`` says; skips where the library is not there."""
    if name.startswith("ct-"):
        pytest.importorskip("compressed_tensors")
        _compressed_tensors(source, name, folder)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, quantization_config=_config(name), **BF16
        )
        model.save_pretrained(folder)
    for file in source.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def _config(name):
    if name == "bnb-nf4":
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    if name == "bnb-int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig

    kind = Int8WeightOnlyConfig if name == "torchao-int8" else Int8DynamicActivationInt8WeightConfig
    return transformers.TorchAoConfig(kind(version=2))


def _compressed_tensors(source, name, folder):
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model = transformers.AutoModelForCausalLM.from_pretrained(source, **BF16)
    preset = {"ct-w4a16": "W4A16", "ct-w8a8": "W8A8", "ct-fp8": "FP8_DYNAMIC"}[name]
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.group_size:
        scheme.weights.group_size = 32
    settings = QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head"], quantization_status="frozen"
    )
    apply_quantization_config(model, settings)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        groups = module.weight.reshape(len(module.weight), -1, scheme.weights.group_size or
                                       module.in_features)  # fmt: skip
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(torch.bfloat16)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def changed(copy: Path, folder: Path, change, **config) -> Path:
    """``copy`` with its tensors through ``change`` (a dictionary, in place)."""
    shutil.copytree(copy, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if config:
        stated = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(stated | config))
    return folder


def gguf(source: Path, path: Path, kind: str = "F32") -> Path:
    """``source``, a Llama of transformers, as llama.cpp's converter writes it, without a tokenizer,
    and quantized by llama.cpp to ``kind``; skips where the libraries are not there."""
    writer_of = pytest.importorskip("gguf")
    library = pytest.importorskip("llama_cpp")
    config = json.loads((source / "config.json").read_text())
    heads = config["num_attention_heads"]
    writer = writer_of.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = writer_of.get_tensor_name_map(writer_of.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(source / "model.safetensors").items():
        values = tensor.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            rows = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2)
            values = rows.reshape(values.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if kind == "F32":
        return path
    settings = library.llama_model_quantize_default_params()
    settings.ftype = getattr(library, f"LLAMA_FTYPE_MOSTLY_{kind}")
    settings.nthread = 1
    quantized = path.with_name(f"{path.stem}-{kind}.gguf")
    assert library.llama_model_quantize(str(path).encode(), str(quantized).encode(), settings) == 0
    return quantized
