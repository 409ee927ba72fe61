"""Read and write GGUF files: their description without torch, tensors by transformers' names."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np

from qbench.errors import CheckpointError, UnavailableError
from qbench.records import GIB, StoredSize

# Architectures whose queries and keys llama.cpp's converter reorders
PERMUTED = ("llama", "granite", "smollm3", "arcee", "olmo")
INTERLEAVED = ("gpt-oss",)  # whose gate_up_proj has a row of gate and one of up in turn
CENTRED = ("gemma", "gemma2", "gemma3", "nemotron")  # whose norms it stores plus one
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")  # a matrix of one, in transformers' names


def library() -> Any:
    """Return the gguf package. Raises UnavailableError if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UnavailableError(
            "GGUF files need the package gguf, which is not installed: pip install -e '.[llamacpp]'"
        ) from None
    return gguf


@functools.lru_cache(maxsize=4)
def _reader(path: str) -> Any:
    """Return a reader of the GGUF file ``path``. Raises CheckpointError if it is not complete."""

    class Reader(library().GGUFReader):
        """Takes one view of the file per number or text, not five: a quarter of the time."""

        def _get(self, offset, dtype, count=1, override_order=None):
            dtype = np.dtype(dtype).newbyteorder(override_order or self.byte_order)
            return np.frombuffer(self.data, dtype, int(count), int(offset))

    try:
        return Reader(path)
    except (OSError, ValueError, LookupError, OverflowError) as error:
        raise CheckpointError(
            f"{path} is not a complete GGUF file ({error}); fetch it again"
        ) from None


def describe(path: str) -> dict[str, Any]:
    """Return the file's ``sizes`` under config.json's names, and ``counted``, fields of
    PublishedCopy: bits per weight and ``StoredSize``. Raises CheckpointError if ``path`` is no GGUF
    file, a part of one, or has unsupported experts; UnavailableError without the gguf package."""
    reader = _reader(path)
    architecture = _field(reader, "general.architecture")
    names = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "intermediate_size": "feed_forward_length",
    }
    bits: list[tuple[int, int]] = []  # of each matrix, and its number of weights
    of_head = None
    if (parts := _field(reader, "split.count") or 1) > 1:
        raise CheckpointError(
            f"{path} is one of {parts} parts of a file; join them: llama-gguf-split --merge {path} "
            "WHOLE.gguf"
        )
    if architecture in INTERLEAVED and any("_exps." in tensor.name for tensor in reader.tensors):
        raise CheckpointError(
            f"{path}: experts of {architecture} in GGUF files are not supported; use the "
            "safetensors files"
        )
    for tensor in reader.tensors:
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            bits.append((8 * int(tensor.n_bytes), int(tensor.n_elements)))
        elif tensor.name == "output.weight":
            of_head = 8 * int(tensor.n_bytes) / int(tensor.n_elements)
    stored, weights = (sum(column) for column in zip(*bits, strict=True)) if bits else (32, 1)
    return {
        "sizes": {ours: _field(reader, f"{architecture}.{name}") for ours, name in names.items()},
        "counted": {
            "stored_bits": stored / weights,
            "fewest_bits": min((b / n for b, n in bits), default=32.0),
            "size": StoredSize(
                bits_per_weight=stored / weights,
                head_bits_per_weight=of_head,
                gib=sum(8 * int(tensor.n_bytes) for tensor in reader.tensors) / GIB,
            ),
        },
    }


def _field(reader: Any, name: str) -> Any:
    field = reader.fields.get(name)
    return None if field is None else field.contents()


def tensors(path: str, modules: list[str], layers: int) -> dict[str, Any]:
    """Return the file's tensors by transformers' names, ``<module>.<weight or bias>``, of those
    ``modules`` that have any; for an expert its part of the tensor of all experts. ``layers``:
    number of decoder layers. Raises CheckpointError for an architecture that the gguf package does
    not know, and if an expert's gate and up have different types."""
    held = {tensor.name: tensor for tensor in _reader(path).tensors}
    by_module = {}
    for module, names in _names(path, modules, layers).items():
        expert = EXPERT.fullmatch(module)
        for part in ("weight", "bias"):
            parts = [held[f"{name}.{part}"] for name in names if f"{name}.{part}" in held]
            if parts and expert:
                parts = [_of_expert(path, parts, int(expert[2]))]
            if parts:
                by_module[f"{module}.{part}"] = parts[0]
    return by_module


