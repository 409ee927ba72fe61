"""A results folder that comes as one file, records.tar.xz."""

import io
import shutil
import tarfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
from small_recipe import SOFTPICK, qbench, run_small
from synthetic import make_store

from qbench.errors import DamagedError, ResultsError
from qbench.store import ARCHIVE, Analyses, Store

SETTINGS = {"sizes": {"arc_easy": 60, "wikitext": 6}, "failed": ("softpick/gptq-4bit",)}
PAIR = Path(__file__).parents[1] / "results" / "pair-27m"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder, and what it gives as one file."""
    folder = tmp_path_factory.mktemp("whole") / "grid"
    make_store(folder, quantizers=("bf16", "gptq-4bit"), **SETTINGS)
    assert qbench("export", folder, "--to", "archive") == 0
    return folder


@pytest.fixture
def packed(whole, tmp_path):
    """Its archive alone, as a clone has it."""
    folder = tmp_path / "grid"
    folder.mkdir()
    shutil.copy(whole / ARCHIVE, folder)
    return folder


def files(folder):
    found = (path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def records(folder):
    return Store(folder).records()


def test_whatever_reads_it_first_unpacks_it(whole, packed):
    assert records(packed) == records(whole)
    assert files(packed) == files(whole)


@pytest.mark.parametrize(
    "command",
    [("tables", "{}"), ("show", "{}/softpick/bf16"),
     ("explain", "{}/softmax/bf16", "{}/softpick/bf16"), ("view", "{}", "--export", "site")],
)  # fmt: skip
def test_every_command_reads_it(whole, packed, monkeypatch, command):
    monkeypatch.chdir(packed.parent)
    assert qbench(*(part.format(packed) for part in command)) == 0
    assert files(packed).items() >= files(whole).items()


def test_no_archive_is_made_of_a_damaged_folder(packed, tmp_path):
    records(packed)
    min(packed.glob("records/**/*.outcomes.parquet")).unlink()
    with pytest.raises(DamagedError, match=r"outcomes\.parquet: missing; run the recipe again"):
        qbench("export", packed, "--to", "archive", "--out", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_analyses_alone_unpack_it(tmp_path):
    shutil.copy(PAIR / ARCHIVE, tmp_path)
    assert [one.cell for one in Analyses(tmp_path).records()] == ["softmax/bf16", "softpick/bf16"]


def test_the_same_files_give_the_same_archive(packed, tmp_path):
    assert qbench("export", packed, "--to", "archive", "--out", tmp_path / "again") == 0
    assert (tmp_path / "again" / ARCHIVE).read_bytes() == (packed / ARCHIVE).read_bytes()


def test_an_unpacking_that_was_stopped_is_finished(whole, packed):
    records(packed)
    (packed / "grid.json").unlink()
    one, *_, last = sorted(packed.glob("records/**/*.json"))
    one.write_bytes(one.read_bytes()[:40])
    last.unlink()
    assert records(packed) == records(whole)
    assert files(packed) == files(whole)


def newer(folder, tmp_path, **settings):
    """Another archive in ``folder``, as a pull brings it; gives the folder that it is of."""
    other = tmp_path / "theirs" / folder.name
    make_store(other, **{**SETTINGS, **settings})
    assert qbench("export", other, "--to", "archive", "--out", folder) == 0
    return other


def test_a_newer_archive_counts_and_other_records_stay(packed, tmp_path, capsys):
    records(packed)
    make_store(packed, quantizers=("bf16", "hqq-2bit"), **SETTINGS)
    mine = files(packed)
    theirs = newer(packed, tmp_path, quantizers=("bf16", "gptq-3bit"), seed=1)
    capsys.readouterr()
    assert records(packed) == records(theirs)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{packed / ARCHIVE}: newer than the results beside it")
    for name in mine.keys() - {ARCHIVE, "grid.json"} - files(theirs).keys():
        assert files(packed)[name] == mine[name], "no record of another key is lost"
    make_store(packed, quantizers=("hqq-2bit",), **SETTINGS)
    assert {one.quantizer for one in records(packed)} == {"hqq-2bit"}, "it is unpacked once"


def test_processes_unpack_it_once(whole, packed):
    with ProcessPoolExecutor(4, get_context("fork")) as pool:
        assert list(pool.map(records, [packed] * 4)) == [records(whole)] * 4
    assert files(packed) == files(whole)


def test_a_run_goes_on_from_it(tmp_path, capsys, own_cache):
    changes = {"checkpoints": SOFTPICK, "tasks": ["demo_lastword"], "quantizers": ["fp32"]}
    out = run_small(tmp_path, **changes).directory
    assert qbench("export", out, "--to", "archive", "--out", tmp_path / "packed") == 0
    run_small(tmp_path, "--out", tmp_path / "packed", **changes)
    assert "softpick/fp32: already finished" in capsys.readouterr().err


DAMAGE = {
    "cut": lambda whole: whole[: len(whole) // 2],
    "short by its checksum": lambda whole: whole[:-40],
    "a changed byte": lambda whole: whole[:500] + bytes([whole[500] ^ 1]) + whole[501:],
    "another": lambda whole: b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_archive_is_one_line_and_nothing_is_unpacked(packed, command, capsys, damage):
    archive = packed / ARCHIVE
    archive.write_bytes(DAMAGE[damage](archive.read_bytes()))
    assert command("tables", packed) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{archive}: damaged: " in line
    assert line.endswith("; fetch it again")
    assert list(files(packed)) == [ARCHIVE]


FOREIGN = {
    "any text": ("grid.json", b"curl example.org | sh"),
    "another kind": ("records/a/b/c.json", b'{"schema_version": 2}'),
    "zeros": ("records/a/b/c.json", bytes(2**21)),
    "a table of other content": ("records/a/b/c.0123456789abcdef.outcomes.parquet", b"x"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_an_archive_of_something_else_is_refused_before_a_byte_is_written(
    packed, monkeypatch, what
):
    monkeypatch.setattr("qbench.store.LEAST_BOUND", 2**20)
    name, payload = FOREIGN[what]
    info = tarfile.TarInfo(name)
    info.size = len(payload)
    with tarfile.open(packed / ARCHIVE, "w:xz") as archive:
        archive.addfile(info, io.BytesIO(payload))
    with pytest.raises(DamagedError, match=r"damaged: .*; fetch it again"):
        Store(packed)
    assert list(files(packed)) == [ARCHIVE]


def test_nothing_of_an_archive_lands_elsewhere(packed):
    """Names that lead out, links, and what is no results file stay in it."""
    records(packed)
    outside = f"{packed.parent}/out.json"
    with tarfile.open(packed / ARCHIVE, "w:xz") as archive:
        for name in ("../out.json", outside, "records/../../out.json", "tables.md"):
            archive.addfile(tarfile.TarInfo(name))
        link = tarfile.TarInfo("records/link.json")
        link.type, link.linkname = tarfile.SYMTYPE, "../grid.json"
        archive.addfile(link)
        archive.add(packed / "grid.json", "grid.json")
    shutil.rmtree(packed / "records")
    (packed / "grid.json").unlink()
    Store(packed)
    assert sorted(files(packed.parent)) == ["grid/grid.json", f"grid/{ARCHIVE}"]


@pytest.mark.parametrize("name", ["tables.md", "records", "records/softpick/bf16/x.log"])
def test_a_folder_that_holds_symbolic_links_is_refused(packed, tmp_path, name):
    """A stranger's folder must not have this machine's files overwritten, not even by a table."""
    records(packed)
    (tmp_path / "mine").mkdir()
    if (link := packed / name).exists():
        link.rename(packed / "other")
    link.symlink_to(tmp_path / "mine")
    with pytest.raises(ResultsError, match=f"{name}: a symbolic link; put the file"):
        qbench("tables", packed)
