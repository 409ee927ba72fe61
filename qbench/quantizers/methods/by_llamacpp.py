"""GGUF files by llama.cpp: all layers of one type, by its function ``ggml_quantize_chunk``; or a
mix, whose types its program llama-quantize chooses."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
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
PROGRAM = "llama-quantize"
MIXES = ("q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q3_k_l", "q3_k_m", "q3_k_s")


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


@maker("gguf-{type}", f"GGUF by {PROGRAM}, mix {{type}}; seconds, on the CPU", type=MIXES)
@settings
class GgufMix(Gguf):
    """More bits for some layers; embeddings and LM head are quantized too."""

    requirements = (*Gguf.requirements, PROGRAM)
    num_bits = property(lambda self: int(self.type[1]))
    scheme = property(lambda self: f"mix {self.type}")
    blocks = (1, 32)

    def check(self, config: Mapping[str, Any], device: str) -> None:
        """Raise RecipeError as ``Gguf.check``, or if the program is not found."""
        super().check(config, device)
        if shutil.which(PROGRAM) is None:
            other = "q5_0" if self.num_bits == 5 else f"q{self.num_bits}_k"
            raise RecipeError(
                f"{self.name}: no program {PROGRAM}; install llama.cpp's programs, or take "
                f"gguf-{other}, one type for all layers"
            )


def make(model: Path, out: Path, texts: Texts, settings: Gguf) -> None:
    """Write ``model`` as ``model.gguf`` to the folder ``out``; ``texts`` are not used. Raises
    SystemExit if the program's exit code is not 0."""
    from qbench.quantizers.gguf_file import write_llama

    if isinstance(settings, GgufMix):
        write_llama(model, unquantized := out / "unquantized.gguf", "f32", None)
        command = [PROGRAM, str(unquantized), str(out / "model.gguf"), settings.type.upper()]
        if code := subprocess.run(command, check=False).returncode:
            raise SystemExit(f"{PROGRAM} ended with exit code {code}")
        unquantized.unlink()
        return
    (path,) = Path(importlib.util.find_spec("xllamacpp").origin).parent.glob("xllamacpp*.so")
    chunk = ctypes.CDLL(str(path)).ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    write_llama(model, out / "model.gguf", settings.type, chunk)
