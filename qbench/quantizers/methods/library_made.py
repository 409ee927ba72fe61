"""Settings of methods whose library writes a quantized copy of the model. Imports no torch.

A maker is one function of the settings' module, or of the one that they name as ``backend``::

    make(model: Path, out: Path, texts: Tensor, settings) -> None

It reads the unquantized checkpoint in the folder ``model`` and writes one that transformers loads
to the folder ``out``; ``texts`` are token ids, int64 [samples, length]. It runs in a process of its
own, so a library may print, and may set what it likes. ``qbench.made_copy`` calls it. From there on
the folder is a published copy: loaded, audited through its forward, its bits counted in its files.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from qbench.errors import RecipeError
from qbench.quantizers.config import WeightSettings, settings
from qbench.quantizers.formats import WHOLE_ROW, shared_by
from qbench.quantizers.methods.weight_only import Grouped
from qbench.quantizers.registry import register

if TYPE_CHECKING:
    from torch import Tensor

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
        return f"int{self.num_bits} {shared_by(self.group_size or self.sizes[0])}"

    def shared_bits(self, rows: int, columns: int) -> float:
        return (16 + self.num_bits) / self.group_length(columns)


ALL_BITS, FEW_BITS = (2, 3, 4, 8), (2, 3, 4)
NEED_GPU = ("paroquant", "exl3")


@settings
class ByGptqmodel(GroupedCopy):
    """Made by GPTQModel with its own defaults, but the size of groups."""

    package: ClassVar[str] = "gptqmodel"
    install: ClassVar[str] = "pip install gptqmodel"
    requirements = ("gptqmodel",)

    method: Literal["gptqmodel", "gptaq", "awq", "paroquant", "exl3"]

    @property
    def title(self) -> str:
        return GPTQMODEL[self.method][0]

    @property
    def needs_gpu(self) -> bool:
        return self.method in NEED_GPU


# Title, widths, and other options that are fixed, by method. GPTAQ also corrects for the error of
# earlier layers (Li et al. 2025). AWQ is activation-aware (Lin et al. 2023). ParoQuant rotates
# before rounding, minutes per layer on a CPU. EXL3 has trellis codes, without groups.
GPTQMODEL: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "gptqmodel": ("GPTQ by GPTQModel", ALL_BITS, {}),
    "gptaq": ("GPTAQ", FEW_BITS, {}),
    "awq": ("AWQ", (4,), {}),
    "paroquant": ("ParoQuant", (4,), {}),
    "exl3": ("EXL3", FEW_BITS, {"group_size": WHOLE_ROW}),
}
for _method, (_title, _bits, _fixed) in GPTQMODEL.items():
    _about = f"{_title.split()[0]} by GPTQModel, {{num_bits}} bits"
    _about += "; needs a GPU" if _method in NEED_GPU else ""
    register(f"{_method}-{{num_bits}}bit", _about, num_bits=_bits, method=_method, **_fixed)(
        ByGptqmodel
    )


@settings
class ByAutoRound(LibraryMade):
    """Made by Intel's auto-round (Cheng et al. 2023): rounding learned by signed gradients."""

    method: ClassVar[str] = "autoround"
    title: ClassVar[str] = "AutoRound"
    package: ClassVar[str] = "auto_round"
    install: ClassVar[str] = "pip install -e '.[autoround]'"
    requirements = ("auto-round",)

    iters: Annotated[int, Field(ge=0, description="gradient steps per block; 0: rounding")] = 200


@register("autoround-{num_bits}bit", "AutoRound, {num_bits} bits", num_bits=(2, 3, 4))
@settings
class AutoRound(ByAutoRound, GroupedCopy):
    """Integers in groups."""


@register(
    "autoround-{element}", "AutoRound in {element}, activations too", element=("nvfp4", "mxfp4")
)
@settings
class AutoRoundFp4(ByAutoRound):
    """Blocks of 16 (NVFP4) or 32 (MXFP4) E2M1 numbers that share a scale of 8 bits."""

    num_bits: ClassVar[int] = 4
    element: Literal["nvfp4", "mxfp4"]

    @property
    def scheme(self) -> str:
        return f"{self.element}, activations too"

    def shared_bits(self, rows: int, columns: int) -> float:
        return 8 / 16 if self.element == "nvfp4" else 8 / 32


def make(model: Path, out: Path, texts: Tensor, settings: ByGptqmodel | ByAutoRound) -> None:
    """Write a copy of the checkpoint in ``model`` to ``out``, in the library's own format."""
    by_gptqmodel = isinstance(settings, ByGptqmodel)
    (_by_gptqmodel if by_gptqmodel else _by_autoround)(model, out, texts, settings)


def _by_gptqmodel(model: Path, out: Path, texts: Tensor, settings: Any) -> None:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it stops on fewer
    import torch
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.quantization.config import FORMAT, METHOD, GPTAQConfig

    method: dict[str, dict[str, Any]] = {
        "gptqmodel": {},
        "gptaq": {"gptaq": GPTAQConfig()},
        "awq": {"method": METHOD.AWQ, "format": FORMAT.GEMM},
        "paroquant": {"method": METHOD.PARO, "format": FORMAT.PAROQUANT},
        "exl3": {"method": METHOD.EXL3, "format": FORMAT.EXL3},
    }
    groups = {} if settings.method == "exl3" else {"group_size": settings.group_length(0) or -1}
    config = QuantizeConfig(bits=settings.num_bits, **groups, **method[settings.method])
    rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in texts]
    on_cpu = settings.method == "awq" and not torch.cuda.is_available()
    quantized = GPTQModel.load(str(model), config)
    quantized.quantize(rows, batch_size=1, backend=BACKEND.AWQ_TORCH if on_cpu else BACKEND.AUTO)
    quantized.save(str(out))


def _by_autoround(model: Path, out: Path, texts: Tensor, settings: Any) -> None:
    import auto_round
    import torch
    from transformers import AutoTokenizer

    scheme: dict[str, Any] = (
        {"scheme": settings.element.upper()}
        if isinstance(settings, AutoRoundFp4)
        else {"bits": settings.num_bits, "group_size": settings.group_length(0) or -1}
    )
    library = auto_round.AutoRound(
        str(model),
        AutoTokenizer.from_pretrained(model),
        dataset=[row[None] for row in texts],
        iters=settings.iters,
        nsamples=len(texts),
        seqlen=texts.shape[1],
        device_map="cuda" if torch.cuda.is_available() else "cpu",
        **scheme,
    )
    library.quantize_and_save(str(out), format="auto_round")
    (inner,) = [config.parent for config in out.rglob("config.json")]
    for file in list(inner.iterdir()) if inner != out else ():
        file.rename(out / file.name)  # it writes a folder named by the scheme
    if inner != out:
        inner.rmdir()
