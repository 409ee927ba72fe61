"""What the documents say of the layout is so."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "qbench"
NAMED = re.compile(r"`([a-z_]+(?:/|\.py))`")
LAYOUT = {"docs/architecture.md": "## Rooms"}


def named(document: str) -> set[str]:
    """Modules and rooms that a document's section on the layout names."""
    return set(NAMED.findall((ROOT / document).read_text().partition(LAYOUT[document])[2]))


@pytest.mark.parametrize("document", LAYOUT)
def test_what_is_named_is_there(document):
    names = named(document) - {"qbench/", "results/"}
    assert names
    assert [name for name in sorted(names) if not (PACKAGE / name).exists()] == []


def test_every_room_is_described():
    rooms = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert rooms - named("docs/architecture.md") == set()


def test_every_page_stands_in_the_site():
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    docs = ROOT / "docs"
    written = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    written = {path for path in written if not path.startswith("templates/")}
    assert listed == written | {"reference/cli.md"}  # made by `make docs`


def test_the_makefile_and_readme_name_the_versions_of_python_that_pip_takes():
    project, makefile, readme = (
        (ROOT / name).read_text() for name in ("pyproject.toml", "Makefile", "README.md")
    )
    first, beyond = map(int, re.search(r">=3\.(\d+),<3\.(\d+)", project).groups())
    assert f"not (3, {first}) <= sys.version_info < (3, {beyond})" in makefile
    for text in (makefile, readme):
        assert f"Python 3.{first} to 3.{beyond - 1}" in text


def test_make_demo_computes_what_another_clone_has_computed():
    """By a cache of its own, so that it can be timed."""
    assert "demo: export QBENCH_CACHE ?= $(CURDIR)/" in (ROOT / "Makefile").read_text()


def headings(page):
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize(
    "page",
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "results" / "bench").glob("*.md")],
    ids=lambda path: path.name,
)
def test_links_lead_to_files_and_headings(page):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists() or name == "reference/cli.md", link
        assert not heading or heading in headings(target), link


def test_functions_of_the_walk_are_there():
    walk = (ROOT / "docs" / "architecture.md").read_text()
    walk = walk[walk.index("## The walk") : walk.index("## Where to add")]
    rows = re.findall(r"^\| (?:`([\w/.]+)` )?\| `([\w.]+)` \|", walk, re.MULTILINE)
    assert len(rows) > 15
    file, missing = "", []
    for name, function in rows:
        file = name or file
        code = (PACKAGE / file).read_text() if (PACKAGE / file).exists() else ""
        missing += [] if f"def {function.split('.')[-1]}(" in code else [f"{file}: {function}"]
    assert missing == []
