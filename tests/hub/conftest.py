"""A filled server for each test; everything that asks it runs in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hub.content import Files, files, fill
from hub.server import Hub

ROOT = Path(__file__).parents[2]
KEPT = ("PATH", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV", "LANG")


@dataclass
class Ended:
    """How a command ended."""

    code: int
    output: str
    errors: str

    @property
    def line(self) -> str:
        """What it complained of. Fails where that is more or less than one line, or no refusal."""
        assert self.code == 2, f"exit code {self.code}\n{self.output}\n{self.errors}"
        (line,) = [line for line in self.errors.splitlines() if line.strip()]
        return line


Process = Callable[..., Ended]


@pytest.fixture(scope="session")
def content() -> Files:
    return files()


@pytest.fixture
def hub(content: Files) -> Iterator[Hub]:
    server = Hub()
    fill(server, content)
    yield server
    server.close()


@pytest.fixture
def process(hub: Hub, tmp_path: Path) -> Process:
    """Run Python with arguments against ``hub``, with caches in ``tmp_path``.

    The environment is made anew: the test suite itself is offline.
    """

    def run(*arguments: str | Path, **environment: str) -> Ended:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        paths = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"),
                 "QBENCH_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": hub.address}  # fmt: skip
        quick = {"OMP_NUM_THREADS": "1", "GPTQMODEL_DISABLE_PACK_EXT": "1", "COLUMNS": "200"}
        done = subprocess.run(
            [sys.executable, *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True,
            env=kept | paths | quick | environment, timeout=240, check=False,
        )  # fmt: skip
        return Ended(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def qbench(process: Process) -> Process:
    return lambda *arguments, **env: process("-m", "qbench", *arguments, **env)


@pytest.fixture
def ask(process: Process) -> Process:
    """Ask for a ``checkpoint`` or a ``file``, as planning does, without the rest of planning."""
    script = Path(__file__).with_name("ask.py")
    return lambda kind, name, detail="", **env: process(script, kind, name, detail, **env)
