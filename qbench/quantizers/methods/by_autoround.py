"""Copies by Intel's auto-round: rounding learned by signed gradients (Cheng et al. 2023)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from qbench.quantizers.config import settings
from qbench.quantizers.methods.library_made import LibraryMade
from qbench.quantizers.methods.weight_only import GroupedIntegers
from qbench.quantizers.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@settings
class ByAutoRound(LibraryMade):
    """Made with the library's own defaults, but for the size of groups."""

    method: ClassVar[str] = "autoround"
    title: ClassVar[str] = "AutoRound"
    package: ClassVar[str] = "auto_round"
    install: ClassVar[str] = "pip install -e '.[autoround]'"
    requirements = ("auto-round",)
    needs_calibration = True

    iters: Annotated[int, Field(ge=0, description="gradient steps per block; 0: rounding")] = 200


@register(
    "autoround-{num_bits}bit",
    "AutoRound by auto-round, {num_bits} bits; calibrated, minutes on a GPU",
    num_bits=(2, 3, 4),
    ignore=((),),
)
@settings
class AutoRound(ByAutoRound, GroupedIntegers):
    """Integers in groups."""


@register(
    "autoround-{element}",
    "AutoRound in {element}, inputs too; calibrated, minutes on a GPU",
    element=("nvfp4", "mxfp4"),
    ignore=((),),
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


def make(model: Path, out: Path, texts: Tensor, settings: AutoRound | AutoRoundFp4) -> None:
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
