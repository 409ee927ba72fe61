"""The KV caches of few bits, as the audit measured them."""

from __future__ import annotations

from collections.abc import Iterator

from qbench.comparison.lines import Comparison
from qbench.records import KVModuleAudit
from qbench.report.costs import sound
from qbench.report.table import Cell, DataTable, build, plain


def kv_caches(comparison: Comparison) -> Iterator[DataTable]:
    head = ["Cell", "Format", "Bytes a token", "Unquantized", "Bits a value", "Levels",
            "Key error", "Key error, worst layer", "Value error", "Value error, worst layer",
            "Clipped"]  # fmt: skip
    rows = []
    for record in sound(comparison):
        found = record.audit.kv_cache if record.audit else None
        part = record.precision.kv_cache
        if found is None or part is None:
            continue
        simulated = ", simulated" if part.simulated else ""
        keys = max(found.modules, key=lambda one: one.key_error, default=None)
        values = max(found.modules, key=lambda one: one.value_error, default=None)
        rows.append(
            [
                Cell(text=record.cell),
                Cell(text=f"{part.scheme}{simulated}"),
                plain(found.bytes_per_token, "{:,.0f}"),
                plain(found.unquantized_bytes_per_token, "{:,.0f}"),
                plain(found.bits_per_value, "{:.2f}"),
                plain(found.levels, "{:d}"),
                plain(found.key_error, "{:.4f}"),
                _named(keys, keys.key_error if keys else None),
                plain(found.value_error, "{:.4f}"),
                _named(values, values.value_error if values else None),
                plain(found.clipped, "{:.2%}"),
            ]
        )
    if rows:
        caption = (
            "What attention read of its keys and values while a probe ran, and the memory of one "
            "sequence as long as the checkpoint's context, all layers together: scales, and tokens "
            "that stay unquantized, are counted. Errors: ‖K′ − K‖ / ‖K‖ over quantized tokens. "
            "Levels: most distinct values that share a scale."
        )
        yield build("kv-cache", "audit", "KV cache", caption, head, rows, keys=1)


def _named(module: KVModuleAudit | None, error: float | None) -> Cell:
    cell = plain(error, "{:.4f}")
    return Cell(text=cell.text, sort=cell.sort, title=module.name if module else "")
