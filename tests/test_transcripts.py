"""The transcripts in docs/one-run.md: every command is run, and prints what stands there, numbers
aside (they hang on the processor)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from small_recipe import qbench

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "one-run.md"
NUMBER = r"[0-9a-f]{8,}|[+−-]?\d+(?:\.\d+)?"


def blocks():
    """Commands of the page with what follows each."""
    found = re.findall(r"^```console\n\$ (.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    for block in found:
        lines = block.splitlines()
        end = next(number for number, line in enumerate(lines) if not line.endswith("\\"))
        command = " ".join(line.removesuffix("\\") for line in lines[: end + 1])
        yield shlex.split(command)[1:], "\n".join(lines[end + 1 :])


def plain(text):
    """Without numbers, marks, widths, and names of folders."""
    text = re.sub(r"/\S+/cache", "CACHE", text)
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


@pytest.mark.slow
def test_the_page_shows_what_its_commands_print(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    names = []
    for arguments, shown in blocks():
        names.append(arguments[0])
        assert qbench(*arguments) == 0, arguments
        printed = capfd.readouterr().out
        assert matches(shown, printed), f"{arguments}\n{printed}\n{plain(printed)}\n{plain(shown)}"
    assert names == ["run", "run", "show", "show", "show", "cache", "cache", "export"]


def test_a_transcript_that_says_something_else_is_found():
    assert matches("a 1.5 ‡\n…\nlast 3", "a  22.75\nmore\nlast 4\n")
    assert not matches("a 1.5\nlast 3", "a 22.75\nmore\nlast 4\n")
    assert not matches("a 1.5\n…", "b 22.75\n")
