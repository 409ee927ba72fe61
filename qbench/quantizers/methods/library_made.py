"""Settings of methods whose library writes a quantized copy of the model. Imports no torch.

A maker is one function, in the module that its settings name as ``backend``::

    make(model: Path, out: Path, texts: Tensor, settings) -> None

It reads the unquantized checkpoint in the folder ``model`` and writes one that transformers loads
to the folder ``out``; ``texts`` are token ids, int64 [samples, length]. It runs in a process of its
own, so a library may print, and may set what it likes. ``qbench.made_copy`` calls it. From there on
the folder is a published copy: loaded, audited through its forward, its bits counted in its files.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from qbench.errors import RecipeError
from qbench.quantizers.config import WeightSettings, settings
from qbench.quantizers.formats import WHOLE_ROW, shared_by
from qbench.quantizers.methods.weight_only import Grouped
from qbench.quantizers.registry import register

GROUP_SIZE = "weights that share a scale; default: 128, or the largest of 64, 32, 16, 8 that fits"


@settings
class LibraryMade(WeightSettings):
    """``package``: the Python package of the library, which ``install`` brings."""

    prequantized: ClassVar[bool] = True
    needs_calibration = True
    package: ClassVar[str]
    install: ClassVar[str]
    needs_gpu: ClassVar[bool] = False

    @property
    def note(self) -> str:
        return f"made by {self.package}"

    def check(self, config: Mapping[str, Any], device: str) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise RecipeError(f"{self.name}: it needs {self.package}: {self.install}")
        if self.needs_gpu and device != "cuda":
            raise RecipeError(f"{self.name}: {self.package} makes it on a GPU only")


@settings
class GroupedCopy(Grouped, LibraryMade):
    """Integers in groups that share a scale."""

    num_bits: Literal[2, 3, 4, 8]
    group_size: Annotated[int | None, Field(description=GROUP_SIZE)] = None

    @property
    def scheme(self) -> str:
        size = self.sizes[0] if self.group_size is None else self.group_size
        return f"int{self.num_bits} {shared_by(size)}"

    def shared_bits(self, rows: int, columns: int) -> float:
        return (16 + self.num_bits) / self.group_length(columns)


class ByGptqmodel(GroupedCopy):
    """Made by GPTQModel with its own defaults, but the size of groups."""

    backend: ClassVar[str] = "make_gptqmodel"
    package: ClassVar[str] = "gptqmodel"
    install: ClassVar[str] = "pip install gptqmodel"
    requirements = ("gptqmodel",)


@register("gptqmodel-{num_bits}bit", "GPTQ by GPTQModel, {num_bits} bits", num_bits=(2, 3, 4, 8))
@settings
class GptqmodelGptq(ByGptqmodel):
    method: ClassVar[str] = "gptqmodel"
    title: ClassVar[str] = "GPTQ by GPTQModel"


@register("gptaq-{num_bits}bit", "GPTAQ by GPTQModel, {num_bits} bits", num_bits=(2, 3, 4))
@settings
class Gptaq(ByGptqmodel):
    """GPTQ that also corrects for the error of earlier layers (Li et al. 2025)."""

    method: ClassVar[str] = "gptaq"
    title: ClassVar[str] = "GPTAQ"


@register("awq-{num_bits}bit", "AWQ by GPTQModel, {num_bits} bits", num_bits=4)
@settings
class Awq(ByGptqmodel):
    """Activation-aware weight quantization (Lin et al. 2023)."""

    method: ClassVar[str] = "awq"
    title: ClassVar[str] = "AWQ"


@register(
    "paroquant-{num_bits}bit", "ParoQuant by GPTQModel, {num_bits} bits; needs a GPU", num_bits=4
)
@settings
class Paroquant(ByGptqmodel):
    """Pairwise rotations before rounding; minutes per layer on a CPU, so a GPU is asked for."""

    method: ClassVar[str] = "paroquant"
    title: ClassVar[str] = "ParoQuant"
    needs_gpu: ClassVar[bool] = True


@register(
    "exl3-{num_bits}bit",
    "EXL3 by GPTQModel, {num_bits} bits; needs a GPU",
    num_bits=(2, 3, 4),
    group_size=WHOLE_ROW,
)
@settings
class Exl3(ByGptqmodel):
    """ExLlamaV3's trellis codes, which have no groups."""

    method: ClassVar[str] = "exl3"
    title: ClassVar[str] = "EXL3"
    needs_gpu: ClassVar[bool] = True
    group_size: Literal[-1] = WHOLE_ROW


class ByAutoRound(LibraryMade):
    """Made by Intel's auto-round (Cheng et al. 2023): rounding learned by signed gradients."""

    method: ClassVar[str] = "autoround"
    title: ClassVar[str] = "AutoRound"
    backend: ClassVar[str] = "make_autoround"
    package: ClassVar[str] = "auto_round"
    install: ClassVar[str] = "pip install -e '.[autoround]'"
    requirements = ("auto-round",)


@register("autoround-{num_bits}bit", "AutoRound, {num_bits} bits", num_bits=(2, 3, 4))
@settings
class AutoRound(ByAutoRound, GroupedCopy):
    iters: Annotated[int, Field(ge=0, description="gradient steps per block; 0: rounding")] = 200


@register(
    "autoround-{element}", "AutoRound in {element}, activations too", element=("nvfp4", "mxfp4")
)
@settings
class AutoRoundFp4(ByAutoRound):
    """Blocks of 16 (NVFP4) or 32 (MXFP4) E2M1 numbers that share a scale of 8 bits."""

    num_bits: ClassVar[int] = 4
    element: Literal["nvfp4", "mxfp4"]
    iters: Annotated[int, Field(ge=0, description="gradient steps per block; 0: rounding")] = 200

    @property
    def scheme(self) -> str:
        return f"{self.element}, activations too"

    def shared_bits(self, rows: int, columns: int) -> float:
        return 8 / 16 if self.element == "nvfp4" else 8 / 32
