"""Cells that quantize one part of another cell alone: weights, activations or the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qbench.comparison.lines import Comparison, Line
from qbench.records import Record

PART_HEADS = {"weights": "weights", "activations": "activations", "kv": "KV cache"}
TREATMENT = "outliers"


Labels = Mapping[str, Mapping[str, Any]]


def labelled_parts(comparison: Comparison) -> Labels:
    """By quantizer: the settings of each part."""
    return {record.quantizer: _parts(record) for record in comparison.records.values()}


def parts_alone(comparison: Comparison, labels: Labels, line: Line) -> dict[str, Line]:
    """By part: the line of the same metric whose quantizer is that part of ``line``'s and nothing
    else, with equal settings. Empty where ``line`` has one part, or the grid has fewer than two."""
    own = labels.get(line.quantizer, {})
    kinds = [kind for kind in PART_HEADS if kind in own]
    if len(kinds) < 2:
        return {}
    treated = {TREATMENT: own[TREATMENT]} if TREATMENT in own else {}
    found = {}
    for kind in kinds:
        label = next(
            (n for n, parts in labels.items() if parts == {kind: own[kind], **treated}), ""
        )
        for other in comparison.lines:
            if (other.quantizer, other.task, other.metric) == (label, line.task, line.metric):
                found[kind] = other
    return found if len(found) > 1 else {}


def _parts(record: Record) -> Mapping[str, Any]:
    """The settings of what a cell quantizes, by part; of its outlier treatment, too."""
    settings = record.key_parts.get("quantizer")
    if not isinstance(settings, Mapping) or not record.quantized:
        return {}
    if not isinstance(settings.get("weights"), Mapping):
        return {"weights": settings}
    kinds = (*PART_HEADS, TREATMENT)
    parts = {kind: settings[kind] for kind in kinds if settings.get(kind) is not None}
    if record.precision.weights is None:
        del parts["weights"]
    return parts
