"""Quantized copies of a checkpoint, each saved by the library of its format.

python tests/quantizers/published_copies.py CHECKPOINT FOLDER TEXTS.jsonl writes those that
recipes/published-27m.yaml names.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from loading import load_model, save_as_transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers.integrations.metal_quantization import _affine_quantize_tensor

from qbench.checkpoints import find

DEMO = Path(__file__).parents[2] / "recipes" / "demo"
BF16 = {"dtype": torch.bfloat16, "device_map": {"": "cpu"}}
PRESETS = {
    "ct-w4a16": "W4A16", "ct-w4a16-asym": "W4A16_ASYM", "ct-w8a8": "W8A8", "ct-fp8": "FP8_DYNAMIC",
    "ct-fp8-block": "FP8_BLOCK", "ct-nvfp4": "NVFP4",
}  # fmt: skip
LARGEST_INPUT = 20.0  # of the bundled model's linear layers
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
FORMATS = ("bnb-nf4", "bnb-int8", "torchao-int8", "torchao-w8a8", "ct-w4a16", "ct-w8a8", "ct-fp8")


def original(folder: Path) -> Path:
    """The bundled model as transformers' Llama."""
    if not folder.exists():
        save_as_transformers(DEMO / "softmax", folder)
    return folder


def copy_of(source: Path, name: str, folder: Path) -> Path:
    """``source`` quantized as ``name`` says; skips where the library is not there."""
    if name in REWRITTEN:
        return _rewritten(source, folder, name)
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


def gptq(source: Path, folder: Path, texts: list[str], *, group_size: int = 128) -> Path:
    """``source`` quantized to 4 bits by gptqmodel, through optimum; it attends as it was trained
    while it is calibrated, which transformers alone would not see to."""
    attention = load_model(find(str(source)), dtype=torch.bfloat16, device="cpu")
    attention = attention.config._attn_implementation
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    config = transformers.GPTQConfig(
        bits=4, group_size=group_size, tokenizer=tokenizer, dataset=texts, backend="gptq_torch"
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, quantization_config=config, attn_implementation=attention, **BF16
    )
    model.config.quantization_config.dataset = None  # else config.json holds the texts
    model.save_pretrained(folder)
    return folder


def awq(
    source: Path, folder: Path, *, group_size: int = 32, cancel: bool = True, span: float = 1.0
) -> Path:
    """``source`` in AWQ's layout ("gemm"), factors of columns, exp(±``span``) at most, moved into
    the norms before; unless they ``cancel``, one norm forgets them."""
    draw = torch.Generator().manual_seed(0)
    kept, written = load_file(source / "model.safetensors"), {}
    factors: dict[str, torch.Tensor] = {}
    for name, tensor in kept.items():
        if name.endswith("layernorm.weight"):
            factors[name] = (span * (torch.rand(len(tensor), generator=draw) * 2 - 1)).exp()
            forgets = not cancel and name == "model.layers.1.input_layernorm.weight"
            written[name] = tensor if forgets else (tensor.float() / factors[name]).bfloat16()
    for name, tensor in kept.items():
        if name in written:
            continue
        if "proj" not in name:
            written[name] = tensor
            continue
        block, _, part = name.partition(".mlp." if ".mlp." in name else ".self_attn.")
        norm = "post_attention_layernorm" if ".mlp." in name else "input_layernorm"
        folded = part.startswith(("q_", "k_", "v_", "gate_", "up_"))
        weight = tensor.float() * (factors[f"{block}.{norm}.weight"] if folded else 1)
        groups = weight.reshape(len(weight), -1, group_size)
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / 15).half().float()
        zero = (-low / scale).round().clamp(0, 15)
        codes = ((groups / scale[..., None]).round() + zero[..., None]).clamp(0, 15)
        base = name.removesuffix(".weight")
        written[f"{base}.qweight"] = _nibbles(codes.reshape(weight.shape).T)
        written[f"{base}.qzeros"] = _nibbles(zero.T)
        written[f"{base}.scales"] = scale.T.half().contiguous()
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True,
              "version": "gemm"}  # fmt: skip
    return changed(
        source, folder, lambda t: t.clear() or t.update(written), quantization_config=config
    )


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[rows, columns] as int32 [rows, columns / 8], in AWQ's order."""
    taken = codes.to(torch.int64).reshape(len(codes), -1, 8)
    packed = sum(taken[:, :, at] << (4 * i) for i, at in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    return (packed - ((packed >> 31) << 32)).to(torch.int32).contiguous()


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
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = transformers.AutoModelForCausalLM.from_pretrained(source, **BF16)
    scheme = preset_name_to_scheme(PRESETS[name], ["Linear"])
    of = scheme.weights
    if name.startswith("ct-w4a16"):
        of.group_size = 32
    settings = QuantizationConfig(
        config_groups={"all": scheme}, ignore=["lm_head"], quantization_status="frozen"
    )
    apply_quantization_config(model, settings)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        rows, columns = of.block_structure or (1, of.group_size or module.in_features)
        groups = module.weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).float()
        ends, whole, dtype = (groups.amin((1, 3)), groups.amax((1, 3))), None, torch.bfloat16
        if name == "ct-nvfp4":
            whole = generate_gparam(groups.min(), groups.max()).reshape(1)
            module.weight_global_scale.data = whole
            module.input_global_scale.data = torch.full((1,), 448 * 6 / LARGEST_INPUT)
            dtype = module.weight_scale.dtype
        scale, zero = calculate_qparams(*ends, of, global_scale=whole)
        module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(dtype)
        if not of.symmetric:
            module.weight_zero_point.data = zero.to(module.weight_zero_point.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def with_biases(source: Path, folder: Path) -> Path:
    """``source``, a Llama of transformers, with a random bias in each linear layer of attention."""
    draw = torch.Generator().manual_seed(0)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if "self_attn" in n]:
            bias = torch.randn(len(tensors[name]), generator=draw)
            tensors[name.replace("weight", "bias")] = bias.bfloat16()

    return changed(source, folder, add, attention_bias=True)


