"""Figures → SVG text and files."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qbench.files import write_atomically
from qbench.report.figures import Drawn
from qbench.report.style import svg


@dataclass(frozen=True, kw_only=True, slots=True)
class Plate:
    """A figure that was drawn, and the files that it was written to."""

    name: str
    section: str
    caption: str
    svg: str = field(repr=False)
    paths: tuple[Path, ...]


def plates(
    makers: Iterable[Callable[[], list[Drawn]]], folder: Path, formats: Sequence[str]
) -> list[Plate]:
    """Draw the figures and write ``folder/<name>.<format>``."""
    found = []
    for draw in makers:
        for one in draw():
            text = svg(one.figure, name=one.name)
            found.append(
                Plate(
                    name=one.name,
                    section=one.section,
                    caption=one.caption,
                    svg=text,
                    paths=tuple(_write(one, text, folder, format) for format in formats),
                )
            )
    return found


def _write(one: Drawn, text: str, folder: Path, format: str) -> Path:
    path = folder / f"{one.name}.{format}"
    if format == "svg":
        write_atomically(path, text.encode())
    else:
        payload = io.BytesIO()
        metadata = {"CreationDate": None} if format == "pdf" else None
        one.figure.savefig(payload, format=format, metadata=metadata)
        write_atomically(path, payload.getvalue())
    return path
