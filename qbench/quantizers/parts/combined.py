"""A quantizer in parts: weights, activations, KV cache, each with its own, or none; and what is
done about outliers before. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from qbench.quantizers.names import parse
from qbench.quantizers.parts.settings import (
    ActivationQuantizer,
    KVQuantizer,
    OutlierTreatment,
    PartSettings,
)
from qbench.quantizers.quantizer import Evidence, Made, Progress, Quantizer
from qbench.record import Precision

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from qbench.quantizers.calibration import Calibration
    from qbench.quantizers.heads import HeadPruning

UNQUANTIZED = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}
TREATMENT = "qbench_treatment"  # attribute of a quantized model: tensors of its outlier treatment
WEIGHTS = "weights"


@dataclass(frozen=True, kw_only=True)
class Combined(Quantizer):
    """Several parts, of which at least one quantizes something.

    Outliers are treated first, then activations and KV cache calibrated on the treated model,
    whose weights are still whole, then the weights quantized.
    """

    weights: Quantizer
    activations: ActivationQuantizer | None = None
    kv: KVQuantizer | None = None
    outliers: OutlierTreatment | None = None
    prune_heads: HeadPruning | None = None
    chosen: str = ""  # what was chosen where the recipe left it open, in a line

    @property
    def parts(self) -> dict[str, PartSettings]:
        """Those beside the weights that there are, in the order in which they are applied."""
        found = {
            "outliers": self.outliers,
            "activations": self.activations,
            "kv": self.kv,
            "prune_heads": self.prune_heads,
        }
        return {kind: part for kind, part in found.items() if part is not None}

    @property
    def name(self) -> str:
        """``gptq-4bit+int8-token+kv-int4-token``: weights that are not quantized have no place."""
        named = [self.weights.name] if self.weights.precision.quantized else []
        prefixes = {"kv": "kv-", "prune_heads": "heads-"}
        named += [f"{prefixes.get(k, '')}{part.name}" for k, part in self.parts.items()]
        return "+".join(named)

    @property
    def method(self) -> str:  # type: ignore[override]
        return "+".join(word for word, _ in self._kinds())

    @property
    def title(self) -> str:  # type: ignore[override]
        title = " + ".join(title for _, title in self._kinds())
        return title[0].upper() + title[1:]

    def _kinds(self) -> Iterator[tuple[str, str]]:
        if self.weights.precision.quantized:
            yield self.weights.method, self.weights.title
        if self.activations:
            yield "activations", "activations"
        if self.kv:
            yield "kv", "KV cache"
        if self.prune_heads:
            yield "heads", "heads pruned"

    @property
    def precision(self) -> Precision:
        inner = self.weights.precision
        return Precision(
            weights=inner.weights,
            activations=self.activations.precision if self.activations else inner.activations,
            kv_cache=self.kv.precision if self.kv else None,
            heads=self.prune_heads.scheme if self.prune_heads else None,
        )

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "method": self.method,
            WEIGHTS: self.weights.settings,
            **{kind: part.settings for kind, part in self.parts.items()},
        }

    @property
    def compute_dtype(self) -> str:  # type: ignore[override]
        return self.weights.compute_dtype

    @property
    def threads(self) -> int:  # type: ignore[override]
        return self.weights.threads

    @property
    def leave_out(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.weights.leave_out

    @property
    def stages(self) -> tuple[tuple[str, Quantizer], ...]:
        """Weights that are not treated are those of any other cell. What is calibrated beside them
        comes first, for quantizing the weights consumes the model."""
        if self.outliers or not self.weights.precision.quantized:
            return (("", self),)
        plain = parse(UNQUANTIZED[self.compute_dtype])
        rest = replace(self, weights=plain)
        calibrated = (("", rest),) if rest.needs_calibration else ()
        return (*calibrated, (f"{WEIGHTS}:", self.weights))

    @property
    def of_weights(self) -> Quantizer:
        return self.weights

    @property
    def activations_left_out(self) -> tuple[str, ...]:
        return self.activations.leave_out if self.activations else ()

    @property
    def needs_calibration(self) -> bool:  # type: ignore[override]
        parts = self.parts.values()
        return self.weights.needs_calibration or any(p.needs_calibration for p in parts)

    @property
    def mixes_batches(self) -> bool:  # type: ignore[override]
        return self.weights.mixes_batches or any(p.mixes_batches for p in self.parts.values())

    @property
    def sees_future(self) -> bool:  # type: ignore[override]
        return self.weights.sees_future or any(p.sees_future for p in self.parts.values())

    @property
    def treats(self) -> bool:  # type: ignore[override]
        return self.outliers is not None

    def requirements(self) -> tuple[str, ...]:
        named = [n for part in self.parts.values() for n in part.requirements()]
        return tuple(dict.fromkeys([*self.weights.requirements(), *named]))

    def require(self) -> None:
        for part in (self.weights, *self.parts.values()):
            part.require()

    def resolved(self, config: Mapping[str, Any], device: str) -> Combined:
        if self.activations is None:
            return self
        activations, chosen = self.activations.resolved(self.weights, config, device)
        return replace(self, activations=activations, chosen=chosen)

    def check(self, config: Mapping[str, Any], device: str) -> None:
        for part in (self.weights, *self.parts.values()):
            part.check(config, device)

    def make(
        self, model: PreTrainedModel, calibration: Calibration | None, progress: Progress
    ) -> Made:
        tensors: dict[str, dict[str, Tensor]] = {}
        if self.outliers:
            import copy

            # apply() treats the model that it is given, so that this one must stay as it is
            model = copy.deepcopy(model)
            tensors["outliers"] = self.outliers.calibrate(model, calibration, progress)
            self.outliers.treat(model, tensors["outliers"])
            self.outliers.install(model, tensors["outliers"])
        for kind, part in self.parts.items():
            if kind != "outliers":
                tensors[kind] = part.calibrate(model, calibration, progress)
        made = self.weights.make(model, calibration, progress)
        tensors[WEIGHTS] = made.tensors
        return Made(
            tensors={f"{k}:{name}": t for k, named in tensors.items() for name, t in named.items()},
            note=", ".join([made.note, *(part.name for part in self.parts.values())]),
        )

    def apply(self, model: PreTrainedModel, tensors: dict[str, Tensor]) -> PreTrainedModel:
        sorted_out: dict[str, dict[str, Tensor]] = {}
        for name in list(tensors):
            kind, _, rest = name.partition(":")
            sorted_out.setdefault(kind, {})[rest] = tensors.pop(name)
        if self.outliers:
            self.outliers.treat(model, sorted_out.get("outliers", {}))
        model = self.weights.apply(model, sorted_out.get(WEIGHTS, {}))
        for kind, part in self.parts.items():
            part.install(model, sorted_out.get(kind, {}))  # type: ignore[attr-defined]
        setattr(model, TREATMENT, sorted_out.get("outliers", {}))
        return model

    def treat(self, original: PreTrainedModel, quantized: PreTrainedModel) -> None:
        if self.outliers:
            tensors = getattr(quantized, TREATMENT)
            self.outliers.treat(original, tensors)
            self.outliers.install(original, tensors)

    @property
    def may_change_nothing(self) -> bool:  # type: ignore[override]
        """Heads that gave nothing change nothing when they go."""
        return set(self.parts) == {"prune_heads"} and not self.weights.precision.quantized

    def evidence(self, model: nn.Module) -> Evidence:
        from qbench.quantizers import heads

        inner = self.weights.evidence(model)
        return Evidence(
            weights=inner.weights,
            activations=self.activations.evidence(model) if self.activations else inner.activations,
            kv_cache=self.kv.evidence(model) if self.kv else {},
            heads=heads.evidence(model) if self.prune_heads else {},
        )

    def weights_alone(self, model: nn.Module) -> AbstractContextManager[None]:
        from qbench.quantizers.activations.inputs import weights_alone

        return weights_alone(model)

    def error_bound(self) -> float:
        return self.weights.error_bound()

    def bits_bounds(self, rows: int, columns: int) -> tuple[float, float]:
        return self.weights.bits_bounds(rows, columns)

    def agreement(self, dtype: torch.dtype) -> tuple[float, float]:
        return self.weights.agreement(dtype)
