"""lm-eval's own command beside ours asks the same of the same model."""

import json

import pytest
from lm_eval.tasks import TaskManager
from small_recipe import small_recipe
from tiny import write_tiny

from qbench.bench import command_speed
from qbench.errors import EvaluationError
from qbench.evaluation.evaluate import load_task
from qbench.plan import plan
from qbench.recipe import Recipe


@pytest.fixture
def planned(tmp_path):
    checkpoints = {"a": str(write_tiny(tmp_path / "a", "llama"))}
    path = small_recipe(tmp_path, checkpoints=checkpoints, quantizers=["fp32"])
    return plan(Recipe.load(path), device="cpu")


def test_its_definitions_have_the_plans_documents(tmp_path, planned):
    command = command_speed.lm_eval_command(planned, tmp_path / "definitions")
    manager = TaskManager(include_path=str(tmp_path / "definitions"), include_defaults=False)
    names = command[command.index("--tasks") + 1].split(",")
    theirs = manager.load(names)["tasks"]
    for spec, name in zip(planned.tasks, names, strict=True):
        documents = [list(task.eval_docs) for task in (theirs[name], load_task(spec).task)]
        assert json.dumps(documents[0]) == json.dumps(documents[1])


def test_commands_are_shares_of_lm_evals_mean(tmp_path, planned, monkeypatch):
    ends = iter([0])

    def done(command, **_):
        code = next(ends) if "lm_eval" not in command else 0
        return type("Done", (), {"returncode": code, "stderr": "Traceback:\n  File x\nno memory\n"})

    monkeypatch.setattr(command_speed.subprocess, "run", done)
    clock = iter([0, 10, 10, 13, 13, 27])
    monkeypatch.setattr(command_speed.time, "perf_counter", lambda: next(clock))
    rows = command_speed.bench_command(planned, tmp_path / "r.yaml", ["a/fp32"], log=lambda _: None)
    assert [row["seconds"] for row in rows] == [10, 3, 14]
    assert rows[1]["speed"] == 0.25
    ends, clock = iter([1]), iter(range(4))
    with pytest.raises(
        EvaluationError,
        match=r"^qbench run, all cells: no memory; the command was .* -m qbench run ",
    ):
        command_speed.bench_command(planned, tmp_path / "r.yaml", [], log=lambda _: None)
