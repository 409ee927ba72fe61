"""Earlier runs into a folder can be named wherever results are read."""

from __future__ import annotations

import json

import pytest
from small_recipe import qbench
from synthetic import make_store

from qbench.errors import ResultsError
from qbench.store import runs

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
    assert f"holds 2 runs; this is the last one, {last}; --run takes another: {first}" in (
        capsys.readouterr().err
    )
    page = (out / "report.html").read_text()
    assert qbench("report", out, "--run", first[:4]) == 0
    own = out / "runs" / first
    assert (out / "report.html").read_text() == page
    assert "hqq-2bit" in (own / "report.html").read_text()
    assert "hqq-2bit" not in page
    assert f'"run":"{first}"' in (own / "report.html").read_text()
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
    with pytest.raises(ResultsError, match=r"with what\? Name another folder, or a run of it"):
        qbench("compare", out)


@pytest.mark.parametrize("command", ["report", "tables", "export", "compare", "check", "show"])
def test_a_run_that_is_not_there_is_said_before_anything_is_written(folder, tmp_path, command):
    out, *_ = folder
    more = {"export": ["--to", "lm-eval"], "check": ["--baseline", tmp_path / "none"]}
    with pytest.raises(ResultsError, match=r"--run none: .* has no such run; it has"):
        qbench(command, out, "--run", "none", *more.get(command, []))
    assert not (out / "runs").exists()
