"""Every command in the README and in the other pages can be given as it stands; those that read
results, or plan the demo, are run."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import typer
from small_recipe import qbench

from qbench.cli.app import app

ROOT = Path(__file__).parent.parent
ELSEWHERE = "plugins.md"  # its file is not there: tests/test_transcripts.py
DOCS = sorted(path.name for path in (ROOT / "docs").glob("*.md") if path.name != ELSEWHERE)
PAGES = ("README.md", *(f"docs/{name}" for name in DOCS))
# run elsewhere: tests/gate/test_ci.py, tests/test_transcripts.py; or need a GPU machine
RUN_HERE = re.compile(
    r"(tables|show|explain|export) results/pair-27m|view results/pair-27m --export|"
    r"plan recipes/demo"
)


def commands(page):
    """Its lines that begin with qbench, comments and continuations put right."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```(?:bash|console)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    lines = [line.removeprefix("$ ").strip() for line in lines]
    begin = re.compile(r"qbench (?!\d)")  # not the version that a run prints
    return [shlex.split(line, comments=True)[1:] for line in lines if begin.match(line)]


ALL = [(page, arguments) for page in PAGES for arguments in commands(page)]


@pytest.mark.parametrize(("page", "arguments"), ALL, ids=lambda part: str(part)[:60])
def test_a_command_can_be_given_as_it_stands(tmp_path, monkeypatch, page, arguments):
    """Its names and options are known, and what they are given is of the right kind."""
    monkeypatch.chdir(tmp_path)
    arguments = [one for one in arguments if one != "..."]
    command, context = typer.main.get_command(app), None
    name = "qbench"
    while True:
        context = command.make_context(name, list(arguments), parent=context)
        if not hasattr(command, "resolve_command"):
            break
        name, command, arguments = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context.args = []


@pytest.mark.slow
def test_commands_that_read_results_are_run(tmp_path, monkeypatch, capsys):
    packed = shutil.ignore_patterns("grid.json", "grids", "records", "analysis", ".lock")
    for part in ("results/pair-27m", "recipes"):  # as they are in a clone
        shutil.copytree(ROOT / part, tmp_path / part, ignore=packed)
    monkeypatch.chdir(tmp_path)
    here = [arguments for _, arguments in ALL if RUN_HERE.match(" ".join(arguments))]
    assert {arguments[0] for arguments in here} >= {"tables", "view", "show", "explain", "plan"}
    for arguments in {tuple(one) for one in here}:
        assert qbench(*arguments) == 0, arguments
        said = capsys.readouterr()
        assert said.out or "written" in said.err, arguments
