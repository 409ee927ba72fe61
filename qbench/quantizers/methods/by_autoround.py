"""Copies by Intel's auto-round: rounding learned by signed gradients (Cheng et al. 2023)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from qbench.quantizers.config import settings
from qbench.quantizers.methods.library_made import CALIBRATED, LibraryMade, Texts, maker
from qbench.quantizers.methods.weight_only import GroupedIntegers

BY = "AutoRound by auto-round"


@settings
class ByAutoRound(LibraryMade):
    """Settings with the library's own defaults, but for the size of groups."""

    method, title, extra, requirements = "autoround", "AutoRound", "autoround", ("auto-round",)
    iters: int = Field(200, ge=0, description="gradient steps per block; 0: rounding")


@maker("autoround-{num_bits}bit", f"{BY}, {{num_bits}} bits; {CALIBRATED}", num_bits=(2, 3, 4))
@settings
class AutoRound(ByAutoRound, GroupedIntegers):
    """Integers in groups."""


@maker("autoround-{element}", f"{BY}, W4A4 {{element}}; {CALIBRATED}", element=("nvfp4", "mxfp4"))
@settings
class AutoRoundFp4(ByAutoRound):
    """Blocks of 16 (NVFP4) or 32 (MXFP4) E2M1 numbers that share a scale of 8 bits."""

    num_bits = 4
    element: Literal["nvfp4", "mxfp4"]
    scheme = property(lambda self: f"{self.element}, activations too")


def make(model: Path, out: Path, texts: Texts, settings: AutoRound | AutoRoundFp4) -> None:
    """Write a copy of ``model`` by auto-round to the folder ``out``. See the module
    ``library_made``."""
    scheme: dict[str, Any] = {"scheme": getattr(settings, "element", "").upper()}
    if isinstance(settings, AutoRound):
        scheme = {"bits": settings.num_bits, "group_size": settings.group_length(0) or -1}
    data = {"dataset": [row[None] for row in texts], "seqlen": texts.shape[1]}
    run(model, out, iters=settings.iters, nsamples=len(texts), **data, **scheme)


def run(model: Path, out: Path, **options: Any) -> None:
    """Quantize ``model`` by auto-round with ``options`` of its class, and save it in ``out``."""
    import auto_round
    import torch
    from transformers import AutoTokenizer

    options["device_map"] = "cuda" if torch.cuda.is_available() else "cpu"
    library = auto_round.AutoRound(str(model), AutoTokenizer.from_pretrained(model), **options)
    library.quantize_and_save(str(out), format="auto_round")
