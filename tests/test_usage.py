"""Wrong use of the command line: one line that says where, what, and what to do."""

import errno
import inspect
import re
import shlex
import sys

import pytest

from qbench.cli import app as cli
from qbench.errors import ResultsError


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "x", "--document", "1"], "qbench show: --document was removed: `qbench view`"),
        (["report", "x"], "report was removed: `qbench view FOLDER --export DIR` writes"),
        (["run", "--nosuch"], "qbench run: No such option: --nosuch"),
        (["run", "--num_fewshot"], "--num-fewshot is a key of a recipe: tasks: [{name: TASK, num_"),
        (["rnu"], "qbench: No such command 'rnu'"),
        (["tables"], "qbench tables: Missing argument "),
        (["run", "r.yaml", "--workers", "0"], "qbench run: Invalid value for '--workers'"),
        (["run", "r.yaml", "--device", "tpu"], "'tpu' is not one of"),
        (["list", "colours"], "qbench list: Invalid value for"),
        (["run", "r.yaml", "--limit"], "requires an argument"),
        (["run", "--only=a", "r.yaml", "--only", "b"], "for '--only': given twice; join its"),
    ],
)
def test_wrong_use_is_one_line(command, monkeypatch, capsys, arguments, words):
    monkeypatch.setenv("COLUMNS", "80")
    assert command(*arguments) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert words in line
    of = "qbench" if arguments[0] in ("rnu", "report") else f"qbench {arguments[0]}"
    assert line.endswith(f"; `{of} --help` lists what is possible")
    assert said.out == ""


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "/there"), "Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (MemoryError(), "MemoryError"),
        (ResultsError("there: damaged"), "there: damaged"),
        (SystemExit(3), "a plug-in or a library ended the command by sys.exit(3)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_machine_or_a_file_refuses_is_one_line(command, monkeypatch, capsys, error, words):
    def refused(**_):
        raise error

    monkeypatch.setattr(cli, "app", refused)
    assert command() == (1 if isinstance(error, SystemExit) else 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def every_command():
    for name in cli.COMMANDS:
        yield from [(name, of) for of in getattr(cli.load(name), "commands", ())] or [(name,)]


@pytest.mark.parametrize("names", [(), *every_command()], ids=" ".join)
def test_help_fits_80_columns_and_cuts_no_help(names, command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    assert command(*names, "--help") == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= 80
    for line in lines:
        assert not re.search(r"\w… │", line), line  # cut by rich


@pytest.mark.parametrize("names", [*every_command()], ids=" ".join)
def test_every_command_has_examples_that_can_be_given_as_they_stand(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = cli.load(names[0])
    for name in names[1:]:
        command = command.commands[name]
    _, found, examples = inspect.getdoc(command.callback).partition("Examples:\n")
    assert found
    for example in examples.partition("\n\n")[0].splitlines():
        words = shlex.split(example.partition(">")[0])
        assert words[: len(names) + 1] == ["qbench", *names]
        command.make_context(" ".join(names), [*words[len(names) + 1 :]])


def test_output_that_nobody_reads_ends_without_a_word(monkeypatch, capsys):
    """As `qbench list tasks | head -1`."""

    def closed(*_, **__):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(sys, "argv", ["qbench", "list", "tasks"])
    monkeypatch.setattr("typer.echo", closed)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert capsys.readouterr().err == ""
