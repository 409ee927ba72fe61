"""Results that are written while they are measured: whoever is stopped has what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qbench.files import write_atomically

Keep = Callable[[dict[str, Any]], None]
CUT = "\nStopped before the end: rows are missing.\n"


def kept_in(out: Path | None, table: Callable[[dict[str, Any]], str]) -> Keep:
    """What writes results to ``out`` (JSON, and their table beside it in Markdown), if there is
    one."""

    def keep(results: dict[str, Any]) -> None:
        if out is None or not (results["whole"] or out.suffix):  # /dev/stdout is written to once
            return
        write_atomically(out, (json.dumps(results, indent=1) + "\n").encode())
        if out.suffix:
            cut = "" if results["whole"] else CUT
            write_atomically(out.with_suffix(".md"), (table(results) + cut).encode())

    return keep


def gathered(
    about: Mapping[str, Any],
    parts: Sequence[tuple[str, Iterable[Any]]],
    keep: Keep,
    places: Mapping[str, Callable[[Any], Any]] | None = None,
) -> dict[str, Any]:
    """``about``, then the rows of each part as they come, each of which is kept; a part may go on
    after others. ``whole``: whether none is missing. ``places``: of parts, what their rows are
    ordered by where they do not come in order."""
    results = {**about, **{name: [] for name, _ in parts}, "whole": False}
    for name, rows in parts:
        for row in rows:
            results[name].append(row)
            if places and name in places:
                results[name].sort(key=places[name])
            keep(results)
    results["whole"] = True
    keep(results)
    return results
