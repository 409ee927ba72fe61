"""Files: written whole, refused before work; digests of large ones are kept by their identity."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from qbench import files
from qbench.errors import OutputError
from qbench.files import (
    PACKAGE,
    PART,
    SCORING,
    cache_folder,
    clean_temporaries,
    digest,
    digest_of,
    digest_of_parts,
    file_digest,
    kept_digest,
    replacing,
    require_folder,
    require_writable,
    save_tensors,
    temporary,
    write_atomically,
)


def test_a_link_stays_and_the_file_behind_it_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    link, file = tmp_path / "link", tmp_path / "folder" / "file"
    link.symlink_to(file)
    for content in (b"new", b"newer"):  # the first makes it
        write_atomically(link, content)
        assert link.is_symlink()
        assert file.read_bytes() == content
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "link"]


REFUSED = {
    "a folder": (lambda folder: folder, "not a file"),
    "below a file": (lambda folder: folder / "file" / "x", "Not a directory"),
    "in /proc": (lambda folder: Path("/proc/qbench/x.json"), "cannot be written"),
    "NUL": (lambda folder: folder / "a\0b", "null"),
    "long name": (lambda folder: folder / ("a" * 300), "name too long"),
    "a loop": (lambda folder: folder / "loop", "symbolic links"),
    "in a link to nowhere": (lambda folder: folder / "nowhere" / "x" / "y", "cannot be written"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_written_is_refused_before_and_when_it_is_written(tmp_path, what):
    (tmp_path / "file").write_text("content")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "nowhere").symlink_to("/proc/nowhere")
    make, words = REFUSED[what]
    path = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputError, match=words) as error:
        require_writable(path, "--json")
    assert str(error.value).startswith("--json ")
    assert len(str(error.value).splitlines()) == 1
    with pytest.raises(OutputError):
        write_atomically(path, b"x")
    assert sorted(tmp_path.rglob("*")) == before


ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
from qbench.errors import OutputError
from qbench.files import write_atomically

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    write_atomically(Path(sys.argv[1]), b"new" * 1000)
except OutputError as error:
    sys.exit(2 if "File too large" in str(error) else 3)
"""


@pytest.mark.parametrize(("room", "code"), [(2999, 2), (3000, 0)])
def test_a_disk_that_is_full_at_any_byte_leaves_the_old_content_and_nothing_else(
    tmp_path, room, code
):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    ended = subprocess.run([sys.executable, "-c", ON_A_FULL_DISK, path, str(room)])
    assert ended.returncode == code
    assert path.read_bytes() == (b"old" if code else b"new" * 1000)
    assert list(tmp_path.iterdir()) == [path]


def test_temporaries_of_dead_processes_are_removed_and_no_others(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine = temporary(tmp_path / "deep" / "record.json")
    mine.parent.mkdir()
    named = mine.name.replace(f".{os.getpid()}.", f".{dead.pid}.")
    elsewhere = re.sub(rf"\.[A-Za-z0-9-]+\.{dead.pid}\.", f".other-host.{dead.pid}.", named)
    gone = [mine.with_name(named), tmp_path / named.replace("record.json", "hqq-3bit")]
    kept = [mine, mine.with_name(elsewhere), mine.with_name("record.json"),
            mine.with_name(".lock"), mine.with_name(f".x.{dead.pid}")]  # fmt: skip
    for path in (gone[0], *kept):
        path.write_text("content")
    gone[1].mkdir()
    (gone[1] / "weights.safetensors").write_text("content")
    assert socket.gethostname().replace(".", "-") in mine.name
    assert clean_temporaries(tmp_path) == sorted(gone)
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in gone)


def test_a_digest_of_parts_is_of_every_part_in_its_place():
    parts = [bytes([i]) * (PART if i < 2 else 5) for i in range(3)]
    found = digest_of_parts(b"".join(parts))
    assert found == digest(b"".join(bytes.fromhex(digest(part)) for part in parts))
    assert found != digest_of_parts(b"".join([parts[1], parts[0], parts[2]]))
    assert found != digest_of_parts(b"".join(parts[:2]))


