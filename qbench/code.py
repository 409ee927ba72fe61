"""A digest of those of our own modules that can change a number. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

# What these decide stands in the key itself (recipe, plan), or comes after the numbers. Every
# other module counts, a new one too until it is named here.
WITHOUT_EFFECT = (
    "__init__.py", "__main__.py", "analyses.py", "api.py", "cache.py", "cli", "code.py",
    "errors.py", "files.py", "hub.py", "plan.py", "plugins.py",
    "recipe.py", "recipe_yaml.py", "registry.py", "records.py",
    "passkey.py",
    "progress.py", "store.py",
    "analysis",  # whose digest its own keys hold
    "bench", "cluster", "comparison", "export", "gate", "machine", "published",
    "report", "running", "show", "tables", "text", "training",
)  # fmt: skip


@functools.cache
def code_digest() -> str:
    """SHA-256 over names and sources of the modules that can change a number, of this qbench."""
    return digest_of(Path(__file__).parent)


def digest_of(package: Path) -> str:
    """``code_digest`` of the qbench in the folder ``package``: 64 hexadecimal digits."""
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] not in WITHOUT_EFFECT:
            source = hashlib.sha256(path.read_bytes()).hexdigest()
            total.update(f"{name.as_posix()} {source}\n".encode())
    return total.hexdigest()
