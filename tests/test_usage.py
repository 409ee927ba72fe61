"""Wrong use of the command line: one line that says where, what, and what to do."""

from __future__ import annotations

import sys

import pytest
import typer

from qbench.cli import app as cli


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--nosuch"], "qbench run: No such option: --nosuch"),
        (["rnu"], "qbench: No such command 'rnu'"),
        (["tables"], "qbench tables: Missing argument "),
        (["run", "r.yaml", "--limit", "0"], "qbench run: Invalid value for '--limit'"),
        (["run", "r.yaml", "--device", "tpu"], "'tpu' is not one of"),
        (["list", "colours"], "qbench list: Invalid value for"),
        (["run", "r.yaml", "--limit"], "requires an argument"),
    ],
)
def test_wrong_use_is_one_line(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["qbench", *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert words in line
    command = "qbench" if arguments[0] == "rnu" else f"qbench {arguments[0]}"
    assert line.endswith(f"; `{command} --help` shows what there is")
    assert said.out == ""


def test_help_is_no_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["qbench", "run", "--help"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 0
    assert "--save-recipe" in capsys.readouterr().out


def every_command(group, names=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from every_command(command, (*names, name))
        else:
            yield (*names, name)


@pytest.mark.parametrize(
    "names", [(), *every_command(typer.main.get_command(cli.app))], ids=" ".join
)
def test_help_fits_80_columns(monkeypatch, capsys, names):
    monkeypatch.setattr(sys, "argv", ["qbench", *names, "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    with pytest.raises(SystemExit):
        cli.main()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
