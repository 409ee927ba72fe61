"""A cell's numbers by name, as trackers of experiments take them."""

from __future__ import annotations

import math

from qbench.records import Damage, Record


def scalars(record: Record) -> dict[str, float]:
    """Finite values by name, ``task/metric`` and ``audit/…``; accuracies are fractions."""
    found = {f"{score.task}/{score.metric}": score.value for score in record.scores}
    if record.audit is not None and record.quantized:
        found["audit/bits_per_weight"] = record.audit.bits_per_weight
        found["audit/weight_error"] = record.audit.weight_error
    if isinstance(record.damage, Damage):
        for task, one in record.damage.tasks.items():
            if one.distributions is not None:
                found[f"{task}/mean_kl"] = one.distributions.kl.mean
    return {name: value for name, value in found.items() if math.isfinite(value)}
