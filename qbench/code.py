"""A digest of those modules of qbench that can change a number. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

from qbench.files import file_digest

PACKAGE = Path(__file__).parent
QUANTIZING = (  # make a quantized model
    "attention",
    "checkpoints",
    "made_copy.py",
    "quantizers",
    "streaming.py",
)
SCORING = (*QUANTIZING, "cell.py", "cell_result.py", "evaluation", "metrics.py")  # and score it


@functools.cache
def code_digest(modules: tuple[str, ...] = SCORING) -> str:
    """Return the digest of ``modules``, files and folders of this qbench, as ``digest_of``."""
    return digest_of([PACKAGE / name for name in modules])


def digest_of(paths: Sequence[Path]) -> str:
    """Return the SHA-256 over names and bytes of Python files and of those in folders: 64
    hexadecimal digits."""
    total = hashlib.sha256()
    for path in paths:
        for module in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            name = module.relative_to(path.parent).as_posix()
            total.update(f"{name} {file_digest(module)}\n".encode())
    return total.hexdigest()
