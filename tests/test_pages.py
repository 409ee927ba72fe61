"""Pages with numbers are what their templates and the results make of them."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
TEMPLATES = [path for path in (DOCS / "templates").rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def pages():
    return runpy.run_path(str(DOCS / "generate.py"))["pages"]()


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_a_page_with_numbers_is_what_make_pages_writes(pages, template):
    page = DOCS.parent / template.relative_to(DOCS / "templates")
    assert page.read_text() == pages[page], "change its template, then run `make pages`"


@pytest.mark.slow
def test_tables_and_numbers_of_pages_are_what_make_numbers_writes():
    made = runpy.run_path(str(DOCS / "read_results.py"))["made"]()
    assert len(made) > 10
    assert [path for path, text in made.items() if path.read_text() != text] == []
