"""The bench of analyses, on a tiny shape."""

import json

from small_recipe import qbench


def test_it_times_a_pass_and_its_parts_and_decodes_like_transformers(tmp_path):
    out = tmp_path / "analysis.json"
    sizes = ("--samples", 8, "--length", 40, "--prompts", 3, "--prompt", 50)
    assert (
        qbench("bench", "analysis", "--shape", "tiny", "--device", "cpu", *sizes, "--out", out) == 0
    )
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * 7
    assert all(row["seconds"] > 0 for row in rows)
    assert "analysis" in out.with_suffix(".md").read_text()
