"""bitsandbytes: 4-bit blocks (nf4, fp4) and LLM.int8."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from qbench.quantizers.names import register
from qbench.quantizers.quantizer import SETTINGS, Stored
from qbench.quantizers.weight_quantizer import WeightQuantizer
from qbench.record import Part, Precision

if TYPE_CHECKING:
    import torch
    from torch import nn

    from qbench.quantizers.linears import Plain, Tensors

BLOCK = 64  # the library's, for 4 bits: consecutive weights of the flattened matrix


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Bnb4(WeightQuantizer):
    """Blocks of 64 weights, 16 levels of a fixed table times the largest of the block."""

    method: ClassVar[str] = "bnb"
    title: ClassVar[str] = "BNB"

    bits: Literal[4]
    quant_type: Annotated[
        Literal["nf4", "fp4"],
        Field(description="table of levels: normal-float or floating point"),
    ] = "nf4"
    double_quant: Annotated[
        bool, Field(description="also quantize the blocks' scales, to 8 bits")
    ] = False

    @property
    def scheme(self) -> str:
        return f"{self.quant_type} in blocks of {BLOCK}"

    @property
    def note(self) -> str:
        return "bitsandbytes"

    def requirements(self) -> tuple[str, ...]:
        return ("bitsandbytes",)

    def shared_bits(self, rows: int, columns: int) -> float:
        return 32 / BLOCK

    def store(self, name: str, layer: nn.Linear) -> Tensors:
        from qbench.quantizers import bnb_layers

        return bnb_layers.blocks(layer.weight.detach().contiguous(), self)

    def rebuild(self, shape: Plain, tensors: Tensors) -> nn.Module:
        from qbench.quantizers import bnb_layers

        return bnb_layers.linear4(shape, tensors, self)

    def read(self, module: nn.Module) -> Stored | None:
        from qbench.quantizers import bnb_layers

        return bnb_layers.read4(module)


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class Bnb8(WeightQuantizer):
    """LLM.int8: rows of int8 weights, int8 activations, outlier columns apart.

    Outlier columns are chosen over the whole batch, so a score depends on its batch-mates, and a
    token's logits on later tokens.
    """

    method: ClassVar[str] = "bnb"
    title: ClassVar[str] = "BNB"
    mixes_batches: ClassVar[bool] = True
    sees_future: ClassVar[bool] = True

    bits: Literal[8]
    threshold: Annotated[
        float,
        Field(
            ge=0,
            le=65536,  # the largest activation of float16
            description="activations above this are outliers, computed unquantized; 0: no outliers",
        ),
    ] = 6.0

    @property
    def scheme(self) -> str:
        return "int8 per row"

    @property
    def precision(self) -> Precision:
        return Precision(
            weights=Part(bits=8, scheme=self.scheme),
            activations=Part(bits=8, scheme="int8 per token, outlier columns apart"),
        )

    @property
    def note(self) -> str:
        return "bitsandbytes"

    def requirements(self) -> tuple[str, ...]:
        return ("bitsandbytes",)

    def shared_bits(self, rows: int, columns: int) -> float:
        return 32 / columns

    def agreement(self, dtype: torch.dtype) -> tuple[float, float]:
        """Products are float16 whatever the dtype, and activations are rounded to 127 steps."""
        import torch

        return (5e-3 if dtype == torch.bfloat16 else 2e-3), 5e-2

    def store(self, name: str, layer: nn.Linear) -> Tensors:
        from qbench.quantizers import bnb_layers

        return bnb_layers.rows(layer.weight.detach().contiguous())

    def rebuild(self, shape: Plain, tensors: Tensors) -> nn.Module:
        from qbench.quantizers import bnb_layers

        return bnb_layers.linear8(shape, tensors, self)

    def read(self, module: nn.Module) -> Stored | None:
        from qbench.quantizers import bnb_layers

        return bnb_layers.read8(module)


register("bnb-4bit", Bnb4, "bitsandbytes nf4 or fp4, blocks of 64", bits=4)
register("bnb-8bit", Bnb8, "bitsandbytes LLM.int8, activations quantized too", bits=8)
