"""`qbench cache`: what is kept is listed with who uses it, and bounded."""

import json
import os

import pytest
from filelock import FileLock
from synthetic import make_store

from qbench.cache import entries, prune
from qbench.cli.app import app
from qbench.errors import ResultsError
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
        settings = {"name": name.split("/")[1].rpartition("-")[0], "group_size": 64}
        (made / "manifest.json").write_text(json.dumps({"parts": {"quantizer": settings}}))
        (made / "weights.safetensors").write_bytes(b"x" * (4 - age) * 1000)
        for path in (*made.iterdir(), made):
            os.utime(path, (NOW - age * DAY,) * 2)
    rows = folder / "distributions" / "0123456789abcdef.safetensors"
    rows.parent.mkdir()
    for path in (rows, rows.with_name(f"{rows.name}.digest")):
        path.write_bytes(b"x" * 1500)
        os.utime(path, (NOW - DAY,) * 2)
    monkeypatch.setenv("QBENCH_CACHE", str(folder))
    return folder


def test_no_bound_removes_nothing_and_a_missing_folder_of_results_is_named(cache, tmp_path):
    assert not app(["cache", "prune", "--max-gib", "inf"], standalone_mode=False)
    assert len(entries(cache)) == 3
    with pytest.raises(ResultsError, match=r"--results .*nowhere: no such folder"):
        app(["cache", "list", "--results", str(tmp_path / "nowhere")], standalone_mode=False)


def test_what_is_kept_is_listed_by_last_use(cache):
    assert [(one.kind, one.about, one.bytes, NOW - one.used) for one in entries(cache)] == [
        ("weights", "gptq-4bit of aaaa", 1065, 3 * DAY),
        ("weights", "hqq-2bit of bbbb", 2064, 2 * DAY),
        ("rows", "unquantized cell 0123456789abcdef", 3000, DAY),
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


def test_the_commands_say_who_uses_what_and_what_dead_processes_left(cache, tmp_path, capsys):
    store = make_store(tmp_path / "results" / "grid", sizes={"arc_easy": 5}, quantizers=("bf16",))
    record = store.records()[0]
    path = next((tmp_path / "results").rglob("softmax/bf16/*.json"))
    said = json.loads(path.read_text())
    said["key"] = "0123456789abcdef" + record.key[16:]
    mine = {"name": "hqq-2bit", "group_size": 64}
    said["key_parts"] = {"weights": "bbbb", "quantizer": {"name": "w2a8", "weights": mine}}
    path.write_text(json.dumps(said))
    other = {"weights": "aaaa", "quantizer": {"name": "gptq-4bit", "group_size": 128}}
    path.with_name("0.json").write_text(json.dumps(said | {"key_parts": other, "key": "0"}))
    host = os.uname().nodename.replace(".", "-") or "localhost"
    left = cache / "artifacts" / "aaaa" / f".gptq.{host}.4194305.tmp"
    left.mkdir()
    arguments = ["cache", "list", "--results", str(tmp_path / "results")]
    assert not app(arguments, standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert sum("grid: softmax/bf16" in line for line in lines) == 2
    assert lines[-1].endswith("3 entries, 0.0 MiB")
    assert not app(["cache", "prune", "--max-gib", "0"], standalone_mode=False)
    shown = capsys.readouterr().out
    assert f"removed files that a dead process left: {left}" in shown
    assert shown.count("removed") == 5
    assert entries(cache) == []
