"""LaTeX tables compile as they stand and fit the page, whatever the checkpoints are called."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from synthetic import PAPER, key, make_store

from qbench.comparison.compare import compare
from qbench.tables import render
from qbench.tables.latex import GAP, LANDSCAPE, PORTRAIT, latex, split, table_width, text_width
from qbench.tables.layout import Layout
from qbench.text import for_latex

SIZES = {"arc_easy": 400, "lambada_openai": 300, "wikitext": 30}
QUANTIZERS = ("bf16", "hqq-2bit", "hqq-8bit")
MANY = ("softmax", "softpick", "rectified-only", "scalable-softpick", "sigmoid")
LONG = ("vanilla-340M-4096-model-with-a-very-long-name-and-more-of-it-yet", "W" * 64)


@pytest.fixture(scope="module")
def tested(tmp_path_factory):
    store = make_store(
        tmp_path_factory.mktemp("tested"),
        sizes=SIZES,
        quantizers=QUANTIZERS,
        shift={"softmax/hqq-2bit": 1.0},
        failed=("softpick/hqq-8bit",),
    )
    return compare(store)


@pytest.fixture(scope="module", params=[("softmax", "softpick"), MANY, LONG],
                ids=["a pair", "five", "long names"])  # fmt: skip
def any_names(request, tmp_path_factory):
    store = make_store(
        tmp_path_factory.mktemp("names"),
        sizes=SIZES,
        quantizers=QUANTIZERS,
        checkpoints=request.param,
    )
    return compare(store)


def compiled(text, folder):
    """The PDF's pages and what pdfLaTeX printed."""
    if shutil.which("pdflatex") is None:
        pytest.skip("no pdflatex here")
    (folder / "tables.tex").write_text(text)
    run = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "tables.tex"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:]
    return run.stdout


@pytest.mark.parametrize("published", [None, "softpick-340m"])
def test_latex_compiles_as_it_stands_and_nothing_runs_off_the_page(any_names, tmp_path, published):
    told = compiled(render(any_names, format="tex", published=published), tmp_path)
    assert "Missing character" not in told
    assert "Overfull" not in told
    assert (tmp_path / "tables.pdf").stat().st_size > 10_000


def test_the_papers_full_grid_fits_beside_what_the_paper_prints(tmp_path):
    comparison = compare(make_store(tmp_path / "grid", quantizers=PAPER))
    told = compiled(render(comparison, format="tex", published="softpick-340m"), tmp_path)
    assert "Overfull" not in told


@pytest.mark.parametrize("published", [None, "softpick-340m"])
def test_every_table_is_as_narrow_as_its_page(any_names, published):
    """As the test above, by the widths alone: where there is no TeX."""
    text = render(any_names, format="tex", published=published)
    page = LANDSCAPE if "landscape," in text else PORTRAIT
    widths = [
        table_width([float(points) for points in re.findall(r"\{([\d.]+)pt\}", columns)])
        for columns in re.findall(r"\\begin\{longtable\}\{(.*)\}", text)
    ]
    assert len(widths) >= 2
    assert max(widths) <= page


def test_the_page_is_turned_only_where_a_table_needs_it(tmp_path):
    store = make_store(tmp_path, sizes=SIZES, quantizers=("bf16",), checkpoints=("a", "b"))
    assert "landscape" not in render(compare(store), format="tex")


def test_columns_that_do_not_fit_go_on_in_another_part_each_with_the_words():
    assert split([100.0, 80.0], [[100.0, 90.0]] * 5) == [[0, 1], [2, 3], [4]]
    assert split([100.0], [[50.0]] * 3) == [[0, 1, 2]]
    assert split([100.0], [[900.0], [50.0]]) == [[0], [1]]
    assert table_width([10.0, 20.0]) == 30.0 + GAP


def test_text_is_set_as_wide_as_it_is_taken_to_be(tmp_path):
    texts = ["arc_easy [validation]", "+28111.16‡", "× [0.99985, 1.00046]", "WMW & 100 % ±≈",
             "lambada_openai", "{a}<b>|\\^~#$", "softpick’s − softmax’s", "— missing"]  # fmt: skip
    boxes = "".join(
        rf"\setbox\b\hbox{{{for_latex(text)}}}\typeout{{WIDTH \the\wd\b}}" for text in texts
    )
    begin = r"\documentclass{article}\begin{document}\newbox\b\scriptsize "
    told = compiled(rf"{begin}{boxes} x\end{{document}}", tmp_path)
    measured = [float(points) for points in re.findall(r"WIDTH ([\d.]+)pt", told)]
    for text, width in zip(texts, measured, strict=True):
        assert width - 0.4 <= text_width(text) <= width + 3.5, text  # kerning only draws together


def test_latex_has_rules_arrows_marks_and_keys(tested):
    text = render(tested, format="tex")
    for part in (r"\toprule", r"\midrule", r"\bottomrule", r"$\uparrow$", r"$^{\ddagger}$"):
        assert part in text
    assert r"lambada\_openai" in text
    assert f"%   softmax/bf16 {key('softmax', 'bf16')[:16]}" in text
    assert text.isascii()


def test_a_line_break_in_a_checkpoints_name_ends_no_comment():
    name = "a\n\\input{/etc/passwd}\r\\newpage\x85\u2028\\stop"
    layout = Layout(
        title=name, method=name, head=("Task", "Metric", "Quantization", name),
        rows=((name, name, name, name),), begins_task=(True,), notes=(name,),
        keys=(f"{name}/bf16 0123",),
    )  # fmt: skip
    text = latex([layout])
    assert not re.search(r"\\(input|newpage|stop)", text)
    commented = [line for line in text.splitlines() if line.startswith("%")]
    assert len(commented) == 2
    assert all("input" in line for line in commented)
