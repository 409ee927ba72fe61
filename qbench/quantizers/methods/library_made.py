"""Settings that makers share: methods whose library writes a copy of the model. Imports no torch.

A library's makers are one file here: settings, frozen dataclasses under the decorator ``maker``,
and a function ``make(model: Path, out: Path, texts: Texts, settings)``. It reads the unquantized
checkpoint in the folder ``model`` and writes one that transformers or GPTQModel loads, or one GGUF
file, to the folder ``out`` or to a folder in it; ``texts`` are token ids. ``qbench.made_copy``
calls it in a separate process, so a library may print and set what it likes. The folder is then a
published copy: loaded, audited by its forward, its bits counted.

If the checkpoint was trained with another attention function than softmax, transformers loads
``model`` with that function, by the key ``attn_implementation`` of its config.json."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from qbench.errors import RecipeError
from qbench.quantizers.config import WeightSettings, settings
from qbench.quantizers.registry import register

CALIBRATED = "calibrated, minutes on a GPU"
Texts = Any  # Tensor, int64 [samples, length]; None without calibration
maker = partial(register, ignore=((),))  # a library quantizes all layers


@settings
class LibraryMade(WeightSettings):
    """Settings of a maker. The first of ``requirements`` is the library's distribution; ``extra``:
    of qbench's, which installs it. ``softmax_only``: the library computes softmax alone."""

    prequantized: ClassVar[bool] = True
    needs_calibration = True
    extra: ClassVar[str] = ""
    needs_gpu: ClassVar[bool] = False
    softmax_only: ClassVar[bool] = False
    misfit: ClassVar[str] = "take another size, type or method"
    package = property(lambda self: self.requirements[0].replace("-", "_"))  # as Python imports it
    note = property(lambda self: f"made by {self.package}")

    def check(self, config: Mapping[str, Any], device: str) -> None:
        """Raise RecipeError if the library, or a GPU that it needs, is missing."""
        if importlib.util.find_spec(self.package) is None:
            install = f"-e '.[{self.extra}]'" if self.extra else self.requirements[0]
            raise RecipeError(
                f"{self.name}: {self.package} is not installed; pip install {install}"
            )
        if self.needs_gpu and device != "cuda":
            raise RecipeError(f"{self.name}: {self.package} needs a GPU here; run it on one")
