"""GGUF files in llama.cpp's mixes, whose types of layers its program llama-quantize chooses."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qbench.errors import RecipeError
from qbench.quantizers.config import settings
from qbench.quantizers.methods.by_llamacpp import Gguf
from qbench.quantizers.methods.library_made import Texts, maker

PROGRAM = "llama-quantize"
MIXES = ("q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q3_k_l", "q3_k_m", "q3_k_s")


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


def make(model: Path, out: Path, texts: Texts, settings: GgufMix) -> None:
    """Write ``model`` as ``model.gguf`` to the folder ``out``; ``texts`` are not used. Raises
    SystemExit if the program's exit code is not 0."""
    from qbench.quantizers.gguf_file import write_llama

    write_llama(model, whole := out / "whole.gguf", "f32", None)
    command = [PROGRAM, str(whole), str(out / "model.gguf"), settings.type.upper()]
    if code := subprocess.run(command, check=False).returncode:
        raise SystemExit(f"{PROGRAM} ended with exit code {code}")
    whole.unlink()
