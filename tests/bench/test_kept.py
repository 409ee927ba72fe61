"""A benchmark that is stopped has written what it had measured."""

import json

import pytest

from qbench.bench.attention import table
from qbench.bench.kept import CUT, gathered, kept_in

ABOUT = {
    "hardware": "a GPU",
    "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    "ceilings": {"matmul_tflops": 785.2, "copy_tb_per_s": 4.3},
    "checks": [{"case": "softpick", "what": "output", "error": 2e-3, "limit": 1e-2}],
}
ROW = {"shape": [4, 4096, 16, 64], "kernel": "qbench softpick", "forward": 400.0, "backward": 300.0}


def stopped(*rows):
    yield from rows
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("about", "shown", "row", "parts", "line"),
    [
        (ABOUT, table, ROW, ("prefill", "steps", "decode", "packed"), "| 400 |"),
    ],
)
def test_what_was_measured_before_the_end_is_there(tmp_path, about, shown, row, parts, line):
    out = tmp_path / "bench.json"
    rows = dict.fromkeys(parts, ()) | {parts[0]: stopped(row)}
    with pytest.raises(KeyboardInterrupt):
        gathered(about, [*rows.items()], kept_in(out, shown))
    found = json.loads(out.read_text())
    assert found == {**about, **{name: [] for name in parts}, parts[0]: [row], "whole": False}
    words = " ".join(out.with_suffix(".md").read_text().split())
    assert line in words
    assert words.endswith(CUT.strip())


def test_a_whole_benchmark_says_so(tmp_path):
    out = tmp_path / "bench.json"
    parts = [("rows", [{"a": 1}]), ("more", iter([{"b": 2}])), ("rows", [{"c": 3}])]
    results = gathered({}, parts, kept_in(out, str))
    assert results == {"rows": [{"a": 1}, {"c": 3}], "more": [{"b": 2}], "whole": True}
    assert json.loads(out.read_text()) == results
    assert CUT not in out.with_suffix(".md").read_text()
    assert gathered({}, [("rows", [1])], kept_in(None, str)) == {"rows": [1], "whole": True}


def test_rows_that_come_in_another_order_are_kept_in_theirs(tmp_path):
    out = tmp_path / "bench.json"
    places = {"rows": lambda row: row}
    with pytest.raises(KeyboardInterrupt):
        gathered({}, [("rows", stopped(3, 1, 2))], kept_in(out, str), places)
    assert json.loads(out.read_text())["rows"] == [1, 2, 3]
