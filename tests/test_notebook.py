"""The notebook of the docs: its cells run, and give what is stored, numbers aside."""

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "notebook.ipynb"


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
    notebook = json.loads(PAGE.read_text())
    shown = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    given = runpy.run_path(str(ROOT / "docs" / "notebook.py"))["run"](notebook)
    assert [words(one) for one in given] == [words(one) for one in shown]
