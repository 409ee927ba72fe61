"""Whether libraries are compiled anew at each start."""

from __future__ import annotations

import compileall
import importlib
import sys

import pytest

from qbench.machine.bytecode import compiled_anew, remedy


@pytest.fixture
def library(tmp_path, monkeypatch):
    folder = tmp_path / "site" / "large_library"
    folder.mkdir(parents=True)
    for number in range(4):
        (folder / f"part{number}.py").write_text("x = 1\n")
    (folder / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(sys, "pycache_prefix", None)
    importlib.invalidate_caches()
    return folder


def test_a_library_without_bytecode_is_named_with_the_remedy_where_none_is_kept(
    library, monkeypatch
):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    names = ("large_library", "not_installed", "sys")
    assert compiled_anew(names) == ["large_library"]
    line = remedy(["large_library"])
    assert line.startswith("large_library: installed without bytecode")
    assert "PYTHONDONTWRITEBYTECODE" in line
    assert line.endswith(f"-m compileall -q -j 0 {library.parent}")
    compileall.compile_dir(library.parent, quiet=2)
    assert compiled_anew(names) == []


def test_what_python_keeps_at_the_first_start_is_not_named(library, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert compiled_anew(("large_library",)) == []


def test_bytecode_in_a_folder_of_its_own_is_found_there(library, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "kept"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert compiled_anew(("large_library",)) == ["large_library"]
    compileall.compile_dir(library.parent, quiet=2)
    assert compiled_anew(("large_library",)) == []
