"""Copies by Intel's auto-round: rounding learned by signed gradients (Cheng et al. 2023), and bits
by layer as its AutoScheme chooses them."""

from __future__ import annotations

import json
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


@maker("autoscheme", f"AutoRound, bits of each layer by AutoScheme; {CALIBRATED}", num_bits=8)
@settings
class AutoScheme(ByAutoRound, GroupedIntegers):
    """Integers in groups, of 2, 3, 4 or 8 bits by layer: the least change of the loss by the
    library's estimate, under ``bits`` on average, scales counted."""

    bits: float = Field(4.5, gt=2, lt=16, description="average bits per weight, scales counted")
    scheme = property(lambda self: f"integers of 2 to 8 bits by layer, {self.bits:g} on average")


def make(
    model: Path, out: Path, texts: Texts, settings: AutoRound | AutoRoundFp4 | AutoScheme
) -> None:
    """Write a copy of ``model`` by auto-round to the folder ``out``: see ``library_made``."""
    import auto_round
    import torch
    from transformers import AutoTokenizer

    tokenizer, file = AutoTokenizer.from_pretrained(model), out / "texts.json"
    options: dict[str, Any] = {"dataset": [row[None] for row in texts], "seqlen": texts.shape[1]}
    if isinstance(settings, AutoScheme):
        # It reads text only from a file, and the text is tokenized again
        file.write_text(json.dumps(tokenizer.batch_decode(texts)))
        options = {"dataset": str(file), "seqlen": texts.shape[1] * 7 // 8}
        options["scheme"] = _auto_scheme(settings, options["seqlen"], len(texts))
    elif isinstance(settings, AutoRound):
        options |= {"bits": settings.num_bits, "group_size": settings.group_length(0) or -1}
    else:
        options["scheme"] = settings.element.upper()
    options |= {"iters": settings.iters, "nsamples": len(texts)}
    options["device_map"] = "cuda" if torch.cuda.is_available() else "cpu"
    library = auto_round.AutoRound(str(model), tokenizer, **options)
    library.quantize_and_save(str(out), format="auto_round")
    file.unlink(missing_ok=True)


def _auto_scheme(settings: AutoScheme, length: int, samples: int) -> Any:
    """Return auto-round's search of bits by layer, on ``samples`` texts of ``length`` tokens."""
    import auto_round
    from auto_round.schemes import QuantizationScheme

    groups = settings.group_length(0) or -1
    options = [QuantizationScheme(bits=bits, group_size=groups) for bits in (2, 3, 4, 8)]
    # It warns of less text than 128 × 1024 tokens if 2 bits are among the options
    return auto_round.AutoScheme(
        avg_bits=settings.bits, options=options, seqlen=min(length, 1024), nsamples=samples
    )
