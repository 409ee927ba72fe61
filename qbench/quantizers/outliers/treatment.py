"""What a treatment of outliers is: one object that everything else asks. Imports no torch.

It changes an unquantized model into another that computes the same function, in exact arithmetic,
with activations that are easier to round.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from qbench.quantizers.calibration import Calibration
    from qbench.quantizers.quantizer import Progress


class OutlierTreatment(ABC):
    """The settings of one treatment. ``title`` is what tables write."""

    name: ClassVar[str]
    title: ClassVar[str]
    needs_calibration: ClassVar[bool] = False

    @property
    def settings(self) -> dict[str, Any]:
        """All of it as plain JSON, for keys and records."""
        stated = dataclasses.asdict(self)  # type: ignore[call-overload]
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in stated.items()}
        return {"name": self.name, **plain}

    @abstractmethod
    def make(
        self, model: PreTrainedModel, calibration: Calibration | None, progress: Progress
    ) -> dict[str, Tensor]:
        """What is to be stored, small: scales or signs. ``model`` is left as it was.

        Raises QuantizationError for a model of a class that the treatment does not know.
        """

    @abstractmethod
    def apply(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> None:
        """Change the weights of ``model``, unquantized, in place, as ``tensors`` of ``make`` say.

        Sums are taken in float64 and rounded once to the dtype of each weight.
        """
