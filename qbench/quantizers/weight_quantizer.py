"""What methods share that put modules of their own in place of linear layers. Imports no torch."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from qbench.errors import QuantizationError
from qbench.quantizers.patterns import left_out
from qbench.quantizers.quantizer import SETTINGS, Evidence, Made, Progress, Quantizer, Stored
from qbench.record import Part, Precision

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel

    from qbench.quantizers.calibration import Calibration
    from qbench.quantizers.linears import Plain, Tensors

WHOLE_ROW = -1
WIDEST = 65536  # group; a longer row is one group as WHOLE_ROW
GroupSize = Annotated[
    Annotated[int, Field(ge=8, le=WIDEST)] | Literal[-1],
    Field(description="weights that share a scale, along a row; -1 is the whole row"),
]
ROUNDING_BOUND = {2: 1.0, 3: 0.7, 4: 0.4, 8: 0.05}


def pattern(text: str) -> str:
    if not re.fullmatch(r"[\w.*?\[\]!-]+", text):
        raise ValueError("a part of names, such as experts, or a pattern, such as '*.o_proj'")
    return text


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class WeightQuantizer(Quantizer):
    """Every linear layer but the LM head, each replaced by a module that holds fewer bits.

    Embeddings and the LM head stay as they are, as is usual in the field. A subclass gives
    ``bits``, ``scheme``, ``shared_bits`` and, for one layer, ``store``, ``rebuild`` and ``read``.
    """

    compute_dtype: Annotated[
        Literal["bfloat16", "float16", "float32"],
        Field(description="dtype of the unquantized weights, activations and matrix products"),
    ] = "bfloat16"
    leave_out: Annotated[
        tuple[Annotated[str, AfterValidator(pattern)], ...],
        Field(
            strict=False,
            description="weight matrices to leave unquantized: parts of their names, such as "
            "experts, or patterns over whole names, such as '*.o_proj'",
        ),
    ] = ()
    threads: Annotated[
        int,
        Field(
            ge=1,
            le=1024,
            description="processor threads while quantizing on a CPU: sums depend on their number",
        ),
    ] = 1

    @property
    def name(self) -> str:
        return f"{self.method}-{self.bits}bit"  # type: ignore[attr-defined]

    @property
    @abstractmethod
    def scheme(self) -> str:
        """The format of a stored weight in the field's words: ``int4 in groups of 128``."""

    @property
    def precision(self) -> Precision:
        return Precision(weights=Part(bits=self.bits, scheme=self.scheme))  # type: ignore[attr-defined]

    @abstractmethod
    def shared_bits(self, rows: int, columns: int) -> float:
        """Bits that a weight takes beside its code: its share of scales, zeros and indices."""

    def store(self, name: str, layer: nn.Linear) -> Tensors:
        """What is to be stored for one layer, computed where the layer is."""
        raise NotImplementedError

    @abstractmethod
    def rebuild(self, shape: Plain, tensors: Tensors) -> nn.Module:
        """The module that runs in a layer's place, over what is stored."""

    @abstractmethod
    def read(self, module: nn.Module) -> Stored | None:
        """What ``module`` holds; None if it is none of this method's."""

    def check_layer(self, name: str, rows: int, columns: int) -> None:
        """Raise QuantizationError, naming the layer, for a shape that the method does not take."""

    def check_layers(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        spared = left_out(shapes, self.leave_out)
        for name, (rows, columns) in shapes.items():
            if name not in spared:
                self.check_layer(name, rows, columns)

    def check_shapes(self, model: nn.Module) -> None:
        """Raise QuantizationError, naming the layer, for shapes that the method does not take."""
        from qbench.quantizers.linears import linears

        self.check_layers({n: (m.out_features, m.in_features) for n, m in linears(model).items()})

    @property
    def note(self) -> str:
        """What did it, in a few words."""
        return self.method

    def make(
        self, model: PreTrainedModel, calibration: Calibration | None, progress: Progress
    ) -> Made:
        from qbench.quantizers.linears import linears_of

        self.check_shapes(model)
        layers, tensors = linears_of(model, self), {}
        for done, (name, layer) in enumerate(layers.items()):
            progress(name, done / len(layers))
            tensors |= {f"{name}/{k}": v for k, v in self.store(name, layer).items()}
        return Made(tensors=tensors, note=self.note)

    def apply(self, model: PreTrainedModel, tensors: dict) -> PreTrainedModel:
        from qbench.quantizers.linears import linears_of, plain

        modules: dict[str, Tensors] = {}
        for name in list(tensors):
            module, _, part = name.partition("/")
            modules.setdefault(module, {})[part] = tensors.pop(name)
        layers = linears_of(model, self)
        if set(modules) != set(layers):
            missing = ", ".join(sorted(set(layers) ^ set(modules)))
            raise QuantizationError(f"{self.name}: not what the model has: {missing}")
        for name, layer in layers.items():
            model.set_submodule(name, self.rebuild(plain(layer), modules.pop(name)))
        return model

    def evidence(self, model: nn.Module) -> Evidence:
        found = {name: self.read(module) for name, module in model.named_modules()}
        return Evidence(weights={name: stored for name, stored in found.items() if stored})

    def error_bound(self) -> float:
        """Rounding evenly spaced levels gives √(step² / 12) (Bennett 1948): for Gaussian weights
        in groups of 128, whose largest is about 2.7 standard deviations, 0.52, 0.22, 0.10 and 0.006
        of the weights at 2, 3, 4 and 8 bits. The bounds are at least twice that, for heavy tails
        and long groups; 1 is as bad as a matrix of zeros."""
        return ROUNDING_BOUND[self.bits]  # type: ignore[attr-defined]

    def bits_bounds(self, rows: int, columns: int) -> tuple[float, float]:
        """The code; its share of scales, zeros and an index of the columns; one in a hundred, and
        padding that small layers feel."""
        code = float(self.bits)  # type: ignore[attr-defined]
        most = 1.01 * (code + self.shared_bits(rows, columns) + 32 / rows) + 512 / (rows * columns)
        return 0.99 * code, most

    def agreement(self, dtype: torch.dtype) -> tuple[float, float]:
        import torch

        identity = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}
        random = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
        return identity[dtype], random[dtype]

    def group_length(self, columns: int) -> int:
        """Weights in a group along a row of ``columns``."""
        size = self.group_size  # type: ignore[attr-defined]
        return columns if size == WHOLE_ROW else size


def groups_of(size: int) -> str:
    """In the words of a scheme."""
    return "per row" if size == WHOLE_ROW else f"in groups of {size}"
