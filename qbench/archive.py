"""Write, check and unpack ``records.tar.xz``, a results folder as one file. Imports no torch.

An archive may come from another person: names, sizes and contents of all of its files are checked
before the first is written, and nothing is written through symbolic links.
"""

from __future__ import annotations

import io
import json
import lzma
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock

from qbench.errors import DamagedError, OutputError
from qbench.files import (
    NAME,
    digest,
    file_digest,
    replacing,
    require_folder,
    without_links,
    write_atomically,
)
from qbench.records import (
    KEY_DIGITS,
    Analysis,
    AnalysisManifest,
    Record,
    RecordModel,
    RunManifest,
    Sensitivity,
    parse_record,
)

ARCHIVE = "records.tar.xz"
UNPACKED = ".unpacked"  # holds the SHA-256 of the archive that was unpacked last
PACKED = re.compile(rf"grid\.json|(grids|records|analysis)(/{NAME})+\.(json|parquet)")
FETCH_AGAIN = "fetch it again"
XZ_MAGIC = b"\xfd7zXZ\0"  # how an archive begins
# Bounds of what an archive may unpack to. The archives of the repository have up to 300 files and
# up to 16 bytes per byte of the archive.
MOST_FILES = 100_000
MOST_RATIO = 100
LEAST_BOUND = 2**26  # bytes that any archive may unpack to
# Tables hold numbers split into bytes: neither the byte before nor the place tells much of one.
XZ = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "pb": 0}


def pack(folder: Path, paths: Iterable[Path], out: Path) -> None:
    """Write those of ``paths`` that are results files of ``folder`` to the archive ``out``.

    The same files give the same bytes.
    """
    ordered = sorted(paths, key=lambda path: (path.suffixes[-2:], path))
    with (
        replacing(out) as made,
        lzma.open(made, "wb", filters=[XZ]) as file,
        tarfile.open(fileobj=file, mode="w") as archive,
    ):
        for path in ordered:
            name = path.relative_to(folder).as_posix()
            if PACKED.fullmatch(name):
                payload = path.read_bytes()
                member = tarfile.TarInfo(name)
                member.size = len(payload)
                archive.addfile(member, io.BytesIO(payload))


def unpack(folder: Path) -> None:
    """Write what ``folder/records.tar.xz`` holds into ``folder``, once for each archive.

    A file that was made here since stays if its key is another one, or if it is better or later
    than the archive's; standard error says so. ``grid.json`` is written last, so that an unpacking
    that was stopped begins again. Raises DamagedError if the archive is damaged, OutputError if the
    folder cannot be written to.
    """
    archive, mark, manifest = (folder / name for name in (ARCHIVE, UNPACKED, "grid.json"))
    if not archive.is_file():
        return
    current = file_digest(archive).encode()

    def is_unpacked() -> bool:
        return manifest.exists() and mark.is_file() and mark.read_bytes() == current

    if is_unpacked():
        return
    missing = [name for name, content in members(archive) if not _stays(folder / name, content)]
    if not missing:
        with suppress(OutputError):  # of a folder that is read-only
            write_atomically(without_links(folder, mark), current)
        return
    require_folder(folder)
    without_links(folder, mark)
    with FileLock(without_links(folder, folder / ".lock")):
        if is_unpacked():  # another process did it meanwhile
            return
        newer = manifest.exists()
        extract(archive, folder)
        write_atomically(mark, current)
    if newer:
        print(
            f"{archive}: newer than what lay beside it; its results are shown now, and what was "
            f"made here stays: `qbench show {folder}` lists the runs",
            file=sys.stderr,
        )


def extract(archive: Path, folder: Path, remedy: str = FETCH_AGAIN) -> None:
    """Write what the archive holds into ``folder``, ``grid.json`` last; better or later records of
    ``folder`` stay. Raises DamagedError or OutputError before the first file is written."""
    for name, _ in members(archive, remedy):
        without_links(folder, folder / name)
    last: bytes | None = None
    for name, content in members(archive, remedy):
        if name == "grid.json":
            last = content
        elif not _stays(folder / name, content):
            write_atomically(folder / name, content)
    if last is not None:
        write_atomically(folder / "grid.json", last)


def members(archive: Path, remedy: str = FETCH_AGAIN) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each results file of the archive, in its order.

    Other names, links and what is no regular file are left out. Raises DamagedError for a damaged
    archive, for one that exceeds the bounds above, and for a file that is not what qbench writes;
    ``remedy`` ends the message.
    """
    seen: set[str] = set()
    try:
        with lzma.open(archive) as file:
            bounded = _Bounded(file, max(LEAST_BOUND, MOST_RATIO * archive.stat().st_size))
            with tarfile.open(fileobj=bounded, mode="r|") as packed:
                for count, member in enumerate(packed):
                    if count == MOST_FILES:
                        raise ValueError(f"more than {MOST_FILES:,} files")
                    if not (member.isreg() and PACKED.fullmatch(member.name)):
                        continue
                    if member.issparse() or member.name in seen:
                        raise ValueError(f"{member.name} is sparse or there twice")
                    seen.add(member.name)
                    content = packed.extractfile(member).read()  # type: ignore[union-attr]  # regular
                    _check(archive, member.name, content, remedy)
                    yield member.name, content
            while bounded.read(tarfile.RECORDSIZE):  # to the end, where the checksum is
                pass
    except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError, OverflowError) as error:
        raise DamagedError(f"{archive}: damaged: {error}; {remedy}") from None


class _Bounded:
    """A binary file that raises ValueError once more than ``most`` bytes were read from it."""

    def __init__(self, file: BinaryIO, most: int) -> None:
        self._file, self._most, self._left = file, most, most

    def read(self, size: int) -> bytes:
        content = self._file.read(size)
        self._left -= len(content)
        if self._left < 0:
            raise ValueError(f"it unpacks to more than {self._most:,} bytes")
        return content


def _check(archive: Path, name: str, content: bytes, remedy: str) -> None:
    """Raise DamagedError or SchemaError if ``content`` is not what qbench writes under ``name``."""
    if name.endswith(".json"):
        parse_record(content, _kind(name), f"{archive}: {name}", remedy)
    elif f".{digest(content)[:KEY_DIGITS]}." not in name:
        raise ValueError(f"{name} is not what was written")


def _kind(name: str) -> type[RecordModel]:
    folder, _, rest = name.partition("/")
    if folder in ("grid.json", "grids"):
        return RunManifest
    if folder == "records":
        return Record
    if name.endswith("/grid.json"):
        return AnalysisManifest
    return Sensitivity if rest.startswith("sensitivity/") else Analysis


def _stays(path: Path, archived: bytes) -> bool:
    """Return whether the file ``path`` holds ``archived``, or a record of the same key that is good
    if the archived one is not, or as good and later."""
    if not path.is_file():
        return False
    content = path.read_bytes()
    if content == archived:
        return True
    with suppress(ValueError, KeyError, TypeError):
        mine, theirs = (
            (record["status"] == "ok", datetime.fromisoformat(record["finished"]))
            for record in map(json.loads, (content, archived))
        )
        return mine > theirs
    return False  # a manifest, a table, or damaged
