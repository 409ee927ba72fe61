"""The record and rows that damage is taken against, put where a worker's cell looks for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
from synthetic import make_store

pytest.importorskip("distributed")

from qbench.evaluation.base_file import (
    Parts,
    base_rows_file,
    base_rows_usable,
    checksum_file,
    part_file,
)
from qbench.evaluation.scoring.base_rows import save_index

from qbench.cell import distributions_folder
from qbench.cluster import kept, remote
from qbench.cluster.located import WHOLE, Wanted
from qbench.files import TEMPORARY, temporary
from qbench.store import Store

pytestmark = pytest.mark.usefixtures("own_cache")


CALLS = range(1, 7)  # a record and its table; two parts, their index and its checksum


class KilledError(BaseException):
    """The process ends here."""


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def base(tmp_path, cache):
    """An unquantized cell whose record and rows have come from another host."""
    made = make_store(tmp_path / "made", sizes={"arc_easy": 9}, quantizers=("bf16",))
    cell = made.grid().cells[0]
    target = cache / "files" / "record-a"
    target.mkdir(parents=True)
    for path in made.files_of(made.get(cell)):
        shutil.copy(path, target)
    (target / WHOLE).touch()
    rows = base_rows_file(distributions_folder(cache), cell.key)
    digests = [sha256(text).hexdigest() for text in (b"head", b"task")]
    rows.parent.mkdir(parents=True)
    for text, digest in zip((b"head", b"task"), digests, strict=True):
        part_file(rows, digest).write_bytes(text)
    save_index(rows, cell.key, Parts(head=digests[0], tasks={"arc_easy": digests[1]}))
    passed = kept.rows_here(cell.key)
    shutil.rmtree(rows.parent)  # here are only those that were passed on
    return remote.BaseThere(cell=cell, record=Wanted("files/record-a", ()), rows=passed)


def places(base, cache):
    """The folders that are filled, and what is in each under its own name."""
    record = Store(cache / remote.CELLS).path(base.cell.cell, base.cell.key)
    rows = base_rows_file(distributions_folder(cache), base.cell.key)
    origins = (cache / base.record.target, cache / base.rows)
    for folder, origin in zip((record.parent, rows.parent), origins, strict=True):
        files = folder.iterdir() if folder.is_dir() else ()
        own = [p for p in files if not TEMPORARY.fullmatch(p.name) and p.suffix != ".lock"]
        yield origin, {path.name: path.read_bytes() for path in own}


def take(base, cache):
    """As a process does that has read no rows yet."""
    kept._checked.clear()
    wanted = []
    assert remote._take_base(base, cache, wanted) == wanted == []


def killed_at(monkeypatch, name, call, before=lambda *_: None):
    """The process ends at that call of ``os.link`` or ``shutil.copy2``."""
    module = os if name == "link" else shutil
    real, calls = getattr(module, name), []

    def counted(origin, target):
        calls.append(target)
        if len(calls) == call:
            before(origin, target)
            raise KilledError
        return real(origin, target)

    monkeypatch.setattr(module, name, counted)


def is_there(base, cache):
    store = Store(cache / remote.CELLS)
    rows = base_rows_file(distributions_folder(cache), base.cell.key)
    return store.whole(base.cell) is not None, base_rows_usable(rows, base.cell.key)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_what_names_others_is_there_only_once_they_are(base, cache, monkeypatch, call, turned):
    """However a file system orders a folder."""
    listed = Path.iterdir
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", lambda path: iter(sorted(listed(path), reverse=turned)))
        killed_at(patch, "link", call)
        with pytest.raises(KilledError):
            take(base, cache)
    store = Store(cache / remote.CELLS)
    rows = base_rows_file(distributions_folder(cache), base.cell.key)
    record, index = is_there(base, cache)
    assert record == (store.get(base.cell) is not None)
    assert index == checksum_file(rows).is_file()
    take(base, cache)
    assert is_there(base, cache) == (True, True)


@pytest.mark.parametrize("call", CALLS)
def test_without_links_no_half_file_has_the_name_of_a_whole_one(base, cache, monkeypatch, call):
    def half(origin, target):
        Path(target).write_bytes(Path(origin).read_bytes()[:3])

    def no_links(*_):
        raise OSError

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", no_links)
        killed_at(patch, "copy2", call, before=half)
        with pytest.raises(KilledError):
            take(base, cache)
    for origin, files in places(base, cache):
        assert all((origin / name).read_bytes() == content for name, content in files.items())
    take(base, cache)
    assert is_there(base, cache) == (True, True)


def test_a_file_that_another_reads_is_never_gone_meanwhile(base, cache, monkeypatch):
    """It is put there again where one beside it is damaged."""
    take(base, cache)
    before = [files for _, files in places(base, cache)]
    store = Store(cache / remote.CELLS)
    rows = base_rows_file(distributions_folder(cache), base.cell.key)
    for damaged in (store.files_of(store.get(base.cell))[1], next(rows.parent.glob("*.rows"))):
        damaged.unlink()
        damaged.write_bytes(b"damaged")
    gone = []
    real = os.link

    def watched(origin, target):
        now = [files for _, files in places(base, cache)]
        gone.extend(set(b) - set(n) for b, n in zip(before, now, strict=True))
        return real(origin, target)

    monkeypatch.setattr(os, "link", watched)
    take(base, cache)
    assert len(gone) == 2 * len(CALLS)
    assert not any(gone)
    assert is_there(base, cache) == (True, True)


def test_what_a_killed_process_left_is_removed_and_nothing_else_stays(base, cache):
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    take(base, cache)
    rows = base_rows_file(distributions_folder(cache), base.cell.key)
    own = f".{os.getpid()}.tmp"
    left = temporary(rows).name.replace(own, f".{process.pid}.tmp")
    (rows.parent / left).touch()
    checksum_file(rows).unlink()
    take(base, cache)
    assert not list(cache.rglob(".*.tmp"))
    assert is_there(base, cache) == (True, True)
