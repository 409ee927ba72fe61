"""The page's own commands: green on the same results, red on a broken quantizer."""

import os
import re
import shlex
from pathlib import Path

import yaml
from gate.conftest import record_of, update
from small_recipe import qbench
from synthetic import LAYERS, make_store

PAGE = Path(__file__).parents[2] / "docs" / "ci.md"
SIZES = {"demo_choice": 200, "lambada_openai": 200, "wikitext": 16}  # as many as the demo has
CELL = "softpick/hqq-3bit"


def run(line):
    """Return the exit code of a line of the page, run in this process."""
    program, *arguments = shlex.split(os.path.expandvars(line.replace("\\\n", " ")), comments=True)
    assert program in ("qbench", ".venv/bin/qbench")
    return qbench(*arguments)


def test_the_commands_are_green_on_the_same_results_and_red_on_a_broken_quantizer(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    commands, workflow = (
        re.search(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
        for kind in ("bash", "yaml")
    )
    store = make_store(Path("results/demo"), sizes=SIZES, quantizers=("bf16", "hqq-3bit"))
    assert [run(line) for line in commands.splitlines()] == [0, 0]
    assert "## qbench check: pass" in Path("summary.md").read_text()

    audit = record_of(store, CELL).audit
    rolled = audit.modules[0].model_copy(  # one v_proj with its scales rolled by one
        update={"digest": "a" * 64, "weight_error": audit.modules[0].weight_error * 2.09}
    )
    modules = (rolled, *audit.modules[1:])
    update(store, CELL, audit=audit.model_copy(update={"modules": modules}))
    (job,) = yaml.safe_load(workflow)["jobs"].values()
    demo, check = [step["run"] for step in job["steps"] if "run" in step]
    assert (demo, run(check)) == ("make demo", 1)
    assert Path("junit.xml").is_file()
    failed = [line for line in Path("step.md").read_text().splitlines() if "✗ fail" in line]
    assert len(failed) == 1
    assert CELL in failed[0]
    assert LAYERS[0] in failed[0]
