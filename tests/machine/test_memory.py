"""Commands under a bounded address space: they work, or one line says why not; none hangs."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from small_recipe import small_recipe
from synthetic import make_store

ROOT = Path(__file__).parents[2]
MIB = 2**20


def command(*arguments, mib):
    """It ends within a minute, or the test fails."""
    return subprocess.run(
        [sys.executable, "-m", "qbench", *map(str, arguments)], cwd=ROOT, capture_output=True,
        text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (mib * MIB, mib * MIB)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"arc_easy": 40, "wikitext": 6}
    return make_store(tmp_path_factory.mktemp("memory"), sizes=sizes).directory


@pytest.mark.parametrize("mib", [300, 400, 600, 700, 800, 1000])
@pytest.mark.parametrize("name", ["tables", "report"])
def test_too_little_memory_is_one_line(folder, name, mib):
    done = command(name, folder, mib=mib)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines() == [
        f"address space is bounded to {mib:,} MiB (ulimit -v), and this needs 1,024 MiB or more; "
        "say ulimit -v unlimited"
    ]


@pytest.mark.parametrize("name", ["tables", "report"])
def test_little_memory_is_enough(folder, name):
    done = command(name, folder, mib=1024)
    assert done.returncode == 0, done.stderr


def test_planning_needs_as_much(tmp_path):
    path = small_recipe(tmp_path)
    assert command("plan", path, "--device", "cpu", mib=900).returncode == 2
    assert command("plan", path, "--device", "cpu", mib=1024).returncode == 0


@pytest.mark.parametrize("what", ["quantizers", "tasks"])
def test_lists_need_less(what):
    assert command("list", what, mib=300).returncode == 0
