r"""LaTeX tables are a fragment for ``\\input``."""

import shutil
import subprocess

import pytest
from synthetic import key

from qbench.tables import render
from qbench.tables.table import Table, latex

DOCUMENT = r"\documentclass{article}\usepackage{booktabs}\begin{document}\input{t}\end{document}"


def compiled(text, folder):
    if shutil.which("pdflatex") is None:
        pytest.skip("no pdflatex here")
    (folder / "t.tex").write_text(text)
    (folder / "main.tex").write_text(DOCUMENT)
    run = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "main.tex"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:]
    assert "Missing character" not in run.stdout


def test_the_fragment_has_rules_arrows_marks_and_keys_and_compiles(tested, tmp_path):
    text = render(tested, format="tex")
    for part in (r"\toprule", r"\bottomrule", r"$\uparrow$", r"$^{\ddagger}$", r"lambada\_openai"):
        assert part in text
    assert f"% softmax/bf16 {key('softmax', 'bf16')[:16]}" in text
    assert r"\begin{document}" not in text
    assert text.isascii()
    compiled(text, tmp_path)


def test_a_row_that_begins_with_a_bracket_or_star_is_no_argument_of_the_row_before(tmp_path):
    rows = tuple((name, "1") for name in ("[a] b", "[c]", "*d", "[e"))
    text = latex([Table(title="brackets", head=("Row", "One"), rows=rows)])
    assert all(f"{{{name}}} & 1" in text for name, _ in rows)
    compiled(text, tmp_path)
