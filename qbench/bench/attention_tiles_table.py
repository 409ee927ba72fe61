"""What ``qbench bench attention --tiles`` shows."""

from __future__ import annotations

from typing import Any

from qbench.bench.attention_prefill import step_table
from qbench.text import markdown

FORWARD = (4, 4096, 16)  # batch, length, heads
CURRENT = "as it is"


def tiles_table(results: dict[str, Any], best: int = 4) -> str:
    """In Markdown: the ``best`` tiles of each kernel and the one that it has, beside softmax as it
    is; all that did not compile or is wrong; and both kinds of backward kernels."""
    head = ("D", "kernel", "tile", "TFLOP/s", "× softmax", "error")
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in results["forward"]:
        found.setdefault((row["width"], row["kernel"]), []).append(row)
    cells = [
        [row["width"], row["kernel"], row["tile"], _number(row["rate"], 0),
         _number(row["beside"], 2), row["error"]]
        for rows in found.values()
        for place, row in enumerate(rows)
        if place < best or row["tile"] == CURRENT or row["rate"] is None
    ]  # fmt: skip
    lines = ["# Tiles of the attention kernels", ""]
    lines += [f"Forward, {_shape(FORWARD)}, bf16, causal.", ""]
    lines += [markdown.table(head, cells, align="rllrrr"), ""]
    head = ("B, T, H, D", "kernel", "Gluon TFLOP/s", "× softmax", "Triton TFLOP/s", "error")
    cells = [
        [_shape(row["shape"]), row["kernel"], _number(row["Gluon"], 0), _number(row["beside"], 2),
         _number(row["Triton"], 0), row["error"]]
        for row in results["backward"]
    ]  # fmt: skip
    lines += ["Backward, replayed as a CUDA graph.", ""]
    lines += [markdown.table(head, cells, align="llrrrr"), *step_table(results["steps"])]
    return "\n".join(lines) + "\n"


def _shape(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
