"""What a quantizer is: one object that everything else asks. Imports no torch.

A method is a frozen pydantic dataclass of its settings, derived from ``Quantizer`` (or from
``WeightQuantizer``, where it puts modules of its own in place of linear layers), in a file of its
own, which registers its names. Whatever needs torch is imported inside methods.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ConfigDict

from qbench.plugins import source_digest
from qbench.record import Precision

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from qbench.quantizers.calibration import Calibration

SETTINGS = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
Progress = Callable[[str, float], None]  # what is at work, and the share that is done


@dataclass(frozen=True, kw_only=True)
class Made:
    """What is to be stored, and a line on how it came about.

    ``tensors``: ``<module>/<part>`` belongs to a module that the quantizer builds, any other name
    is that of a parameter or buffer of the model, such as a norm's weight.
    """

    tensors: dict[str, Tensor]
    note: str


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One weight matrix as it is stored.

    ``tensors``: all that is kept for it, by name; biases and constant tables left out.
    ``dequantize`` gives the matrix [out, in] that they stand for. ``groups`` rearranges a matrix
    [out, in] into [groups, weights in a group]; weights in a group share their levels.
    """

    tensors: Mapping[str, Tensor]
    dequantize: Callable[[], Tensor]
    groups: Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What quantized values can be, said so that who did not quantize them can find them again.

    ``kind``: ``symmetric`` (codes −(2^(bits−1)−1) … 2^(bits−1)−1 times a scale), ``asymmetric``
    (codes 0 … 2^bits−1 less a zero point, times a scale), or the name of a floating-point format
    of the elements (``e4m3``, ``e2m1``). ``scale_format``: what a scale is rounded to (``float32``,
    ``e8m0``, ``e4m3``).
    """

    kind: str
    bits: float
    scale_format: str = "float32"


@dataclass(frozen=True, kw_only=True)
class ActivationEvidence:
    """How the input of one module is quantized, as far as the audit must be told.

    ``scale_of``: what shares a scale: ``group`` values along the last axis (−1: all of them), the
    whole ``tensor``, or ``text``: it is fixed at ``scale``, with ``zero`` in an asymmetric grid.
    With ``e4m3`` scales ``tensor`` and ``text`` speak of the scale above those of the groups.
    ``inside``: the module itself quantizes, so that no hook sees its quantized input.
    """

    grid: Grid
    scale_of: str
    group: int = -1
    scale: Tensor | None = None
    zero: Tensor | None = None
    inside: bool = False


@dataclass(frozen=True, kw_only=True)
class KVEvidence:
    """How the cache of one attention module is quantized: what the audit measures it with.

    ``bits`` of a code, ``scale_bits`` of all that is stored beside the codes of one scale;
    ``floating``: the codes are e4m3; ``key_group``: tokens whose keys share a scale in each
    channel; ``channels`` of a head and token that share one otherwise, None: all;
    ``whole_tensor``: everything of a layer does. ``keep_first``, ``keep_recent``: tokens that stay
    unquantized.
    """

    bits: int
    scale_bits: int
    floating: bool = False
    symmetric: bool = True
    key_group: int = 1
    channels: int | None = None
    whole_tensor: bool = False
    keep_first: int = 0
    keep_recent: int = 0


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the audit judges. ``weights``: by the name of the module that multiplies by them;
    ``activations``: by the name of the module that takes them in; ``kv_cache``: by the name of
    the attention module; ``heads``: by the same name, which of its heads stay, [heads] of 1 and
    0, where some are pruned."""

    weights: Mapping[str, Stored] = field(default_factory=dict)
    activations: Mapping[str, ActivationEvidence] = field(default_factory=dict)
    kv_cache: Mapping[str, KVEvidence] = field(default_factory=dict)
    heads: Mapping[str, Tensor] = field(default_factory=dict)


