"""The built wheel runs by itself, in an empty folder, away from this repository."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_recipe import small_recipe

from qbench.recipe import Recipe

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_the_wheel_runs_its_own_recipe_in_an_empty_folder(tmp_path):
    source, site, empty = tmp_path / "source", tmp_path / "site", tmp_path / "empty"
    source.mkdir()
    empty.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("qbench", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ("--no-deps", "--no-build-isolation")
    subprocess.run([*pip, "wheel", *offline, "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("qbench_eval-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)

    def qbench(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(site), "QBENCH_CACHE": str(tmp_path / "c")}
        return subprocess.run(
            [sys.executable, "-m", "qbench", *arguments],
            cwd=empty, env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip

    assert "recipes/demo.yaml" in qbench("list", "recipes").stdout
    done = qbench(
        "run", "recipes/demo.yaml", "--only", "softmax/fp32", "--limit", "3", "--device", "cpu"
    )
    assert f"comes with qbench: {site}/qbench/bundled/demo.yaml" in done.stderr
    assert "demo_lastword Acc" in done.stdout
    assert (empty / "results" / "demo" / "tables.md").is_file()


def test_a_recipe_that_comes_with_qbench_is_found_from_any_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert Recipe.load("recipes/demo.yaml").name == "demo"
    assert "recipes/demo.yaml: not in this folder; using the one that" in capsys.readouterr().err
    (tmp_path / "recipes").mkdir()
    small_recipe(tmp_path).rename(tmp_path / "recipes" / "demo.yaml")
    assert Recipe.load("recipes/demo.yaml").name == "small"
    assert capsys.readouterr().err == ""


def test_no_page_or_message_installs_the_other_project_called_qbench():
    files = subprocess.run(
        ["git", "ls-files", "*.md", "*.py", "*.toml", "*.yml", "*.yaml", "*.ipynb", "Makefile"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    install = re.compile(r"""pip install[^\n`]*[ '"]qbench(?!-eval)\b""")
    wrong = [name for name in files if install.search((ROOT / name).read_text())]
    assert wrong == []
