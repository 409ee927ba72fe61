"""Write files and folders in one step, check before work whether they can be written, and hash
them and our own modules. Imports no torch.

A temporary name holds the process and the host that write it, so that what a killed process left
can be distinguished from what another process is writing.
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
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from safetensors import SafetensorError, safe_open

from qbench.errors import OutputError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

GIB = 2**30  # bytes
NO_ROOM = "make room there, or correct its permissions"
NAME = r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}"  # a name that may become a folder
NAME_RULE = "up to 64 letters, digits and . _ + -, the first a letter or digit"
PART = 1 << 20  # bytes per hash of ``digest_of_parts``
LARGE = 16 * 2**20  # bytes; the digest of a smaller file is not kept
SETTLED_SECONDS = 2.0  # a file may change again within the resolution of its time
HOST = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:63] or "localhost"
TEMPORARY = re.compile(r"\..+\.(?P<host>[A-Za-z0-9-]{1,63})\.(?P<process>[0-9]{1,10})\.tmp")


def cache_folder() -> Path:
    """Return the cache's folder: $QBENCH_CACHE, else ~/.cache/qbench."""
    return Path(os.path.expanduser(os.environ.get("QBENCH_CACHE") or "~/.cache/qbench"))


def short_path(path: str | Path) -> str:
    """Return a hub id or another relative path as it is, a path below the working folder relative
    to it, and the last two parts of any other path, after ``…/``: records shall not reveal where a
    machine keeps its files."""
    path = Path(path)
    if not path.is_absolute():
        return str(path)
    if path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    return "/".join(("…", *path.parts[1:][-2:]))


def digest(payload: bytes) -> str:
    """Return the SHA-256 of ``payload`` as 64 hexadecimal digits."""
    return hashlib.sha256(payload).hexdigest()


