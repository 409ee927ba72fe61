"""The benches of analyses and of generated answers, on a tiny shape."""

import json

import pytest
from small_recipe import qbench


@pytest.mark.parametrize(
    ("command", "sizes", "rows"),
    [
        ("analysis", ("--samples", 8, "--length", 40, "--prompts", 3, "--prompt", 50), 7),
        ("generation", ("--prompts", 6, "--prompt", 20, "--tokens", 9, "--batch-size", 4), 2),
    ],
)
def test_it_times_what_it_checked_and_prints_no_more(command, sizes, rows, tmp_path, capfd):
    """Decoding that is not what transformers, or HFLM, gives in float32 would be an error."""
    out = tmp_path / "bench.json"
    assert qbench("bench", command, "--shape", "tiny", "--device", "cpu", *sizes, "--out", out) == 0
    found = json.loads(out.read_text())["rows"]
    assert [row["normalizer"] for row in found] == ["softmax"] * rows + ["softpick"] * rows
    assert all(row["seconds"] > 0 for row in found)
    printed = capfd.readouterr()
    assert printed.out == out.with_suffix(".md").read_text()
    *told, last = printed.err.splitlines()  # no library's notes
    assert [line.partition(":")[0] for line in told] == [
        f"{row['normalizer']}, {row['what']}".partition(":")[0] for row in found
    ]
    assert last == f"written: {out}, {out.with_suffix('.md')}"
