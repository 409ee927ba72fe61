"""Whether Python must compile large libraries anew each time that a process starts.

pip compiles what it installs; uv does not unless asked to, and many container images set
PYTHONDONTWRITEBYTECODE. With both, every process compiles thousands of modules.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import cache_from_source, find_spec
from pathlib import Path

LARGE = ("torch", "transformers", "numpy", "pandas", "triton")


def compiled_anew(names: Sequence[str] = LARGE) -> list[str]:
    """Those of the installed packages ``names`` of which most modules have no bytecode, where
    Python keeps none either. Imports none of them."""
    return [name for name in names if (folder := _folder(name)) and _lacks_bytecode(folder)]


def remedy(names: Sequence[str]) -> str:
    """One line on packages that ``compiled_anew`` found."""
    folders = sorted({str(folder.parent) for name in names if (folder := _folder(name))})
    return (
        f"{', '.join(names)}: installed without bytecode, and Python keeps none "
        f"({_reason()}): every start takes seconds longer; once: "
        f"{Path(sys.executable).name} -m compileall -q -j 0 {' '.join(folders)}"
    )


def _reason() -> str:
    return "PYTHONDONTWRITEBYTECODE" if sys.dont_write_bytecode else "the folder is read-only"


def _folder(name: str) -> Path | None:
    spec = find_spec(name)
    return (
        Path(spec.origin).parent if spec is not None and spec.has_location and spec.origin else None
    )


def _lacks_bytecode(folder: Path) -> bool:
    modules = list(folder.glob("*.py"))
    kept = [module for module in modules if Path(cache_from_source(str(module))).exists()]
    return 2 * len(kept) < len(modules) and not _keeps(folder)


def _keeps(folder: Path) -> bool:
    if sys.dont_write_bytecode:
        return False
    if sys.pycache_prefix is not None:
        return True
    kept = folder / "__pycache__"
    return os.access(kept if kept.exists() else folder, os.W_OK)