def test_tensors_are_written_as_safetensors_writes_them(tmp_path):
    tensors = {
        "wide": torch.arange(6.0, dtype=torch.float64).view(2, 3).T,
        "none": torch.empty(0, 4, dtype=torch.bfloat16),
        "truth": torch.tensor([True, False, True]),
        "one": torch.tensor(7, dtype=torch.int32),
        "ü": torch.tensor([1.5, -2.0, float("nan")]).to(torch.float8_e4m3fn),
        "codes": torch.arange(9, dtype=torch.uint8).view(3, 3)[:, 1:],
    }
    save_tensors(tmp_path / "ours", tensors, {"about": "ü", "more": "{}"})
    with safe_open(tmp_path / "ours", framework="pt") as file:
        assert file.metadata() == {"about": "ü", "more": "{}"}
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert found.tolist() == tensor.tolist() or name == "ü"
    alike = {name: torch.randn(3, 2) for name in "ba"}
    save_tensors(tmp_path / "ours", alike, {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == save(alike, {"format": "pt"})


def test_tensors_are_readable_as_other_files_are_and_fail_as_they_do(tmp_path):
    write_atomically(tmp_path / "text", b"")
    with replacing(tmp_path / "one") as making:
        save_tensors(making, {"a": torch.ones(2)}, {})
    assert (tmp_path / "one").stat().st_mode == (tmp_path / "text").stat().st_mode
    with pytest.raises(OutputError, match=r"two: cannot be written \("):  # noqa: SIM117
        with replacing(tmp_path / "two") as making:
            save_tensors(making / "no such folder" / "two", {"a": torch.ones(2)}, {})


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "LARGE", 4)
    monkeypatch.setattr(files, "SETTLED_SECONDS", -1.0)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


def replaced(path):
    path.with_suffix(".new").write_bytes(b"another")
    os.replace(path.with_suffix(".new"), path)


def rewritten(path):
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(b"anothe!")
    os.utime(path, ns=times)  # as rsync and tar do: the time of change still tells


@pytest.mark.parametrize(
    ("change", "reads"),
    [(lambda path: None, 1), (replaced, 2), (rewritten, 2), (lambda path: path.touch(), 2)],
)
def test_a_file_is_read_again_only_if_it_changed(file, change, reads):
    read = []

    def compute(path):
        read.append(path)
        return file_digest(path)

    assert kept_digest(file, compute) == file_digest(file)
    change(file)
    assert kept_digest(file, compute) == file_digest(file)
    assert len(read) == reads


def test_what_was_written_a_moment_ago_and_small_files_are_not_kept(file, monkeypatch):
    monkeypatch.setattr(files, "SETTLED_SECONDS", 60.0)
    kept_digest(file, file_digest)
    monkeypatch.setattr(files, "LARGE", 100)
    kept_digest(file, file_digest)
    assert not (file.parent / "cache").exists()


def test_a_cache_that_cannot_be_written_or_read_is_no_obstacle(file):
    (file.parent / "cache").write_text("no folder")
    assert kept_digest(file, file_digest) == file_digest(file)
    (file.parent / "cache").unlink()
    kept_digest(file, file_digest)
    (kept,) = (file.parent / "cache" / "digests").iterdir()
    kept.write_text("{")
    assert kept_digest(file, file_digest) == file_digest(file)


# Which of our own code is part of a cell's key.


def test_a_changed_a_new_and_a_renamed_module_change_the_digest(tmp_path):
    (tmp_path / "room").mkdir()
    one, other = tmp_path / "room" / "a.py", tmp_path / "room" / "b.py"
    one.write_text("x = 1\n")
    found = [digest_of([tmp_path / "room"])]
    other.write_text("x = 1\n")
    found.append(digest_of([tmp_path / "room"]))
    other.rename(tmp_path / "room" / "c.py")
    found.append(digest_of([tmp_path / "room"]))
    one.write_text("x = 2\n")
    found.append(digest_of([tmp_path / "room"]))
    assert len({*found}) == 4
    (tmp_path / "room" / "c.py").unlink()
    one.write_text("x = 1\n")
    assert digest_of([tmp_path / "room"]) == found[0]


def test_every_module_that_a_cell_imports_while_it_computes_is_there_or_decides_nothing():
    """A new module or package stands in one of the two lists before it is used."""
    without_effect = {
        "__init__.py", "__main__.py", "analysis", "api.py", "bench", "budget",
        "cli", "comparison", "errors.py", "export.py", "export_model.py",
        "files.py", "gate", "hub.py",
        "machine.py", "plan.py", "plugins.py", "progress.py",
        "published",
        "recipe.py", "recipes",
        "records.py", "removed.py", "runner", "statistics", "store.py", "tables",
        "tasks", "text.py", "training", "viewer",
    }  # fmt: skip
    found = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert found - without_effect == set(SCORING)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_file_or_folder_is_refused(tmp_path):
    (tmp_path / "file").touch(0o444)
    folder = tmp_path / "folder"
    folder.mkdir(0o555)
    for path in (tmp_path / "file", folder / "x", folder / "x" / "y"):
        with pytest.raises(OutputError, match=r"read-only|Permission denied"):
            require_writable(path)
    with pytest.raises(OutputError, match="Permission denied"):
        require_folder(folder)


def test_the_cache_may_be_below_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value, folder in {"~/mine": tmp_path / "mine", "": tmp_path / ".cache" / "qbench"}.items():
        monkeypatch.setenv("QBENCH_CACHE", value)
        assert cache_folder() == folder
