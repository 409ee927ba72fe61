"""The page's own commands: green on the same results, red on a broken quantizer."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from gate_results import audit_of, update
from synthetic import LAYERS, make_store

ROOT = Path(__file__).parents[2]
SIZES = {"demo_choice": 200, "lambada_openai": 200, "wikitext": 16}  # as many as the demo has
QUANTIZERS = ("bf16", "hqq-3bit")
CELL = "softpick/hqq-3bit"


def section() -> str:
    text = (ROOT / "docs" / "ci.md").read_text()
    return re.search(r"^# In CI\n(.*?)(^## |\Z)", text, re.DOTALL | re.MULTILINE)[1]


def commands() -> str:
    (block,) = re.findall(r"```bash\n(.*?)```", section(), re.DOTALL)
    return block


def steps() -> list[str]:
    """What the shipped workflow runs; ``make demo`` first, whose results the tests make."""
    (block,) = re.findall(r"```yaml\n(.*?)```", section(), re.DOTALL)
    jobs = yaml.safe_load(block)["jobs"].values()
    runs = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    assert runs[0] == "make demo"
    return runs[1:]


@pytest.fixture
def clone(tmp_path):
    """A clean clone after ``make demo``: results/demo, and qbench in .venv/bin."""
    installed = tmp_path / ".venv" / "bin" / "qbench"
    installed.parent.mkdir(parents=True)
    installed.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m qbench "$@"\n')
    installed.chmod(0o755)
    make_store(tmp_path / "results" / "demo", sizes=SIZES, quantizers=QUANTIZERS)
    return tmp_path


def run(clone: Path, script: str) -> subprocess.CompletedProcess:
    search = f"{clone / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {
        "PATH": search,
        "PYTHONPATH": str(ROOT),
        "GITHUB_STEP_SUMMARY": str(clone / "step.md"),
    }
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=clone, env=os.environ | environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip


def test_the_commands_are_green_on_the_same_results_and_red_on_a_broken_quantizer(clone):
    first = run(clone, commands())
    assert first.returncode == 0, first.stdout + first.stderr
    assert "## qbench check: pass" in (clone / "summary.md").read_text()

    store = make_store(clone / "results" / "demo", sizes=SIZES, quantizers=QUANTIZERS)
    audit = audit_of(store, CELL)
    rolled = audit.modules[0].model_copy(  # one v_proj with its scales rolled by one
        update={"digest": "a" * 64, "weight_error": audit.modules[0].weight_error * 2.09}
    )
    modules = (rolled, *audit.modules[1:])
    update(store, CELL, audit=audit.model_copy(update={"modules": modules}))
    codes = [run(clone, step).returncode for step in steps()]
    assert codes == [0] * (len(codes) - 1) + [1]
    assert (clone / "junit.xml").is_file()
    failed = [line for line in (clone / "step.md").read_text().splitlines() if "✗ fail" in line]
    assert len(failed) == 1
    assert CELL in failed[0]
    assert LAYERS[0] in failed[0]