class Quantizer(ABC):
    """The settings of one quantizer and what can be asked of it.

    ``method`` groups names (``gptq``); ``title`` is what tables write. ``mixes_batches``: a score
    depends on what it is batched with; ``sees_future``: a token's logits on later tokens;
    ``treats``: weights are changed to equal ones before they are quantized, by ``treat``.
    ``threads``: of the processor while quantizing on it.
    """

    method: ClassVar[str]
    title: ClassVar[str]
    needs_calibration: ClassVar[bool] = False
    mixes_batches: ClassVar[bool] = False
    sees_future: ClassVar[bool] = False
    treats: ClassVar[bool] = False
    may_change_nothing: ClassVar[bool] = (
        False  # logits equal to the unquantized model's are no sign
    )
    chosen: str = ""
    compute_dtype: str  # of the model that it is given: bfloat16, float16 or float32
    threads: int
    leave_out: tuple[str, ...]

    @property
    @abstractmethod
    def name(self) -> str:
        """As the registry has it."""

    @property
    @abstractmethod
    def precision(self) -> Precision: ...

    @property
    def settings(self) -> dict[str, Any]:
        """All of it as plain JSON, for keys and records; with a digest of the file that it is
        written in, where that is none of qbench's own, whose digest every key holds."""
        stated = dataclasses.asdict(self)  # type: ignore[call-overload]
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in stated.items()}
        if not type(self).__module__.startswith("qbench."):
            plain["source"] = source_digest(type(self))
        return {"name": self.name, "method": self.method, **plain}

    @property
    def amplifies_rounding(self) -> bool:
        """Whether what a model computes is rounded in coarse steps while it runs. Then two
        computations that are equally right, but round otherwise, may differ by as much as
        quantization costs: a value near the border of two codes moves by a whole step."""
        precision = self.precision
        return precision.activations is not None or precision.kv_cache is not None

    def requirements(self) -> tuple[str, ...]:
        """Distributions whose versions can change what it gives, torch and transformers left out
        (they are part of every cell)."""
        return ()

    def require(self) -> None:  # noqa: B027 (nothing to require is the usual case)
        """Raise UnavailableError where what it needs is not there."""

    def resolved(self, config: Mapping[str, Any], device: str) -> Quantizer:
        """Itself with every choice made that depends on a model of this ``config.json`` or on
        ``device`` ("cpu" or "cuda"); ``chosen`` says what was. Raises RecipeError for what cannot
        be. Asked once, when a run is planned."""
        return self

    def check(self, config: Mapping[str, Any], device: str) -> None:  # noqa: B027
        """Raise RecipeError for what a model of this ``config.json``, or this ``device`` ("cpu" or
        "cuda"), cannot do; asked before any work starts."""

    def check_layers(self, shapes: Mapping[str, tuple[int, int]]) -> None:  # noqa: B027
        """Raise QuantizationError, naming the layer, for weights [out, in] that it does not take;
        asked of what a checkpoint's headers say, and of the model when it is quantized."""

    @property
    def stages(self) -> tuple[tuple[str, Quantizer], ...]:
        """What is made and kept on disk by itself, in order, with what its tensors' names begin
        with for ``apply``: cells that share a stage make it once."""
        return (("", self),)

    @property
    def of_weights(self) -> Quantizer:
        """What quantizes the weights: itself, or a part of it."""
        return self

    @property
    def activations_left_out(self) -> tuple[str, ...]:
        """Layers whose inputs its settings leave unquantized, as ``leave_out`` names them."""
        return ()

    def weights_alone(self, model: nn.Module) -> AbstractContextManager[None]:
        """Within it a layer's forward is its product and nothing else: no activation is changed.
        The audit reads weights off it."""
        return nullcontext()

    def treat(self, original: PreTrainedModel, quantized: PreTrainedModel) -> None:  # noqa: B027
        """Change ``original``, in place, to the model that ``quantized`` has its weights from:
        as an outlier treatment has made it."""

    @abstractmethod
    def make(
        self, model: PreTrainedModel, calibration: Calibration | None, progress: Progress
    ) -> Made:
        """Quantize ``model``: its weights are consumed, its modules stay in their places.

        Raises QuantizationError where the method refuses the model.
        """

    @abstractmethod
    def apply(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> PreTrainedModel:
        """The quantized model: ``model``, unquantized, with ``tensors`` of ``make`` put in."""

    @abstractmethod
    def evidence(self, model: nn.Module) -> Evidence:
        """What of ``model`` is quantized by this method; the audit measures it."""

    def error_bound(self) -> float:
        """The largest relative error ‖W' − W‖ / ‖W‖ of one matrix that can be right."""
        raise NotImplementedError

    def bits_bounds(self, rows: int, columns: int) -> tuple[float, float]:
        """Fewest and most bits that a weight of a matrix [rows, columns] may take, all that is
        stored for it counted."""
        raise NotImplementedError

    def agreement(self, dtype: torch.dtype) -> tuple[float, float]:
        """How far, relative, a forward may lie from the product with the stored weights: on rows
        of the identity, and on random inputs."""
        raise NotImplementedError
