"""Keep digests of large files, so that no file of weights is read twice for its digest."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from qbench.errors import OutputError
from qbench.files import cache_folder, content_key, write_atomically

LARGE = 16 * 2**20  # bytes; a smaller file is read again
SETTLED_SECONDS = 2.0  # a file may change again within the resolution of its time


def kept_digest(path: Path, compute: Callable[[Path], str]) -> str:
    """Return ``compute(path)``, or what it gave before for the same file.

    A file is the same if its path, device, inode, size and times of change are. The digests are in
    the folder ``digests`` of the cache. Raises OSError if the file cannot be read.
    """
    stat = path.stat()
    if stat.st_size < LARGE:
        return compute(path)
    identity = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    name = content_key({"path": os.path.realpath(path), "by": compute.__name__})
    kept = cache_folder() / "digests" / f"{name[:16]}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        before = json.loads(kept.read_bytes())
        if before["identity"] == identity:
            return str(before["digest"])
    digest = compute(path)
    if time.time() - max(stat.st_mtime, stat.st_ctime) > SETTLED_SECONDS:
        with suppress(OutputError, OSError):  # a cache that cannot be written keeps nothing
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(kept, json.dumps({"identity": identity, "digest": digest}).encode())
    return digest
