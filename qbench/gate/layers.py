"""What the gate asks and answers, as data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from qbench.comparison.changes import Change
from qbench.errors import some
from qbench.records import Record
from qbench.statistics import Worsening
from qbench.store import Store

Outcome = Literal["pass", "fail", "inconclusive"]
Inconclusive = Literal["pass", "fail"]
AUDIT = "audit"  # stands for the task in questions about the audit


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One question of the gate. Without ``task`` the cell as a whole could not be asked."""

    cell: str
    task: str
    metric: str
    outcome: Outcome
    reason: str
    margin: float | None = None  # percentage points for accuracies, else per cent
    given: bool = False  # whether the user stated the margin
    worse: Worsening | None = None  # in the margin's units
    change: Change | None = None

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.cell, self.task, self.metric) if part)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """All questions and the answer. ``exit_code``: 0 pass, 1 fail; unusable input raises (2)."""

    results: str
    baseline: str
    gates: tuple[Gate, ...]
    notes: tuple[str, ...]
    inconclusive: Inconclusive  # what an inconclusive question counts as

    @property
    def outcome(self) -> Outcome:
        outcomes = {gate.outcome for gate in self.gates}
        if "fail" in outcomes:
            return "fail"
        return "inconclusive" if "inconclusive" in outcomes else "pass"

    @property
    def exit_code(self) -> int:
        counted = self.inconclusive if self.outcome == "inconclusive" else self.outcome
        return 0 if counted == "pass" else 1

    def count(self, outcome: Outcome) -> int:
        return sum(gate.outcome == outcome for gate in self.gates)


def measured(cell: str, metric: str, rise: float, margin: float, reason: str) -> Gate:
    """A question about what the audit measured, which is known and no estimate: worse by ``rise``
    per cent."""
    return Gate(
        cell=cell,
        task=AUDIT,
        metric=metric,
        outcome="pass" if rise <= margin + ROUNDING else "fail",
        reason=reason,
        margin=margin,
        worse=Worsening(estimate=rise, low=rise, high=rise),
    )


def whole(cell: str, reason: str) -> Gate:
    """A cell that fails as a whole."""
    return Gate(cell=cell, task="", metric="", outcome="fail", reason=reason)


DIGEST_DIGITS = 16  # 64 bits tell layers apart
SMALLEST = 1e-4  # an error below this is rounding: a rise is not counted from less
SAME = 1e-4  # relative: measures of the same bits agree to rounding
NAMED = 3
ROUNDING = 1e-9  # per cent

Layers = Mapping[str, "Layer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """What the audit measured of one layer. ``digest``: of what is stored, "" if not known."""

    error: float
    gain: float | None
    levels: int
    bits: float
    digest: str


def layers_of(record: Record) -> Layers:
    """Quantized layers by name; none for an unquantized cell."""
    if record.audit is None or not record.quantized:
        return {}
    return {
        one.name: Layer(
            error=one.weight_error,
            gain=one.gain,
            levels=one.levels,
            bits=one.bits_per_weight,
            digest=one.digest[:DIGEST_DIGITS],
        )
        for one in record.audit.modules
    }


def read_layers(store: Store) -> dict[str, Layers]:
    """Of every cell that has a record."""
    return {record.cell: layers_of(record) for record in store.records()}


def layer_gates(cell: str, old: Layers, new: Layers, margins: Mapping[str, float]) -> list[Gate]:
    """No layer measures worse than the baseline's by more than its margin, in per cent.

    Nothing more is asked of layers with the same stored bits that measure the same: a forward
    that reads them wrongly does not. Other bits alone are no failure: processors and library
    versions round differently.
    """
    if not old:
        return []
    lost = [name for name in old if name not in new]
    if lost:
        return [whole(cell, f"no longer quantized, or not audited: {some(lost, NAMED)}")]
    same = [name for name, layer in old.items() if _same(layer, new[name])]
    if len(same) == len(old):
        return [
            Gate(
                cell=cell,
                task=AUDIT,
                metric="layers",
                outcome="pass",
                reason=f"same bits in all {len(old)} layers",
            )
        ]
    told = f"; same bits in {len(same)} of {len(old)} layers" if same else ""
    gates = []
    for metric, rise in RISES.items():
        found = {name: rise(layer, new[name]) for name, layer in old.items()}
        rises = {name: value for name, value in found.items() if value is not None}
        if rises:
            worst = max(rises, key=lambda name: rises[name])
            measure = metric.removeprefix("layer_")
            before, after = getattr(old[worst], measure), getattr(new[worst], measure)
            seen = f"{worst} {before:.4g} in the baseline, {after:.4g} now{told}"
            beyond = [name for name, value in rises.items() if value > margins[metric] + ROUNDING]
            if beyond:
                ordered = sorted(beyond, key=lambda name: -rises[name])
                reason = f"beyond the margin: {some(ordered, NAMED)}; worst: {seen}"
            elif rises[worst] < 0.005:
                reason = f"none of {len(rises)} layers is worse{told}"
            else:
                reason = f"within the margin in all {len(rises)} layers; worst: {seen}"
            gates.append(measured(cell, metric, rises[worst], margins[metric], reason))
    return gates


# By how many per cent a layer measures worse than the baseline's; None where it is not known.
RISES: dict[str, Callable[[Layer, Layer], float | None]] = {
    "layer_error": lambda old, new: 100 * (new.error - old.error) / max(old.error, SMALLEST),
    "layer_gain": lambda old, new: (
        None if None in (old.gain, new.gain) else 100 * abs(new.gain - old.gain)
    ),
    "layer_levels": lambda old, new: 100 * (old.levels - new.levels) / max(old.levels, 1),
    "layer_bits": lambda old, new: 100 * (new.bits - old.bits) / old.bits if old.bits else 0.0,
}


def _same(old: Layer, new: Layer) -> bool:
    return (
        bool(old.digest)
        and old.digest == new.digest
        and all(
            math.isclose(getattr(old, one) or 0.0, getattr(new, one) or 0.0, rel_tol=SAME)
            for one in ("error", "gain", "levels", "bits")
        )
    )