def _names(path: str, modules: list[str], layers: int) -> dict[str, list[str]]:
    """Return module → the names of its tensors: none, one, or two for an expert's gate_up_proj."""
    architecture = _field(_reader(path), "general.architecture")
    kinds = {name: kind for kind, name in library().MODEL_ARCH_NAMES.items()}
    if architecture not in kinds:
        raise CheckpointError(
            f"{path}: the gguf package does not know architecture {architecture!r}; update gguf"
        )
    names = library().get_tensor_name_map(kinds[architecture], layers)
    by_module = {}
    for module in modules:
        theirs = [module]
        if expert := EXPERT.fullmatch(module):
            matrices = ("gate_proj", "up_proj") if expert[3] == "gate_up_proj" else (expert[3],)
            theirs = [f"{expert[1]}.{matrix}" for matrix in matrices]
        by_module[module] = [name for name in map(names.get_name, theirs) if name is not None]
    return by_module


def _of_expert(path: str, parts: list[Any], expert: int) -> Any:
    """Return the rows of one expert in ``parts``, tensors of all experts, one below the other."""
    kinds = {part.tensor_type.name for part in parts}
    if len(kinds) > 1:
        raise CheckpointError(
            f"{path}: {' and '.join(part.name for part in parts)} are of types "
            f"{' and '.join(sorted(kinds))}, and transformers' class has one matrix for both; use "
            "a file with one type for both"
        )
    columns, rows = (int(n) for n in parts[0].shape[:2])
    data = np.concatenate([part.data[expert] for part in parts])
    return parts[0]._replace(data=data, shape=[columns, rows * len(parts)], n_bytes=data.nbytes)


def dequantized(path: str, name: str, tensor: Any, heads: tuple[int, int]) -> np.ndarray:
    """Return a tensor of ``tensors``, called ``name`` there, dequantized to float32, in
    transformers' shape and order of rows. ``heads``: the number of query and of key heads. Raises
    UnavailableError for a type that the gguf package cannot read."""
    try:
        values = library().dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise UnavailableError(
            f"{path}: the gguf package cannot read {kind} back; use a file of another type"
        ) from None
    values = values.reshape([int(n) for n in tensor.shape[::-1]])
    architecture = _field(_reader(path), "general.architecture")
    for part, count in zip(("q_proj", "k_proj"), heads, strict=True):
        if architecture in PERMUTED and f".{part}." in name:
            values = values.reshape(count, -1, 2, *values.shape[1:]).swapaxes(1, 2)
            values = values.reshape(-1, *values.shape[3:])
    if architecture in CENTRED and name.endswith("norm.weight"):
        values = values - 1
    return values


def write_llama(model: Path, path: Path, kind: str, quantize_chunk: Any) -> None:
    """Write the Llama model in the folder ``model`` as a GGUF file without a vocabulary, which is
    scored by token ids. llama.cpp's function ``quantize_chunk`` rounds its layers to the type
    ``kind``, unless it is None; others are bfloat16 if that holds them exactly, else float32."""
    from transformers import AutoModelForCausalLM

    gguf = library()
    llama = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    config, heads = llama.config, llama.config.num_attention_heads
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "head_count": heads, "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps, "rope_dimension_count": config.head_dim,
        "rope_freq_base": config.rope_parameters["rope_theta"], "vocab_size": config.vocab_size,
        "tokenizer_model": "none",
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    number = gguf.GGMLQuantizationType[kind.upper()]
    block, size = gguf.GGML_QUANT_SIZES[number]
    for name, parameter in llama.named_parameters():
        values, raw = parameter.detach().numpy(), None
        for part, count in (("q_proj", heads), ("k_proj", config.num_key_value_heads)):
            if f".{part}." in name:  # llama.cpp rotates neighbours
                rows = values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2)
                values = np.ascontiguousarray(rows.reshape(values.shape))
        if quantize_chunk and ".layers." in name and values.ndim == 2:
            rows, columns, raw = *values.shape, number
            codes = np.empty((rows, columns // block * size), np.uint8)
            pointers = (ctypes.c_void_p(array.ctypes.data) for array in (values, codes))
            counts = (ctypes.c_int64(n) for n in (0, rows, columns))
            quantize_chunk(ctypes.c_int(number), *pointers, *counts, None)
            values = codes
        elif values.ndim == 2 and (parameter == parameter.bfloat16()).all():
            raw = gguf.GGMLQuantizationType.BF16
            values = gguf.quantize(values, raw)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), values, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
