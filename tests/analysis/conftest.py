"""The bundled pair, unquantized and analyzed once for all that reads analyses."""

import pytest
from small_recipe import blocks, qbench, small_recipe

SHORT = ("--device", "cpu", "--samples", 2, "--length", 32)


@pytest.fixture(scope="session")
def analyzed(tmp_path_factory):
    """A recipe, and a results folder with its unquantized cells analyzed."""
    folder = tmp_path_factory.mktemp("analyzed")
    pair = blocks("softmax", "softpick")
    path, out = small_recipe(folder, tasks=["demo_pages"], checkpoints=pair), folder / "out"
    assert qbench("analyze", path, "--out", out, *SHORT) == 0
    return path, out


@pytest.fixture
def undrawn(monkeypatch, tmp_path):
    """Tables and figures, which take longer than an analysis of two short texts, are not made."""
    (tmp_path / "tables.md").write_text("undrawn")
    monkeypatch.setattr("qbench.viewer.figures.write_analyses", lambda _: [tmp_path / "tables.md"])
