"""Pages with numbers are what their templates and the results make of them."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = runpy.run_path(str(DOCS / "generate.py"))["pages"]()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_with_numbers_is_what_make_pages_writes(path):
    assert path.read_text() == PAGES[path], "run `make pages`"


@pytest.mark.slow
def test_the_numbers_of_pages_are_those_of_the_records():
    results = runpy.run_path(str(DOCS / "read_results.py"))
    assert results["as_text"](results["read_results"]()) == (DOCS / "numbers.csv").read_text()
