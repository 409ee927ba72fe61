"""A copy that a command of the user's writes, for a library that needs another environment.

{name: command, command: "uv run --with llmcompressor quantize.py {model} {out} {texts}",
 bits: 4, label: spinquant}
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from qbench.errors import RecipeError
from qbench.quantizers.config import settings
from qbench.quantizers.methods.library_made import LibraryMade
from qbench.quantizers.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register(
    "command", "a copy that a command of yours writes, in an environment of its own", ignore=((),)
)
@settings
class ByCommand(LibraryMade):
    """Made by ``command``. What it writes is audited like any copy."""

    method: ClassVar[str] = "command"
    title: ClassVar[str] = "Command"
    softmax_only: ClassVar[bool] = True

    command: Annotated[
        str,
        Field(
            description="with {model}, the folder of the unquantized checkpoint; {out}, the folder "
            "to write; and if it calibrates {texts}, a safetensors file of `input_ids`"
        ),
    ] = ""
    bits: Annotated[float, Field(ge=1, le=16, description="of a weight; its files are counted")] = 4
    runtime: Annotated[
        Literal["transformers", "llama.cpp"],
        Field(description="llama.cpp: it writes one GGUF file to {out}"),
    ] = "transformers"

    @property
    def package(self) -> str:
        return next(iter(shlex.split(self.command)), "the command")

    @property
    def needs_calibration(self) -> bool:
        return "{texts}" in self.command

    @property
    def num_bits(self) -> float:
        return self.bits

    @property
    def scheme(self) -> str:
        return f"as {Path(self.package).name} writes it"

    def shared_bits(self, rows: int, columns: int) -> float:
        return 0.0

    def check(self, config: Mapping[str, Any], device: str) -> None:
        if not all(part in self.command for part in ("{model}", "{out}")):
            raise RecipeError("command: write {model} and {out} in it")
        if shutil.which(self.package) is None:
            raise RecipeError(f"command: {self.package} is not installed")


def make(model: Path, out: Path, texts: Tensor | None, settings: ByCommand) -> None:
    from safetensors.torch import save_file

    with TemporaryDirectory() as folder:
        places = {
            "{model}": str(model),
            "{out}": str(out),
            "{texts}": f"{folder}/texts.safetensors",
        }
        if texts is not None:
            save_file({"input_ids": texts}, places["{texts}"])
        words = shlex.split(settings.command)
        for place, path in places.items():
            words = [word.replace(place, path) for word in words]
        if code := subprocess.run(words, check=False).returncode:
            raise SystemExit(f"{words[0]} ended with exit code {code}")
