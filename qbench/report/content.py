"""The report's tables and notes, in the order of the page."""

from __future__ import annotations

from qbench.comparison.lines import Comparison
from qbench.report.effects import damages, differences, scores
from qbench.report.inputs import independence, inputs
from qbench.report.kv_cache import kv_caches
from qbench.report.proof import audit, divergence, divergence_notes, provenance, stages
from qbench.report.seeds import seed_tables
from qbench.report.settings import quantizers, settings
from qbench.report.table import DataTable


def data_tables(comparison: Comparison, *, published: str | None = None) -> list[DataTable]:
    """All tables that have rows: the differences of damages first, which the claim is about."""
    # With several trainings of each kind their means are told, not each against the first.
    first = (
        seed_tables(comparison)
        if comparison.seeds
        else [*differences(comparison), *damages(comparison), *scores(comparison, published)]
    )
    return [
        *first,
        *divergence(comparison),
        *stages(comparison),
        *audit(comparison),
        *inputs(comparison),
        *kv_caches(comparison),
        *independence(comparison),
        *quantizers(comparison),
        *settings(comparison),
        *provenance(comparison),
    ]


def notes(comparison: Comparison) -> dict[str, list[str]]:
    """Section → what it cannot show, and why."""
    found = {"distributions": divergence_notes(comparison)}
    if comparison.unquantized is None:
        found["damage"] = ["No damage: the recipe has no unquantized cell to compare with."]
    elif not any(line.damages for line in comparison.lines):
        found["damage"] = ["No damage: no quantized cell can be compared with its unquantized one."]
    elif not comparison.others:
        found["damage"] = ["No difference of damages: there is one checkpoint."]
    return {section: lines for section, lines in found.items() if lines}