def nearly_ternary(tensors: dict[str, torch.Tensor]) -> None:
    """Weights as of a model that BitNet trained: about −m, 0 or m."""
    torch.manual_seed(0)
    for name in [name for name in tensors if "proj" in name]:
        weight = tensors[name].float()
        mean = weight.abs().mean()
        signs = (weight / mean).round().clamp(-1, 1)
        noise = 0.1 * torch.randn_like(signs)
        tensors[name] = ((signs + noise) * mean).to(tensors[name].dtype)


# Of a tensor by its name: the tensors that a format keeps of it


def _in_blocks(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """FP8 in blocks of 128 × 128, as DeepSeek and Qwen publish theirs."""
    rows, columns = tensor.shape
    padded = functional.pad(tensor.float(), (0, -columns % 128, 0, -rows % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))  # [R, 128, C, 128]
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return {name: codes.to(torch.float8_e4m3fn).contiguous(), f"{name}_scale_inv": scale}


def _in_rows(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """FP8 with a scale per row, as compressed-tensors keeps it."""
    scale = tensor.float().abs().amax(1, keepdim=True) / 448
    codes = (tensor.float() / scale).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale": scale.bfloat16()}


def _in_int8_rows(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """int8 with a scale per row, one code per byte, as compressed-tensors keeps it."""
    scale = (tensor.float().abs().amax(1, keepdim=True) / 127).bfloat16()
    return {name: (tensor / scale.float()).round().to(torch.int8), f"{name}_scale": scale}


def _in_gptq(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """4 bits in groups of 32, zeros at 8, in GPTQ's layout."""
    groups = tensor.float().unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1) / 7.5).half()
    codes = (groups / scale[..., None].float()).round().add(8).clamp(0, 15).int().flatten(1)
    shifts = 4 * torch.arange(8)[:, None]
    words = (codes.T.unflatten(0, (-1, 8)).long() << shifts).sum(1).to(torch.int32)
    zeros = torch.full((scale.shape[1], len(tensor) // 8), 0x77777777, dtype=torch.int32)
    written = {"qweight": words, "qzeros": zeros, "scales": scale.T.contiguous(),
             "g_idx": torch.arange(tensor.shape[1], dtype=torch.int32) // 32}  # fmt: skip
    return {name.replace("weight", part): tensor for part, tensor in written.items()}


def _in_mxfp4(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Experts [experts, in, out] as OpenAI publishes those of gpt-oss."""
    groups = tensor.mT.float().unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups / exponent.exp2()[..., None]
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = (scaled.abs()[..., None] - magnitudes).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return {f"{name}_blocks": pairs, f"{name}_scales": (exponent + 127).to(torch.uint8)}


def _in_bitnet(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """−1, 0 and 1, four to a byte, with a factor per matrix."""
    from transformers.integrations.bitnet import pack_weights  # with torch's compiler

    factor = 1 / tensor.float().abs().mean()
    signs = (tensor.float() * factor).round().clamp(-1, 1)
    return {name: pack_weights(signs), f"{name}_scale": factor.bfloat16()[None]}


def _in_mxfp8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """E4M3 in blocks of 32 of a row, whose scale is a power of two."""
    blocks = tensor.float().unflatten(1, (-1, 32))
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1))) - 8
    codes = (blocks / exponent.exp2()[..., None]).clamp(-448, 448).flatten(1)
    scale = (exponent + 127).to(torch.uint8)
    return {name: codes.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}


def _in_metal(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """4 bits in groups of 64, with scale and least."""
    codes, scales, least = _affine_quantize_tensor(tensor, 64, 4)
    parts = {"weight": codes, "scales": scales.bfloat16(), "qbiases": least.bfloat16()}
    return {name.replace("weight", part): kept for part, kept in parts.items()}


def _in_gemma(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """4 bits with a scale per row, in Gemma's own format; inputs stay unrounded."""
    scale = tensor.float().abs().amax(1, keepdim=True) / 7
    codes = ((tensor.float() / scale).round() + 8).to(torch.uint8)
    sides = [name.replace("weight", f"{side}_activation_scale") for side in ("input", "output")]
    unrounded = {side: torch.tensor(0.0) for side in sides}
    return {name: codes[:, 0::2] | codes[:, 1::2] << 4, f"{name}_scale": scale, **unrounded}


def _ct_rows(kind: str, **config: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": "channel"}
    groups = {"all": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "quantization_status": "compressed",
            "config_groups": groups, **config}  # fmt: skip


REWRITTEN = {  # a format: which tensors, what it keeps of one, its quantization_config
    "fp8": ("proj", _in_blocks, {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128]}),
    "fp8-rows": (r"proj|\.experts\.", _in_rows, _ct_rows(
        "float", format="float-quantized", ignore=["lm_head"])),
    "int8-rows": ("proj|^lm_head", _in_int8_rows, _ct_rows(
        "int", format="int-quantized", ignore=[])),
    "gptq": ("proj", _in_gptq, {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}),
    "mxfp4": ("_proj$", _in_mxfp4, {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                   "lm_head"]}),
    "bitnet": ("proj", _in_bitnet, {
        "quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline",
        "modules_to_not_convert": ["lm_head"]}),
    "mxfp8": ("proj", _in_mxfp8, {
        "quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32],
        "scale_fmt": "ue8m0"}),
    "metal": ("proj", _in_metal, {"quant_method": "metal", "bits": 4, "group_size": 64}),
    "gemma": ("proj", _in_gemma, {
        "quant_method": "gemma", "num_bits": 4, "modules_to_not_convert": ["lm_head"]}),
}  # fmt: skip


def _rewritten(source: Path, folder: Path, name: str) -> Path:
    """``source`` in the format ``name`` of the table."""
    pattern, keep, config = REWRITTEN[name]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in [each for each in tensors if re.search(pattern, each)]:
            tensors.update(keep(tensor, tensors.pop(tensor)))

    return changed(source, folder, change, quantization_config=config)


def experts(kind: str, folder: Path) -> Path:
    """A random ``kind`` of transformers with four experts a layer, and the bundled tokenizer."""
    sizes = {
        "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "num_experts_per_tok": 2, "max_position_embeddings": 512, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    own = {
        "gpt_oss": {"num_local_experts": 4, "rope_parameters": ROPE, "sliding_window": 64},
        "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 128},
        "mixtral": {"num_local_experts": 4},
        "granitemoe": {"num_local_experts": 4},
    }[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes, **own)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    for file in (DEMO / "softmax").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def changed(copy: Path, folder: Path, change, **config) -> Path:
    """``copy`` with its tensors through ``change`` (a dictionary, in place)."""
    shutil.copytree(copy, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if config:
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | config))
    return folder


def first_blocks(source: Path, folder: Path, **config) -> Path:
    """The first two blocks of a bundled model."""

    def first(tensors):
        for name in [name for name in tensors if "layers.2." in name or "layers.3." in name]:
            del tensors[name]

    return changed(source, folder, first, num_hidden_layers=2, **config)


def gguf(source: Path, path: Path, kind: str = "F32") -> Path:
    """``source``, a Llama or a Mixtral of transformers, as llama.cpp's converter writes it, every
    matrix of its layers in the type ``kind``; skips where the libraries are not there."""
    pytest.importorskip("xllamacpp")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="float32")
    config = model.config
    experts = getattr(config, "num_local_experts", None)
    fields = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads, "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": config.rope_parameters["rope_theta"], "vocab_size": config.vocab_size,
        "rope_dimension_count": config.hidden_size // config.num_attention_heads,
        **({"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
           if experts else {}),
        **_tokenizer_fields(json.loads((source / "tokenizer.json").read_text())),
    }  # fmt: skip
    if kind != "F32":
        path = path.with_name(f"{path.stem}-{kind}.gguf")
    return write_gguf(path, model, change=interleaved(config), kind=kind, **fields)


def interleaved(config: Any):
    """Return the change of rows of queries and keys to the order of llama.cpp's RoPE."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}

    def change(name: str, values: np.ndarray) -> np.ndarray:
        if (count := heads.get(name.split(".")[-2])) is None:
            return values
        return values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)

    return change


def write_gguf(
    path: Path, model: Any, architecture: str = "llama", change=lambda name, values: values,
    kind: str = "F32", **fields: Any,
) -> Path:  # fmt: skip
    """Write ``model`` as llama.cpp's converter does, each tensor through ``change``; return
    ``path``. ``fields`` are those that the gguf package's writer knows, or 16-bit numbers."""
    library = pytest.importorskip("gguf")
    writer = library.GGUFWriter(path, architecture)
    writer.add_block_count(model.config.num_hidden_layers)
    for name, value in fields.items():
        if add := getattr(writer, f"add_{name}", None):
            add(value)
        else:
            writer.add_uint16(name.replace("_", "."), value)
    kinds = {name: number for number, name in library.MODEL_ARCH_NAMES.items()}
    names = library.get_tensor_name_map(kinds[architecture], model.config.num_hidden_layers)
    for name, tensor in experts_apart(model):
        values, raw = np.ascontiguousarray(change(name, tensor.float().numpy())), None
        target = names.get_name(name, (".weight", ".bias"))
        matrix = values.ndim > 1 and target.startswith("blk.") and "gate_inp" not in target
        if kind != "F32" and matrix:
            raw = library.GGMLQuantizationType[kind]
            values = library.quantize(values, raw)
        writer.add_tensor(target, values, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def experts_apart(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by name, gate_up_proj of experts as the gate_proj and up_proj that it is made of,
    and all of experts as weights."""
    for name, tensor in model.named_parameters():
        module, _, part = name.rpartition(".")
        if not module.endswith(".experts"):
            yield name, tensor.detach()
        elif part == "gate_up_proj":
            for half, values in zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True):
                yield f"{module}.{half}.weight", values.detach().contiguous()
        else:
            yield f"{name}.weight", tensor.detach()


def _tokenizer_fields(file: dict[str, Any]) -> dict[str, Any]:
    """Byte-level BPE with digits apart, which llama.cpp calls by a model that has it."""
    ids = file["model"]["vocab"]
    added = {entry["content"]: entry["id"] for entry in file["added_tokens"]}
    tokens = sorted(ids | added, key=ids.get)
    return {
        "tokenizer_model": "gpt2", "tokenizer_pre": "smollm", "token_list": tokens,
        "token_types": [3 if token in added else 1 for token in tokens],
        "token_merges": [m if isinstance(m, str) else " ".join(m) for m in file["model"]["merges"]],
        "bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"], "add_bos_token": False,
    }  # fmt: skip


def main(checkpoint: str, folder: str, calibration: str) -> None:
    whole, made = Path(folder) / "llama", Path(folder)
    save_as_transformers(Path(checkpoint), whole)
    for name in FORMATS:
        copy_of(whole, name, made / name)
    lines = Path(calibration).read_text().splitlines()
    texts = [json.loads(line)["text"][:2000] for line in lines[:32]]  # a CPU's share
    gptq(whole, made / "gptq-4bit", texts)
    if find(checkpoint).normalizer == "softmax":  # llama.cpp has no other
        for kind in ("F32", "Q8_0", "Q4_0"):
            gguf(whole, made / "model.gguf", kind)


if __name__ == "__main__":
    main(*sys.argv[1:])
