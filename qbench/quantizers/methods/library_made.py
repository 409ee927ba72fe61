"""What methods share whose library writes a quantized copy of the model. Imports no torch.

A maker is one file here: settings, a frozen dataclass, and one function beside it::

    make(model: Path, out: Path, texts: Tensor | None, settings) -> None

It reads the unquantized checkpoint in the folder ``model`` and writes one that transformers loads,
or one GGUF file, to the folder ``out``; ``texts`` are token ids, int64 [samples, length], None
without calibration. It runs in a process of its own, so a library may print, and may set what it
likes. ``qbench.made_copy`` calls it. From there on the folder is a published copy: loaded, audited
through its forward, its bits counted in its files.

If the checkpoint was trained with another attention function than softmax, transformers loads
``model`` with that function, by the key ``attn_implementation`` of its config.json.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, ClassVar

from qbench.errors import RecipeError
from qbench.quantizers.config import WeightSettings, settings


@settings
class LibraryMade(WeightSettings):
    """``package``: the Python package of the library, which ``install`` brings. ``softmax_only``:
    it computes softmax, whatever the checkpoint was trained with."""

    prequantized: ClassVar[bool] = True
    package: ClassVar[str]
    install: ClassVar[str]
    needs_gpu: ClassVar[bool] = False
    softmax_only: ClassVar[bool] = False

    @property
    def note(self) -> str:
        return f"made by {self.package}"

    def check(self, config: Mapping[str, Any], device: str) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise RecipeError(f"{self.name}: it needs {self.package}: {self.install}")
        if self.needs_gpu and device != "cuda":
            raise RecipeError(f"{self.name}: {self.package} makes it on a GPU only")
