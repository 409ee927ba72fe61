"""Copies by Intel's auto-round: rounding learned by signed gradients (Cheng et al. 2023)."""

from __future__ import annotations

import json
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


@register(
    "autoscheme",
    "AutoRound, bits of each layer by AutoScheme; calibrated, minutes on a GPU",
    num_bits=8,  # at most
    ignore=((),),
)
@settings
class AutoScheme(ByAutoRound, GroupedIntegers):
    """Integers in groups, of 2, 3, 4 or 8 bits by layer: the least change of the loss by the
    library's estimate, under ``bits`` on average, scales counted."""

    bits: Annotated[
        float, Field(gt=2, lt=16, description="average bits per weight, scales counted")
    ] = 4.5

    @property
    def scheme(self) -> str:
        return f"integers of 2 to 8 bits by layer, {self.bits:g} on average"


def make(
    model: Path, out: Path, texts: Tensor, settings: AutoRound | AutoRoundFp4 | AutoScheme
) -> None:
    import auto_round
    import torch
    from transformers import AutoTokenizer

    tokenizer, dataset = AutoTokenizer.from_pretrained(model), [row[None] for row in texts]
    length, group_size = texts.shape[1], getattr(settings, "group_size", None) or -1
    scheme: dict[str, Any] = {"scheme": getattr(settings, "element", "").upper()}
    if isinstance(settings, AutoScheme):  # which reads text from a file alone
        from auto_round.schemes import QuantizationScheme

        dataset, length = str(out / "texts.json"), length * 7 // 8  # as text it has other tokens
        Path(dataset).write_text(json.dumps(tokenizer.batch_decode(texts)))
        options = [QuantizationScheme(bits=n, group_size=group_size) for n in (2, 3, 4, 8)]
        # It warns of less text than 128 × 1024 tokens if 2 bits are among the options
        scheme["scheme"] = auto_round.AutoScheme(
            avg_bits=settings.bits, options=options, seqlen=min(length, 1024), nsamples=len(texts)
        )
    elif isinstance(settings, AutoRound):
        scheme = {"bits": settings.num_bits, "group_size": group_size}
    library = auto_round.AutoRound(
        str(model),
        tokenizer,
        dataset=dataset,
        iters=settings.iters,
        nsamples=len(texts),
        seqlen=length,
        device_map="cuda" if torch.cuda.is_available() else "cpu",
        **scheme,
    )
    library.quantize_and_save(str(out), format="auto_round")
    (inner,) = [config.parent for config in out.rglob("config.json")]
    for file in list(inner.iterdir()) if inner != out else ():
        file.rename(out / file.name)  # it writes a folder named by the scheme
    if inner != out:
        inner.rmdir()
    (out / "texts.json").unlink(missing_ok=True)
