"""`qbench cache`: what is kept is listed, and bounded."""

from __future__ import annotations

import os

import pytest
from filelock import FileLock

from qbench.cache import entries, prune
from qbench.cli.app import app
from qbench.files import mark_used

DAY = 86_400
NOW = 1_700_000_000


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Two artifacts and one file of rows, last used 3, 2 and 1 days ago, of 1, 2 and 3 kB."""
    folder = tmp_path / "cache"
    for age, name in ((3, "aaaa/gptq-4bit-0011"), (2, "bbbb/hqq-2bit-0022")):
        made = folder / "artifacts" / name
        made.mkdir(parents=True)
        (made / "manifest.json").write_text("{}" + " " * 63)
        (made / "weights.safetensors").write_bytes(b"x" * (4 - age) * 1000)
        for path in (*made.iterdir(), made):
            os.utime(path, (NOW - age * DAY,) * 2)
    rows = folder / "distributions" / "0123456789abcdef.safetensors"
    rows.parent.mkdir()
    for path in (rows, rows.with_name(f"{rows.name}.sha256")):
        path.write_bytes(b"x" * 1500)
        os.utime(path, (NOW - DAY,) * 2)
    monkeypatch.setenv("QBENCH_CACHE", str(folder))
    return folder


def test_what_is_kept_is_listed_by_last_use(cache):
    assert [(one.kind, one.about, one.bytes, one.age(NOW)) for one in entries(cache)] == [
        ("weights", "gptq-4bit of aaaa", 1065, "3 days"),
        ("weights", "hqq-2bit of bbbb", 2065, "2 days"),
        ("rows", "unquantized cell 0123456789abcdef", 3000, "1 day"),
    ]


def test_reading_an_entry_is_a_use_of_it(cache):
    oldest = entries(cache)[0]
    mark_used(oldest.path)
    assert entries(cache)[-1].path == oldest.path


def test_the_least_recently_used_goes_first_and_only_as_much_as_must(cache):
    removed, _ = prune(cache, max_bytes=5500, dry_run=True)
    assert [one.about for one in removed] == ["gptq-4bit of aaaa"]
    assert len(entries(cache)) == 3
    removed, _ = prune(cache, max_bytes=3500)
    assert [one.kind for one in removed] == ["weights", "weights"]
    (left,) = entries(cache)
    assert left.kind == "rows"
    assert prune(cache, max_bytes=0)[0] == [left]
    assert not list(cache.rglob("*.safetensors*"))[1:]


def test_what_a_run_holds_stays(cache):
    oldest = entries(cache)[0]
    with FileLock(oldest.path.with_name(f".{oldest.path.name}.lock")):
        removed, _ = prune(cache, max_bytes=4500)
    assert [one.about for one in removed] == ["hqq-2bit of bbbb"]
    assert oldest.path.is_dir()


def test_the_commands_say_what_is_kept_and_what_dead_processes_left(cache, capsys):
    host = os.uname().nodename.replace(".", "-") or "localhost"
    left = cache / "artifacts" / "aaaa" / f".gptq.{host}.4194305.tmp"
    left.mkdir()
    assert not app(["cache", "list"], standalone_mode=False)
    assert capsys.readouterr().out.splitlines()[-1].endswith("3 entries, 0.0 MiB")
    assert not app(["cache", "prune", "--max-gib", "0"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert f"removed files that a dead process left: {left}" in shown
    assert shown.count("removed") == 5
    assert entries(cache) == []
