"""LaTeX tables compile as they stand and fit the page, whatever the checkpoints are called."""

import shutil
import subprocess

import pytest
from synthetic import key, make_store

from qbench.comparison.compare import compare
from qbench.tables import render
from qbench.tables.table import ROWS_A_PAGE, Table, latex

SIZES = {"arc_easy": 400, "lambada_openai": 300, "wikitext": 30}
QUANTIZERS = ("bf16", "hqq-2bit", "hqq-8bit")
MANY = ("softmax", "softpick", "rectified-only", "scalable-softpick", "sigmoid")
LONG = ("vanilla-340M-4096-model-with-a-very-long-name-and-more-of-it-yet", "W" * 64)


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


def test_a_long_table_goes_on_on_another_page():
    rows = tuple((str(number), "1") for number in range(2 * ROWS_A_PAGE + 1))
    text = latex([Table(title="long", head=("Row", "One"), rows=rows)])
    assert text.count(r"\begin{tabular}") == text.count(r"\toprule") == 3
    assert all(rf"{number} & 1 \\" in text for number in range(len(rows)))


def test_a_row_that_begins_with_a_bracket_or_star_is_no_argument_of_the_row_before(tmp_path):
    rows = tuple((name, "1") for name in ("[a] b", "[c]", "*d", "[e"))
    text = latex([Table(title="brackets", head=("Row", "One"), rows=rows)])
    assert all(f"{{{name[0]}}}{name[1:]} & 1" in text for name, _ in rows)
    compiled(text, tmp_path)


def test_latex_has_rules_arrows_marks_and_keys(tested):
    text = render(tested, format="tex")
    for part in (r"\toprule", r"\midrule", r"\bottomrule", r"$\uparrow$", r"$^{\ddagger}$"):
        assert part in text
    assert r"lambada\_openai" in text
    assert f"%   softmax/bf16 {key('softmax', 'bf16')[:16]}" in text
    assert text.isascii()
