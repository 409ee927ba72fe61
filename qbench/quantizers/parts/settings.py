"""What the parts of a quantized cell have in common: settings, and what can be asked of them.

A part is a frozen pydantic dataclass in a file of its own that registers its names, as a quantizer
of weights is. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from qbench.plugins import source_digest
from qbench.quantizers.quantizer import Progress, Quantizer
from qbench.record import Part

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from qbench.quantizers.calibration import Calibration
    from qbench.quantizers.quantizer import ActivationEvidence, KVEvidence


class PartSettings(ABC):
    """Settings of one part of a cell.

    ``mixes_batches``: a score depends on what it is batched with. ``sees_future``: a token's
    logits depend on later tokens. What is not declared here fails the audit.
    """

    method: ClassVar[str]  # groups names: "int8", "smoothquant"

    @property
    @abstractmethod
    def name(self) -> str:
        """As its registry has it."""

    @property
    def settings(self) -> dict[str, Any]:
        """All of it as plain JSON, for keys and records; with a digest of the file that it is
        written in, where that is none of qbench's own, whose digest every key holds."""
        stated = dataclasses.asdict(self)  # type: ignore[call-overload]
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in stated.items()}
        if not type(self).__module__.startswith("qbench."):
            plain["source"] = source_digest(type(self))
        return {"name": self.name, **plain}

    @property
    def needs_calibration(self) -> bool:
        return False

    @property
    def mixes_batches(self) -> bool:
        return False

    @property
    def sees_future(self) -> bool:
        return False

    def requirements(self) -> tuple[str, ...]:
        """Distributions whose versions can change what it gives, torch and transformers left
        out."""
        return ()

    def require(self) -> None:  # noqa: B027 (nothing to require is the usual case)
        """Raise UnavailableError where what it needs is not there."""

    def check(self, config: Mapping[str, Any], device: str) -> None:  # noqa: B027
        """Raise RecipeError for what a model of this configuration, or this device, cannot do;
        asked before any work starts. ``config``: a checkpoint's ``config.json``; ``device``:
        "cpu" or "cuda"."""

    def calibrate(
        self, model: PreTrainedModel, calibration: Calibration | None, progress: Progress
    ) -> dict[str, Tensor]:
        """What is to be stored for it, by any names. ``model`` is not yet quantized, and is left
        as it was."""
        return {}


class ActivationQuantizer(PartSettings):
    """Quantizes what products with weight matrices take in, the LM head's left out."""

    leave_out: tuple[str, ...]

    @property
    @abstractmethod
    def precision(self) -> Part: ...

    def resolved(
        self, weights: Quantizer, config: Mapping[str, Any], device: str
    ) -> tuple[ActivationQuantizer, str]:
        """Itself with every choice made that depends on ``weights``, on a model of this
        ``config.json`` or on ``device``, and a line on what was chosen, or none. Raises
        RecipeError for what cannot be."""
        return self, ""

    @abstractmethod
    def install(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        """Let ``model``, its weights quantized, quantize its activations; ``tensors`` are those
        of ``calibrate``, on the model's device."""

    @abstractmethod
    def evidence(self, model: nn.Module) -> Mapping[str, ActivationEvidence]:
        """What quantizes the input of each module, by the module's name."""


class KVQuantizer(PartSettings):
    """Quantizes the keys and values that attention reads."""

    @property
    @abstractmethod
    def precision(self) -> Part: ...

    @abstractmethod
    def install(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        """Let the attention of ``model`` read quantized keys and values."""

    @abstractmethod
    def evidence(self, model: nn.Module) -> Mapping[str, KVEvidence]:
        """What quantizes the cache of each attention module, by the module's name."""


class OutlierTreatment(PartSettings):
    """Changes a model to an equal one that is easier to quantize.

    ``calibrate`` gives what is stored. ``treat`` changes weights, before they are quantized;
    ``install`` puts in what has to be computed with each forward, after they are: as forward
    pre-hooks, which run before those of the activations, or in the attention.
    """

    def require_fit(self, kv: KVQuantizer | None) -> None:
        """Raise RecipeError where it cannot stand beside ``kv``."""

    @abstractmethod
    def treat(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        """Change the weights of ``model``, unquantized, in place."""

    def install(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
        """Put in what every forward has to compute."""
