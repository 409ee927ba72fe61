"""What ``qbench bench attention`` times, called once before in processes side by side: its kernels
are then compiled, on disk, when it is timed."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

from qbench.bench.attention_decode import decode, packed
from qbench.bench.attention_prefill import FLEX, Row, prefill
from qbench.bench.attention_timing import once

PATIENCE_S = 120  # after the checks: one that does not end is timed after others, whose rows stay


def settle_cache() -> None:
    """Kernels of this process and those that it starts are kept in Triton's folder, as they are
    anyway: torch.compile would name another for the rest of a process, and what is compiled after
    that no other process would find."""
    import triton

    os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)


def warm_ups(
    rows: Sequence[Row],
    quick: bool,
    only: Collection[str],
) -> list[tuple[Any, ...]]:
    """Arguments of :func:`warm_up`, what takes longest first. ``rows``: of prefill. Rows of one
    kernel and head dimension are called in a row: side by side, each would compile the same."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for shape, name in rows:
        if name == FLEX:  # compiled for each shape
            groups[f"{name} {shape}", 0] = [(shape, name)]
        elif name.startswith("qbench "):
            groups.setdefault((name, shape[3]), []).append((shape, name))
    ordered = sorted(groups.values(), key=lambda group: group[0][1] != FLEX)
    others = [] if only else [(packed, once, quick)]
    others += [(decode, once, quick, only, 1.0)]
    return others + [(prefill, group, once) for group in ordered]


def warm_up(measure: Callable[..., Any], *arguments: Any) -> None:
    """``measure(*arguments)``, for what it compiles. What fails here fails again where it is timed
    and is said there, so this process only ends: it may have broken its context on the GPU, and
    nothing must be checked in it."""
    try:
        failed = any("error" in row for row in measure(*arguments))
    except Exception:  # whatever it is: the timed call says it
        failed = True
    if failed:
        os._exit(1)
