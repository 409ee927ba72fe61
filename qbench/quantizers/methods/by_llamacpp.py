"""GGUF files by llama.cpp's function ``ggml_quantize_chunk``: all layers of one type."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from qbench.errors import RecipeError
from qbench.quantizers.config import Runtime, settings
from qbench.quantizers.methods.library_made import LibraryMade, Texts, maker

# Bits of a code, weights in a block
TYPES = {
    "q8_0": (8, 32), "q6_k": (6, 256), "q5_0": (5, 32), "q4_k": (4, 256), "q4_0": (4, 32),
    "q3_k": (3, 256), "q2_k": (2, 256),
}  # fmt: skip


@maker("gguf-{type}", "GGUF by llama.cpp, all {type}; seconds, on the CPU", type=tuple(TYPES))
@settings
class Gguf(LibraryMade):
    """Blocks of integers; embeddings, LM head and norms stay as they are."""

    method: ClassVar[str] = "gguf"
    title: ClassVar[str] = "GGUF"
    requirements = ("xllamacpp", "gguf")
    extra: ClassVar[str] = "llamacpp"
    needs_calibration = False
    runtime: ClassVar[Runtime] = "llama.cpp"
    softmax_only: ClassVar[bool] = True

    type: str
    num_bits = property(lambda self: TYPES[self.type][0])
    scheme = property(lambda self: f"{self.type} in blocks of {TYPES[self.type][1]}")
    blocks = property(lambda self: (1, TYPES[self.type][1]))

    def check(self, config: Mapping[str, Any], device: str) -> None:
        """Raise RecipeError if the library is missing, or for a model that is not a Llama with
        plain RoPE."""
        super().check(config, device)
        rope = (config.get("rope_parameters") or {}).get("rope_type", "default")
        if config.get("model_type") != "llama" or rope != "default" or config.get("rope_scaling"):
            raise RecipeError(
                f"{self.name}: only for Llama models with plain RoPE; make the GGUF file with "
                "llama.cpp's convert_hf_to_gguf.py and llama-quantize, and score it with "
                "--quantized LABEL=FILE.gguf"
            )


def make(model: Path, out: Path, texts: Texts, settings: Gguf) -> None:
    """Write ``model`` as ``model.gguf`` to the folder ``out``; ``texts`` are not used."""
    from qbench.quantizers.gguf_file import write_llama

    (path,) = Path(importlib.util.find_spec("xllamacpp").origin).parent.glob("xllamacpp*.so")
    chunk = ctypes.CDLL(str(path)).ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    write_llama(model, out / "model.gguf", settings.type, chunk)
