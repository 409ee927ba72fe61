"""What a token of the KV cache takes, below the tables of quantizers that quantize it."""

from __future__ import annotations

from qbench.comparison.lines import Comparison
from qbench.records import KVAudit
from qbench.tables.table import Table


def cache_notes(comparison: Comparison, table: Table) -> list[str]:
    """One line, where any quantizer of ``table`` has a KV cache of few bits."""
    quantizers = dict.fromkeys(row.line.quantizer for row in table.rows)
    told = {name: _bytes(comparison, table, name) for name in quantizers}
    told = {name: text for name, text in told.items() if text}
    if not told:
        return []
    parts = "; ".join(f"{name} {text}" for name, text in told.items())
    return [
        f"KV cache, bytes a token of all layers, scales and unquantized tokens counted: {parts}."
    ]


def _bytes(comparison: Comparison, table: Table, quantizer: str) -> str:
    """``4,992 of 18,432``: of each checkpoint where they differ."""
    found = [kv_audit(comparison, f"{checkpoint}/{quantizer}") for checkpoint in table.checkpoints]
    texts = [
        f"{one.bytes_per_token:,.0f} of {one.unquantized_bytes_per_token:,.0f} ({one.tokens:,} "
        "tokens)"
        for one in found
        if one is not None
    ]
    return " / ".join(dict.fromkeys(texts))


def kv_audit(comparison: Comparison, cell: str) -> KVAudit | None:
    record = comparison.records.get(cell)
    return record.audit.kv_cache if record and record.audit else None