def content_key(values: dict[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of ``values`` (keys sorted, no spaces, ASCII) as 64
    hexadecimal digits."""
    return digest(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def digest_of_parts(payload: bytes | np.ndarray | Path) -> str:
    """Return the SHA-256 of the SHA-256s of all parts of ``PART`` bytes of ``payload`` (a path: of
    the file). Parts are hashed in threads: one thread takes a second for 1.2 GB."""
    with ExitStack() as stack:
        if isinstance(payload, Path):
            number = stack.enter_context(payload.open("rb")).fileno()
            size = os.fstat(number).st_size
            part = partial(os.pread, number, PART)
        else:
            view = memoryview(payload)
            size, part = len(view), lambda start: view[start : start + PART]
        threads = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))
        apply = threads.map if size > PART else map  # a thread for a single part takes longer
        hashed = apply(lambda s: hashlib.sha256(part(s)).digest(), range(0, size, PART))
        return digest(b"".join(hashed))


def file_digest(path: Path) -> str:
    """Return the SHA-256 of the file's content as 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, payload: bytes) -> None:
    """Write ``payload`` to ``path`` in one step, as by :func:`replacing`: missing folders are made,
    and a link's target is replaced. Raises OutputError."""
    with replacing(path) as making:
        making.write_bytes(payload)


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary path; the file that the body writes there then replaces ``path``.

    ``path`` holds the old or the new content at any time, never a part. Its folder is made if
    needed. If ``path`` is a symbolic link, the file that it points to is replaced. ``sync``: wait
    until the disk has the file. Raises OutputError if ``path`` is a folder or a device or cannot be
    written, and for any OSError or ValueError of the body.
    """
    try:
        _require_file(path)
        path = Path(os.path.realpath(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        making = temporary(path)
        try:
            yield making
            if sync:
                with making.open("rb") as written:
                    os.fsync(written.fileno())
            making.replace(path)
        finally:
            making.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise OutputError(f"{path}: cannot be written ({reason(error)}); {NO_ROOM}") from None


def save_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    """Write ``tensors`` by name, and the texts ``about`` as metadata, to the safetensors file
    ``path``. A GPU's come to the host one after the other: the memory for all, which safetensors'
    own function needs, takes longer to get than the file to write. Raises OSError."""
    from safetensors.torch import save

    def kind(tensor: Tensor) -> str:
        sample = save({"x": tensor.new_empty(0, device="cpu")})
        return json.loads(sample[8 : 8 + int.from_bytes(sample[:8], "little")])["x"]["dtype"]

    named = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))  # all aligned
    kinds = {tensor.dtype: tensor for tensor in tensors.values()}
    kinds = {dtype: kind(tensor) for dtype, tensor in kinds.items()}
    header, end = {"__metadata__": about}, 0
    for name, tensor in named:
        start, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": kinds[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    number = sys.modules["torch"].uint8  # whoever has tensors has imported it
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in named:
            file.write(tensor.detach().cpu().contiguous().view(-1).view(number).numpy())


ABOUT = "about"  # the one entry of a file's metadata: several come in no fixed order


def write_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write ``tensors`` by name to the safetensors file ``path``, with ``about``, as JSON, in its
    metadata, and their digest to ``path`` + ".digest". The disk is not waited for, which may take
    longer than computing the tensors: a crash shows in the digest. Raises OutputError."""
    with replacing(path, sync=False) as making:
        save_tensors(making, tensors, {ABOUT: json.dumps(about, sort_keys=True)})
        path.with_name(f"{path.name}.digest").write_text(f"{digest_of_parts(making)}\n")


def verify_tensors(path: Path) -> dict[str, Any]:
    """Read the whole file that ``write_tensors`` wrote, compare it with its digest and return its
    ``about``. Raises OSError or ValueError if a file is missing or changed."""
    kept = path.with_name(f"{path.name}.digest").read_text().strip()
    if kept != digest_of_parts(path):
        raise ValueError("its content does not match its digest")
    try:
        with safe_open(path, framework="numpy") as file:
            return json.loads((file.metadata() or {}).get(ABOUT, "{}"))
    except SafetensorError as error:
        raise ValueError(str(error)) from None


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to ``path`` once the body has filled it, and
    removed if the body raises. ``path`` is missing or an empty folder. Raises OutputError if it
    cannot be written, and for any OSError of the body."""
    making = temporary(path.absolute())
    try:
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        yield making
        making.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({reason(error)}); {NO_ROOM}") from None
    finally:
        shutil.rmtree(making, ignore_errors=True)


def require_writable(path: Path, option: str = "") -> None:
    """Raise OutputError if no file can be written to ``path``: it is no file, its folder (or the
    nearest above it that exists) takes no files, or it exists and is read-only, although
    ``write_atomically`` would replace it. ``option`` begins the message."""
    try:
        _require_file(path)
        if path.exists() and not os.access(path, os.W_OK):
            raise OSError(errno.EACCES, "is read-only")
        _try(Path(os.path.realpath(path)).parent)
    except (OSError, ValueError) as error:
        location, why = f"{option} {path}".strip(), reason(error)
        raise OutputError(f"{location}: cannot be written ({why}); name another file") from None


def require_folder(path: Path, option: str = "") -> None:
    """Raise OutputError if files cannot be written into the folder ``path``, which need not exist.
    ``option`` begins the message. Leaves nothing behind."""
    location = f"{option} {path}".strip()
    try:
        if path.exists() and not path.is_dir():
            raise OutputError(f"{location}: is a file; name a folder")
        _try(Path(os.path.realpath(path)))
    except (OSError, ValueError) as error:
        raise OutputError(
            f"{location}: cannot be written to ({reason(error)}); name another folder"
        ) from None


def write_page(out: Path, results: Any, table: str) -> list[Path]:
    """Write ``results`` to ``out`` as JSON, ``table`` beside it as Markdown; return the paths."""
    files = {out: json.dumps(results, indent=1), out.with_suffix(".md"): table}
    for path, content in files.items():
        write_atomically(path, f"{content.rstrip()}\n".encode())
    return list(files)


def temporary(path: Path) -> Path:
    """Return the temporary path under which this process writes ``path``."""
    stem = f".{digest(os.fsencode(path.name))[:16]}.{HOST}."
    return path.with_name(f"{stem}{os.getpid()}.tmp")


def clean_temporaries(folder: Path) -> list[Path]:
    """Remove temporary files and folders below ``folder`` that killed processes of this host left.
    Those of other hosts stay: their processes may be alive. Returns what was removed."""
    removed = []
    for path in sorted(Path(folder).rglob(".*.tmp")):
        named = TEMPORARY.fullmatch(path.name)
        if named and named["host"] == HOST and not psutil.pid_exists(int(named["process"])):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def reason(error: Exception) -> str:
    """Return the message of ``error``, without the file's path if it is an OSError."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _require_file(path: Path) -> None:
    """Raise OSError if ``path`` is a folder, a device or a pipe."""
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))


def _try(folder: Path) -> None:
    """Make and remove a file in ``folder``, or in the nearest folder above it that exists."""
    while not os.path.lexists(folder):
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        pass


def kept_digest(path: Path, compute: Callable[[Path], str]) -> str:
    """Return ``compute(path)``, or the value kept from an earlier call for the unchanged file, so
    that no large file is hashed twice.

    A file is unchanged if its path, device, inode, size and times of change are. Values are kept in
    the cache's folder ``digests``, by the name of the function ``compute``; those of files below 16
    MiB are not kept. Raises OSError if the file cannot be read.
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


# --- the modules of qbench that can change a number

PACKAGE = Path(__file__).parent
QUANTIZING = (  # make a quantized model
    "attention",
    "checkpoints",
    "made_copy.py",
    "quantizers",
    "streaming.py",
)
SCORING = (
    *QUANTIZING,
    "cell.py",
    "cell_tasks.py",
    "cell_result.py",
    "evaluation",
    "metrics.py",
)  # and score it


@cache
def code_digest(modules: tuple[str, ...] = SCORING) -> str:
    """Return the digest of ``modules``, files and folders of this qbench (by default all that
    scoring runs); see ``digest_of``."""
    return digest_of([PACKAGE / name for name in modules])


def digest_of(paths: Sequence[Path]) -> str:
    """Return the SHA-256 (64 hexadecimal digits) over names and bytes of the Python files in
    ``paths``, files or folders."""
    total = hashlib.sha256()
    for path in paths:
        for module in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            name = module.relative_to(path.parent).as_posix()
            total.update(f"{name} {file_digest(module)}\n".encode())
    return total.hexdigest()
