"""GGUF files whose layers llama.cpp's ``ggml_quantize_chunk`` rounds, all to one type.

The mixes that llama.cpp publishes (Q4_K_M) are choices of its program llama-quantize, importance
matrices those of another: run these by the method ``command``.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from qbench.errors import QuantizationError, RecipeError
from qbench.quantizers.config import Runtime, settings
from qbench.quantizers.methods.library_made import LibraryMade
from qbench.quantizers.registry import register

if TYPE_CHECKING:
    from torch import Tensor

# Bits of a code, weights in a block, bytes of a block
TYPES = {
    "q8_0": (8, 32, 34), "q6_k": (6, 256, 210), "q5_0": (5, 32, 22), "q4_k": (4, 256, 144),
    "q4_0": (4, 32, 18), "q3_k": (3, 256, 110), "q2_k": (2, 256, 84),
}  # fmt: skip


@register(
    "gguf-{type}",
    "GGUF by llama.cpp, all layers {type}; runs on the CPU",
    type=tuple(TYPES),
    ignore=((),),
)
@settings
class Gguf(LibraryMade):
    """Blocks of integers; embeddings, LM head and norms stay as they are."""

    method: ClassVar[str] = "gguf"
    title: ClassVar[str] = "GGUF"
    package: ClassVar[str] = "xllamacpp"
    install: ClassVar[str] = "pip install -e '.[llamacpp]'"
    requirements = ("xllamacpp", "gguf")
    runtime: ClassVar[Runtime] = "llama.cpp"
    softmax_only: ClassVar[bool] = True

    type: str

    @property
    def num_bits(self) -> int:
        return TYPES[self.type][0]

    @property
    def scheme(self) -> str:
        return f"{self.type} in blocks of {TYPES[self.type][1]}"

    def shared_bits(self, rows: int, columns: int) -> float:
        bits, weights, size = TYPES[self.type]
        return 8 * size / weights - bits

    def check(self, config: Mapping[str, Any], device: str) -> None:
        super().check(config, device)
        rope = (config.get("rope_parameters") or {}).get("rope_type", "default")
        if config.get("model_type") != "llama" or rope != "default" or config.get("rope_scaling"):
            raise RecipeError(
                f"{self.name}: it writes files of Llama models with plain RoPE; convert others by "
                "llama.cpp's convert_hf_to_gguf.py, and name the file as a copy"
            )

    def check_layer(self, name: str, rows: int, columns: int) -> None:
        if columns % (block := TYPES[self.type][1]):
            raise QuantizationError(
                f"{self.name}: {name} has {columns} inputs, no whole blocks of {block}; llama.cpp "
                "would take another type: take gguf-q8_0, gguf-q5_0 or gguf-q4_0"
            )


def make(model: Path, out: Path, texts: Tensor | None, settings: Gguf) -> None:
    """Write a file without a vocabulary: it is scored by token ids."""
    import gguf
    import numpy as np
    from transformers import AutoModelForCausalLM

    (path,) = Path(importlib.util.find_spec("xllamacpp").origin).parent.glob("xllamacpp*.so")
    quantize_chunk = ctypes.CDLL(str(path)).ggml_quantize_chunk
    quantize_chunk.restype = ctypes.c_size_t
    whole = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    config, heads = whole.config, whole.config.num_attention_heads
    writer = gguf.GGUFWriter(out / "model.gguf", "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    number = gguf.GGMLQuantizationType[settings.type.upper()]
    _, block, size = TYPES[settings.type]
    for name, parameter in whole.named_parameters():
        values, raw = parameter.detach().numpy(), None
        for part, count in (("q_proj", heads), ("k_proj", config.num_key_value_heads)):
            if f".{part}." in name:  # llama.cpp rotates neighbours
                rows = values.reshape(count, 2, -1, *values.shape[1:]).swapaxes(1, 2)
                values = np.ascontiguousarray(rows.reshape(values.shape))
        if ".layers." in name and values.ndim == 2:
            rows, columns, raw = *values.shape, number
            codes = np.empty((rows, columns // block * size), np.uint8)
            pointers = (ctypes.c_void_p(one.ctypes.data) for one in (values, codes))
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
