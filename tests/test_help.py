"""Help of every command at 80 columns: no cut words, no types of Python."""

from __future__ import annotations

import re

import pytest
import typer

from qbench.cli.app import app


def commands(group=None, names=()):
    """The names of every command, groups with theirs."""
    group = typer.main.get_command(app) if group is None else group
    yield names
    for name in group.list_commands(typer.Context(group)):
        command = group.commands[name]
        if hasattr(command, "commands"):
            yield from commands(command, (*names, name))
        else:
            yield (*names, name)


@pytest.mark.parametrize("names", list(commands()), ids=lambda names: " ".join(names) or "qbench")
def test_help_fits_80_columns_and_reads_as_words(names, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    with pytest.raises(SystemExit) as end:
        app([*names, "--help"])
    assert end.value.code == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    for line in lines:
        assert not re.search(r"\w… │", line), line  # cut by rich
        plain = re.sub(r"\[[\d<=]*x[\d<=>]*\]", "", line)
        assert plain.count("<") == plain.count(">"), line  # choices that go on in the next line
        assert not re.search(r"<(bool|str|path|int|float|list)\b", line), line
