"""The bench of generated answers, on a tiny shape."""

import json
import subprocess
import sys


def test_it_times_both_ways_of_answering_and_prints_no_more(tmp_path):
    out = tmp_path / "generation.json"
    sizes = ("--prompts", 6, "--prompt", 20, "--tokens", 9, "--batch-size", 4)
    command = ("bench", "generation", "--shape", "tiny", "--device", "cpu", *sizes, "--out", out)
    ran = subprocess.run(
        [sys.executable, "-m", "qbench", *map(str, command)],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    rows = json.loads(out.read_text())["rows"]
    assert [row["normalizer"] for row in rows] == ["softmax"] * 2 + ["softpick"] * 2
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert ran.stdout == out.with_suffix(".md").read_text()
    assert ran.stderr == f"written: {out}, {out.with_suffix('.md')}\n"  # no library's notes
