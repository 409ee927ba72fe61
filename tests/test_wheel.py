"""What `pip install qbench` gives: the built wheel runs by itself, away from this repository."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ONE_MODEL = (
    "run --checkpoint mine={demo}/softmax --quantizers fp32,rtn-4bit --tasks demo_lastword"
    " --definitions {demo}/tasks --data {demo}/data --limit 20 --device cpu"
)


@pytest.mark.slow
def test_the_wheel_runs_away_from_the_repository(tmp_path):
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "qbench", source / "qbench", ignore=shutil.ignore_patterns("__pycache__")
    )
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ("--no-deps", "--no-build-isolation")
    subprocess.run([*pip, "wheel", *offline, "-w", tmp_path, source], check=True)
    (wheel,) = tmp_path.glob("qbench-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True)

    def qbench(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(site), "QBENCH_CACHE": str(tmp_path / "c")}
        done = subprocess.run(
            [sys.executable, "-m", "qbench", *arguments],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = "import qbench; print(qbench.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", where], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert Path(found.stdout.strip()).is_relative_to(site)
    assert "| demo_lastword |" in qbench(*ONE_MODEL.format(demo=ROOT / "recipes/demo").split())
    assert qbench("tables", "results/mine", "--format", "tex").strip()
