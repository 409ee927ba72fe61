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
def test_tables_and_numbers_of_pages_are_what_make_numbers_writes():
    made = runpy.run_path(str(DOCS / "read_results.py"))["made"]()
    assert len(made) > 10
    assert [path for path, text in made.items() if path.read_text() != text] == []
