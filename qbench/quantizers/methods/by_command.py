"""A copy that a command of the user's writes, for a library that needs another environment."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

from pydantic import Field

from qbench.errors import RecipeError
from qbench.quantizers.config import settings
from qbench.quantizers.methods.library_made import LibraryMade, Texts, maker

HELP = "with {model} and {out}, folders, and, if it calibrates, {texts}, safetensors of `input_ids`"


@maker("command", "a copy that a command of yours writes, in an environment of its own")
@settings
class ByCommand(LibraryMade):
    """Made by ``command``. What it writes is audited like any copy."""

    method, title = "command", "Command"
    softmax_only: ClassVar[bool] = True
    command: str = Field("", description=HELP)
    bits: float = Field(4, ge=1, le=16, description="of a weight; its files are counted")
    runtime: Literal["transformers", "llama.cpp"] = Field(
        "transformers", description="llama.cpp: it writes one GGUF file to {out}"
    )
    package = property(lambda self: next(iter(shlex.split(self.command)), "the command"))
    needs_calibration = property(lambda self: "{texts}" in self.command)
    num_bits = property(lambda self: self.bits)
    scheme = property(lambda self: f"as {Path(self.command.partition(' ')[0]).name} writes it")

    def check(self, config: Mapping[str, Any], device: str) -> None:
        """Raise RecipeError if the command lacks a placeholder, or if its program is not found."""
        if not all(part in self.command for part in ("{model}", "{out}")):
            raise RecipeError("command: must contain {model}, a folder to read, and {out}, to fill")
        if shutil.which(self.package) is None:
            raise RecipeError(f"command: no program {self.package}; install it or give its path")


def make(model: Path, out: Path, texts: Texts, settings: ByCommand) -> None:
    """Run the settings' command with its placeholders replaced; it writes the copy of ``model`` to
    the folder ``out``. Raises SystemExit if its exit code is not 0."""
    from safetensors.torch import save_file

    with TemporaryDirectory() as folder:
        file = Path(folder) / "texts.safetensors"
        save_file({} if texts is None else {"input_ids": texts}, file)
        words = shlex.split(settings.command)
        for name, path in {"{model}": model, "{out}": out, "{texts}": file}.items():
            words = [word.replace(name, str(path)) for word in words]
        if code := subprocess.run(words, check=False).returncode:
            raise SystemExit(f"exit code {code}")
