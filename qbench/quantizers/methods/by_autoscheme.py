"""Copies by auto-round whose bits differ by layer, as its AutoScheme chooses them."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field

from qbench.quantizers.config import settings
from qbench.quantizers.methods.by_autoround import ByAutoRound, run
from qbench.quantizers.methods.library_made import CALIBRATED, Texts, maker
from qbench.quantizers.methods.weight_only import GroupedIntegers


@maker("autoscheme", f"AutoRound, bits of each layer by AutoScheme; {CALIBRATED}", num_bits=8)
@settings
class AutoScheme(ByAutoRound, GroupedIntegers):
    """Integers in groups, of 2, 3, 4 or 8 bits by layer: the least change of the loss by the
    library's estimate, under ``bits`` on average, scales counted."""

    bits: float = Field(4.5, gt=2, lt=16, description="average bits per weight, scales counted")
    scheme = property(lambda self: f"integers of 2 to 8 bits by layer, {self.bits:g} on average")


def make(model: Path, out: Path, texts: Texts, settings: AutoScheme) -> None:
    """Write a copy of ``model`` by auto-round's AutoScheme to the folder ``out``. See the
    module ``library_made``."""
    import auto_round
    from auto_round.schemes import QuantizationScheme
    from transformers import AutoTokenizer

    # It reads text only from a file, and the text is tokenized again
    file, length = out / "texts.json", texts.shape[1] * 7 // 8
    file.write_text(json.dumps(AutoTokenizer.from_pretrained(model).batch_decode(texts)))
    groups = settings.group_length(0) or -1
    options = [QuantizationScheme(bits=bits, group_size=groups) for bits in (2, 3, 4, 8)]
    # It warns of less text than 128 × 1024 tokens if 2 bits are among the options
    scheme = auto_round.AutoScheme(
        avg_bits=settings.bits, options=options, seqlen=min(length, 1024), nsamples=len(texts)
    )
    data = {"dataset": str(file), "seqlen": length, "nsamples": len(texts)}
    run(model, out, iters=settings.iters, scheme=scheme, **data)
    file.unlink()
