"""A digest of those of our own modules that a training runs. Imports no torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from qbench.code import code_digest, digest_of


def training_code() -> str:
    """Of those that change numbers anywhere, and of this room: 64 hexadecimal digits."""
    return hashlib.sha256(
        f"{code_digest()} {digest_of([Path(__file__).parent])}".encode()
    ).hexdigest()
