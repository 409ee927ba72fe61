"""The bench of analyses, on a tiny shape."""

import json
import subprocess
import sys


def test_it_times_a_pass_and_its_parts_decodes_like_transformers_and_prints_no_more(tmp_path):
    out = tmp_path / "analysis.json"
    sizes = ("--samples", 8, "--length", 40, "--prompts", 3, "--prompt", 50)
    command = ("bench", "analysis", "--shape", "tiny", "--device", "cpu", *sizes, "--out", out)
    ran = subprocess.run(
        [sys.executable, "-m", "qbench", *map(str, command)],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * 7
    assert all(row["seconds"] > 0 for row in rows)
    assert ran.stdout == out.with_suffix(".md").read_text()
    assert ran.stderr == f"written: {out}, {out.with_suffix('.md')}\n"  # no library's notes
