"""A filled server for each test; everything that asks it runs in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub.content import Files, files, fill
from hub.server import Hub

ROOT = Path(__file__).parents[2]
KEPT = ("PATH", "LD_LIBRARY_PATH", "TMPDIR", "VIRTUAL_ENV", "LANG")


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
def qbench(hub: Hub, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Run a command against ``hub``, with caches in ``tmp_path``.

    The environment is made anew: the test suite itself is offline.
    """

    def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        paths = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf"),
                 "QBENCH_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": hub.address}  # fmt: skip
        quick = {"OMP_NUM_THREADS": "1", "GPTQMODEL_DISABLE_PACK_EXT": "1", "COLUMNS": "200"}
        return subprocess.run(
            [sys.executable, "-m", "qbench", *map(str, arguments)], cwd=tmp_path, timeout=240,
            env=kept | paths | quick | environment, capture_output=True, text=True,
        )  # fmt: skip

    return run
