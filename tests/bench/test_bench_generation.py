"""The bench of generated answers, on a tiny shape."""

import json

from small_recipe import qbench


def test_it_times_what_it_checked_and_prints_no_more(tmp_path, capfd):
    """Answers that are not those of HFLM in float32 would be an error."""
    out = tmp_path / "bench.json"
    sizes = ("--prompts", 6, "--prompt", 20, "--tokens", 9, "--batch-size", 4)
    options = ("--shape", "tiny", "--device", "cpu", *sizes, "--out", out)
    assert qbench("bench", "generation", *options) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["normalizer"] for row in rows] == ["softmax"] * 4 + ["softpick"] * 4
    assert all(row["seconds"] > 0 for row in rows)
    printed = capfd.readouterr()
    assert printed.out == out.with_suffix(".md").read_text()
    *progress, last = printed.err.splitlines()  # no library's notes
    assert [line.partition(":")[0] for line in progress] == [
        f"{row['normalizer']}, {row['what']}".partition(":")[0] for row in rows
    ]
    assert last == f"written: {out}, {out.with_suffix('.md')}"
