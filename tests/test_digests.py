"""Digests of large files are kept by the identity of the file."""

import os

import pytest

from qbench import files
from qbench.files import file_digest, kept_digest


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
