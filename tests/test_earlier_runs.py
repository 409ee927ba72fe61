"""Earlier runs into a folder can be named wherever results are read."""

import json
import shutil

import pytest
from small_recipe import DEMO, qbench, small_recipe
from synthetic import make_store

from qbench.errors import ResultsError
from qbench.store import Store, find_cell, runs

FIRST = {"quantizers": ("bf16", "hqq-2bit"), "sizes": {"arc_easy": 60}}
LAST = {"quantizers": ("bf16",), "sizes": {"arc_easy": 60}}


@pytest.fixture
def folder(tmp_path):
    """A folder with two runs: its path, and their ids."""
    make_store(tmp_path / "out", **FIRST)
    ((first, _),) = runs(tmp_path / "out")
    make_store(tmp_path / "out", **LAST)
    (last,) = {name for name, _ in runs(tmp_path / "out")} - {first}
    return tmp_path / "out", first, last


def test_report_and_tables_of_an_earlier_run_have_a_folder_of_their_own(folder, capsys):
    out, first, last = folder
    assert qbench("report", out) == 0
    assert f"holds 2 runs; this is the last one, {last}; --run shows another: {first}" in (
        capsys.readouterr().err
    )
    page = (out / "report.html").read_text()
    assert qbench("report", out, "--run", first[:4]) == 0
    own = out / "runs" / first
    assert (out / "report.html").read_text() == page
    assert "hqq-2bit" in (own / "report.html").read_text()
    assert "hqq-2bit" not in page
    assert qbench("tables", out, "--run", first[:4]) == 0
    assert (own / "tables.md").is_file()


def test_check_holds_an_earlier_run_to_a_baseline_of_it(folder, tmp_path, capsys):
    out, first, _ = folder
    base = tmp_path / "base.parquet"
    assert qbench("baseline", out, "--out", base, "--run", first) == 0
    summary = tmp_path / "verdict.json"
    assert qbench("check", out, "--baseline", base, "--run", first, "--json", summary) == 0
    verdict = json.loads(summary.read_text())
    assert verdict["results"] == f"{out} (run {first})"
    assert "hqq-2bit" in summary.read_text()
    # the last run lacks a cell, which never passes
    assert qbench("check", out, "--baseline", base) == 1
    assert "missing: not in the grid of these results" in capsys.readouterr().out


def test_compare_takes_two_runs_of_one_folder(folder, capsys):
    out, first, last = folder
    assert qbench("compare", out, "--run", first) == 0
    said = capsys.readouterr().out
    assert f"softmax/hqq-2bit: not in {out}" in said
    assert f"(run {first})" in said
    assert qbench("compare", out, out, "--run", last, "--run-b", first) == 0
    assert f"not in {out} (run {last})" in capsys.readouterr().out
    with pytest.raises(ResultsError, match=rf"{out}: it has no run 'none'; it has {last}, {first}"):
        qbench("compare", out, "--run", first, "--run-b", "none")
    with pytest.raises(ResultsError, match="name a second folder, or an earlier run"):
        qbench("compare", out)


@pytest.mark.parametrize("command", ["tables", "check"])
def test_a_run_that_is_not_there_is_said_before_anything_is_written(folder, tmp_path, command):
    out, *_ = folder
    more = {"check": ["--baseline", tmp_path / "none"]}
    with pytest.raises(ResultsError, match=r"it has no run 'none'; it has"):
        qbench(command, out, "--run", "none", *more.get(command, []))
    assert not (out / "runs").exists()


@pytest.mark.usefixtures("own_cache")
def test_a_cell_whose_key_another_folder_has_is_copied_and_not_computed(tmp_path, capfd):
    tasks = ["demo_lastword"]
    first = small_recipe(tmp_path, tasks=tasks)
    assert qbench("run", first, "--out", tmp_path / "first", "--device", "cpu") == 0
    named = {"mine": str(DEMO / "softpick")}  # under another name, and its precision too
    quantizers = ["fp32", {"name": "rtn-4bit", "group_size": 64, "label": "other"}]
    again = small_recipe(tmp_path, tasks=tasks, checkpoints=named, quantizers=quantizers)
    out = tmp_path / "second"
    assert qbench("plan", again, "--out", out, "--device", "cpu") == 0
    key = Store(tmp_path / "first").manifest().cells[3].key
    assert f"cached    mine/other  key {key[:16]}" in capfd.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "first").rglob("*")}
    assert qbench("run", again, "--out", out, "--device", "cpu") == 0
    said = capfd.readouterr()
    assert "mine/other: taken from the cache" in said.err
    assert ": done (" not in said.err
    copied, made = Store(out).records()[1], Store(tmp_path / "first").records()[3]
    assert copied.scores == made.scores
    assert copied.started == made.started
    assert copied.files.keys() == made.files.keys() == {"outcomes", "responses", "divergences"}
    assert Store(out).outcomes(copied).equals(Store(tmp_path / "first").outcomes(made))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "first").rglob("*")} == before

    cell = Store(out).manifest().cells[1]
    shutil.rmtree(tmp_path / "first")
    assert find_cell(tmp_path / "cache", cell)[0].cell == "mine/other"
    assert qbench("cache", "prune", "--max-gib", "0") == 0
    assert find_cell(tmp_path / "cache", cell) is None
