"""Which of our own modules are part of a cell's key."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import qbench
from qbench.code import WITHOUT_EFFECT, code_digest, digest_of

PACKAGE = Path(qbench.__file__).parent
CAN_CHANGE_A_NUMBER = (
    "attention", "cell.py", "checkpoints", "evaluation", "quantizers",
)  # fmt: skip


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    copied = tmp_path_factory.mktemp("code") / "qbench"
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    return copied


def edited(package, name):
    """The digest while one module of ``name``, a module or a room, has another line."""
    module = package / name if name.endswith(".py") else max((package / name).rglob("*.py"))
    source = module.read_text()
    module.write_text(source + "\nx = 1\n")
    digest = digest_of(package)
    module.write_text(source)
    return digest


@pytest.mark.parametrize("name", CAN_CHANGE_A_NUMBER)
def test_the_digest_changes_with_a_module_that_can_change_a_number(package, name):
    assert edited(package, name) != digest_of(package)


@pytest.mark.parametrize("name", [name for name in WITHOUT_EFFECT if (PACKAGE / name).exists()])
def test_the_digest_stays_with_a_module_that_cannot(package, name):
    assert edited(package, name) == digest_of(package)


def test_a_new_a_removed_and_a_renamed_module_change_the_digest(package):
    before = digest_of(package)
    new = package / "quantizers" / "new.py"
    new.write_text("x = 1\n")
    added = digest_of(package)
    renamed = new.rename(package / "quantizers" / "newer.py")
    assert len({before, added, digest_of(package)}) == 3
    renamed.unlink()
    assert digest_of(package) == before


def test_a_module_of_unknown_effect_counts(package):
    before = digest_of(package)
    new = package / "something_new.py"
    new.write_text("x = 1\n")
    assert digest_of(package) != before
    new.unlink()


def test_the_digest_is_the_same_in_another_process_and_needs_no_torch():
    code = "import sys, qbench.code; print(qbench.code.code_digest(), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [code_digest(), "False"]
