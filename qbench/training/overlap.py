"""Paragraphs that share a run of words with an evaluation text are left out. Imports no torch.

Thirteen words, lower-cased, without punctuation: the overlap that GPT-3's authors looked for
(Brown et al. 2020, arXiv 2005.14165, appendix C), here by the paragraph.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qbench.errors import DataError

WORDS = 13
WORD = re.compile(r"[^\W_]+")


@dataclass(kw_only=True, slots=True)
class Overlap:
    """Hashes of every run of ``WORDS`` words of the evaluation texts."""

    runs: set[int] = field(default_factory=set)
    left_out: int = 0  # paragraphs so far

    @classmethod
    def of(cls, folder: Path) -> Overlap:
        """All texts of the JSON Lines files below ``folder``. Raises DataError for none."""
        files = sorted(folder.rglob("*.jsonl"))
        if not files:
            raise DataError(f"{folder}: no *.jsonl files of evaluation texts in it")
        found = cls()
        for path in files:
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, start=1):
                    try:
                        row = json.loads(line)
                    except ValueError:
                        raise DataError(f"{path}:{number}: not JSON") from None
                    for text in _texts(row):
                        found.runs.update(_runs(text))
        return found

    def without(self, texts: Iterable[str]) -> Iterator[str]:
        """``texts`` without the paragraphs (lines) that share a run; empty ones fall away."""
        for text in texts:
            lines = text.split("\n")
            kept = [line for line in lines if self.runs.isdisjoint(_runs(line))]
            self.left_out += len(lines) - len(kept)
            if len(kept) == len(lines):
                yield text
            elif any(line.strip() for line in kept):
                yield "\n".join(kept)


def _runs(text: str) -> Iterator[int]:
    words = [word.lower() for word in WORD.findall(text)]
    return (hash(tuple(words[i : i + WORDS])) for i in range(len(words) - WORDS + 1))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
