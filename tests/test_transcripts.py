"""The transcripts in docs/one-run.md and docs/plugins.md: every command is run, and prints what
stands there, numbers and generated words aside (they hang on the processor)."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from small_recipe import qbench

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "one-run.md"
NUMBER = r"[0-9a-f]{8,}|[+−-]?\d+(?:\.\d+)?"


def blocks(page=PAGE):
    """Commands of a page, word by word, with what follows each."""
    for block in re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            end = next(number for number, line in enumerate(lines) if not line.endswith("\\"))
            command = " ".join(line.removesuffix("\\") for line in lines[: end + 1])
            yield shlex.split(command), "\n".join(lines[end + 1 :])


def run_in_a_process(arguments, folder):
    """What a command prints, in a process of its own."""
    if arguments[0] == "qbench":
        arguments = [sys.executable, "-m", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def plain(text):
    """Without numbers, marks, widths, and names of folders."""
    text = re.sub(r"/\S+/cache", "CACHE", text)
    text = re.sub(r"\b[0-9a-f]{16}\b", "0", text)  # keys
    text = re.sub(r"^qbench \S+( at \S+)?; .*", "PROGRAM; DATE; HARDWARE", text, flags=re.MULTILINE)
    text = re.sub(r"^  \| .*$", "WROTE", text, flags=re.MULTILINE)  # hangs on the processor, too
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d.-]+(?=\.json)", "DATE", text)
    text = re.sub(r"\d+ (s|min|h)\b", "# s", re.sub(NUMBER, "#", text).replace("# min", "# s"))
    text = re.sub(r"# (s|min|h)\b", "# s", text)
    text = re.sub(r"[‡†≈]|× \[", lambda m: "" if len(m[0]) == 1 else "[", text)
    text = re.sub(r"[-:|]{3,}|[|\-:]", " ", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.split()]


def matches(shown, printed):
    """Whether ``printed`` is what ``shown`` says, where a line … stands for any lines."""
    pattern = "".join(
        "(?:.*\n)*" if line == "…" else re.escape(line) + "\n" for line in plain(shown)
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in plain(printed))) is not None


def checked(page, printed_by):
    """The words that every command of the page begins with, each having printed what is shown."""
    names = []
    for arguments, shown in blocks(page):
        names.append(" ".join(arguments[: 2 if arguments[0] == "qbench" else 1]))
        printed = printed_by(arguments)
        assert matches(shown, printed), f"{arguments}\n{printed}\n{plain(printed)}\n{plain(shown)}"
    return names


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    return tmp_path


@pytest.mark.slow
def test_the_page_shows_what_its_commands_print(folder, capfd):
    def printed(arguments):
        if arguments[0] != "qbench":
            return run_in_a_process(arguments, folder)
        assert qbench(*arguments[1:]) == 0, arguments
        return capfd.readouterr().out

    assert checked(PAGE, printed) == [
        "qbench run", "qbench run", "qbench show", "qbench export", "cat", "qbench export", "ls",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_page_on_plugins_shows_what_its_commands_print(folder):
    """In processes of their own: what a file registers stays registered."""
    page = ROOT / "docs" / "plugins.md"
    code = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[1]
    (folder / "clipped.py").write_text(code)
    names = checked(page, lambda arguments: run_in_a_process(arguments, folder))
    assert names == ["qbench run", "qbench plan"]


def test_a_transcript_that_says_something_else_is_found():
    assert matches("a 1.5 ‡\n…\nlast 3", "a  22.75\nmore\nlast 4\n")
    assert not matches("a 1.5\nlast 3", "a 22.75\nmore\nlast 4\n")
    assert not matches("a 1.5\n…", "b 22.75\n")
