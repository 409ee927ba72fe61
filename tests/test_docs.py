"""What the documents say of the layout is so."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "qbench"
NAMED = re.compile(r"`([a-z_]+(?:/|\.py))`")


def test_modules_and_rooms_that_are_named_are_there_and_every_room_is_described():
    layout = (ROOT / "docs" / "architecture.md").read_text().partition("## Rooms")[2]
    names = set(NAMED.findall(layout)) - {"qbench/", "results/"}
    rooms = {f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= names
    assert [name for name in sorted(names) if not (PACKAGE / name).exists()] == []


def test_every_page_stands_in_the_site():
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    docs = ROOT / "docs"
    written = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    written = {path for path in written if not path.startswith("templates/")}
    assert listed == written | {"reference/cli.md"}  # made by `make docs`


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


# Pages with numbers are what their templates and the results make of them.


DOCS = ROOT / "docs"
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


# The page on attention in one's own code does what it says.


def test_ten_lines_train_and_generate_with_softpick(capsys):
    page = (DOCS / "attention.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    torch.manual_seed(0)
    done = {}
    exec(blocks[0], done)
    assert capsys.readouterr().out.strip() == "to be or not to be, that is the question"
    assert done["model"].config._attn_implementation == "qbench-softpick-reference"
    model = done["model"]
    model.set_attn_implementation("sdpa")
    exec(blocks[1].replace("triton", "reference"), {"model": model})
    again = model.generate(done["ids"][:, :6], max_new_tokens=34, do_sample=False, pad_token_id=0)
    assert torch.equal(again, done["out"])


# The notebook of the docs: its cells run, and give what is stored, numbers aside.


def words(outputs):
    """Return the kinds of a cell's outputs, and the first words of their texts without numbers."""
    kinds = [[*one.get("data", {"text": one.get("text")}).items()] for one in outputs]
    texts = [re.sub(r"[^A-Za-z ]", "", "".join(text))[:40] if kind.startswith("text") else ""
             for parts in kinds for kind, text in parts]  # fmt: skip
    return [kind for parts in kinds for kind, _ in parts], texts


@pytest.mark.slow
def test_the_notebook_gives_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    notebook = json.loads((ROOT / "docs" / "notebook.ipynb").read_text())
    shown = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    given = runpy.run_path(str(ROOT / "docs" / "notebook.py"))["run"](notebook)
    assert [words(one) for one in given] == [words(one) for one in shown]
