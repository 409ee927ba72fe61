"""Files that qbench writes: whole or not at all, and refused before work begins. No torch.

A temporary name says which process of which host writes it, so that what a killed process left
behind can be told from what another is writing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from safetensors import SafetensorError

from qbench.errors import OutputError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

NAME = r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}"  # of what a user names: it may become a folder
PART = 1 << 20  # bytes that one thread hashes
TEMPORARY = re.compile(r"\..+\.(?P<host>[A-Za-z0-9-]{1,63})\.(?P<process>[0-9]{1,10})\.tmp")


def digest(payload: bytes) -> str:
    """SHA-256 of ``payload``: 64 hexadecimal digits."""
    return hashlib.sha256(payload).hexdigest()


def content_key(values: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON of ``values`` (keys sorted, no spaces, ASCII): 64 hexadecimal
    digits."""
    return digest(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def digest_of_parts(payload: bytes | np.ndarray | Path) -> str:
    """SHA-256 over the SHA-256s of parts of ``PART`` bytes, of bytes or of a file's content. Parts
    are hashed side by side: one thread takes a second for 1.2 GB."""
    if isinstance(payload, Path):
        with payload.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return _joined(lambda start: os.pread(file.fileno(), PART, start), size)
    view = memoryview(payload)
    return _joined(lambda start: view[start : start + PART], len(view))


def _joined(part: Callable[[int], bytes | memoryview], size: int) -> str:
    hashed = _hashers(os.getpid()).map(
        lambda start: hashlib.sha256(part(start)).digest(), range(0, size, PART)
    )
    return digest(b"".join(hashed))


@cache
def _hashers(process: int) -> ThreadPoolExecutor:
    """Threads of a ``process``: one that is forked has none of them."""
    return ThreadPoolExecutor(os.cpu_count())


def file_digest(path: Path) -> str:
    """SHA-256 of the content of the file ``path``: 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_regular(path: Path, *, most: int | None = None) -> bytes:
    """The content of the file ``path``. Raises OSError for what is no file (a folder, a device, a
    pipe, which may never end) and for one of more than ``most`` bytes."""
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a file", str(path))
    if most is not None and found.st_size > most:
        raise OSError(errno.EFBIG, f"{found.st_size:,} bytes; at most {most:,} are read")
    return Path(path).read_bytes()


def write_atomically(path: Path, payload: bytes) -> None:
    """Write ``payload`` to ``path`` as :func:`replacing` does."""
    with replacing(path) as making:
        making.write_bytes(payload)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The file that the body writes takes the place of ``path``, which so holds either the old or
    the new content, never half.

    A link stays: the file that it points to is replaced. Raises OutputError where that cannot be
    done, and for what is no file: a folder, a device, a pipe.
    """
    path = Path(path)
    try:
        if _is_other_than_file(path):
            raise OSError(errno.EINVAL, "not a file")
        path = Path(os.path.realpath(path)) if path.is_symlink() else path
        path.parent.mkdir(parents=True, exist_ok=True)
        making = temporary(path)
        making.mkdir(exist_ok=True)
        try:
            file = making / path.name
            yield file
            with file.open("rb") as written:
                os.fsync(written.fileno())
            file.replace(path)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: cannot be written ({reason(error)})") from None


def save_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Write the new file ``path``, not serialized in memory first, which may have no room for it.
    Whoever reads its folder reads it, where safetensors writes for the owner alone. Raises OSError,
    where safetensors has an error of its own."""
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, about)
        path.chmod(path.parent.stat().st_mode & 0o666)
    except SafetensorError as error:
        raise OSError(str(error)) from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """The folder that the body fills becomes ``path``, whole or not at all; an empty one may be
    there. Raises OutputError where that cannot be done."""
    making = temporary(path.absolute())
    try:
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        yield making
        making.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({reason(error)})") from None
    finally:
        shutil.rmtree(making, ignore_errors=True)


def require_writable(path: Path, option: str = "") -> None:
    """Raise OutputError where ``write_atomically(path, …)`` could not work.

    Nothing stays behind. ``option``, such as ``--summary``, begins the message.
    """
    location = f"{option} {path}".strip()
    try:
        if _is_other_than_file(path):
            what = "a folder" if path.is_dir() else "a device or a pipe"
            raise OutputError(f"{location}: is {what}; name a file")
        if path.exists() and not os.access(path, os.W_OK):
            raise OutputError(f"{location}: is read-only; name another file")
        _try(Path(os.path.realpath(path)).parent)
    except (OSError, ValueError) as error:
        raise OutputError(f"{location}: cannot be written ({reason(error)})") from None


def require_folder(path: Path, option: str = "") -> None:
    """Raise OutputError where files could not be written into the folder ``path``, which need
    not exist. Nothing stays behind."""
    location = f"{option} {path}".strip()
    try:
        if path.exists() and not path.is_dir():
            raise OutputError(f"{location}: is a file; name a folder")
        _try(Path(os.path.realpath(path)))
    except (OSError, ValueError) as error:
        raise OutputError(f"{location}: cannot be written to ({reason(error)})") from None


def write_page(out: Path, results: Any, table: str) -> list[Path]:
    """``results`` to ``out`` as JSON, the table beside it in Markdown; gives what was written."""
    files = {out: json.dumps(results, indent=1), out.with_suffix(".md"): table}
    for path, content in files.items():
        write_atomically(path, f"{content.rstrip()}\n".encode())
    return list(files)


def temporary(path: Path) -> Path:
    """Where this process makes what becomes ``path``."""
    name = digest(os.fsencode(path.name))[:16]
    return path.with_name(f".{name}.{_host()}.{os.getpid()}.tmp")


def clean_temporaries(folder: Path) -> list[Path]:
    """Remove temporary files and folders below ``folder`` whose process on this host is dead.

    Those of other hosts stay: whether they are alive cannot be known. Returns what was removed.
    """
    removed = []
    for path in sorted(Path(folder).rglob(".*.tmp")):
        named = TEMPORARY.fullmatch(path.name)
        if named and named["host"] == _host() and not psutil.pid_exists(int(named["process"])):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def mark_used(path: Path) -> None:
    """Note that a kept file or folder was used now, where that can be noted."""
    with suppress(OSError):
        os.utime(path)


def reason(error: Exception) -> str:
    """What went wrong with a file, without its path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _try(folder: Path) -> None:
    """Make a file in ``folder``, or in the nearest one above it that exists."""
    while not os.path.lexists(folder):
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        pass


def _is_other_than_file(path: Path) -> bool:
    """Whether a folder, a device or a pipe is there. Raises OSError where that cannot be known."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:63] or "localhost"
