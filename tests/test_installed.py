"""Who holds an importable name, without a look at each file."""

from __future__ import annotations

import sys
import time
from importlib import metadata

import pytest

from qbench.machine.installed import packages_distributions


def test_what_is_installed_here_is_found_as_python_finds_it():
    found, expected = packages_distributions(), metadata.packages_distributions()
    assert {name: owners for name, owners in expected.items() if name in sys.modules} == {
        name: owners for name, owners in found.items() if name in sys.modules and name in expected
    }
    assert found["torch"] == ["torch"]
    assert found["yaml"] == ["PyYAML"]


def test_it_takes_a_fraction_of_the_time():
    assert 3 * seconds(packages_distributions) < seconds(metadata.packages_distributions)


def seconds(function):
    times = []
    for _ in range(3):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


RECORDS = {
    "declared": ("top_level.txt", "one\ntwo\n", {"one": ["Its-Name"], "two": ["Its-Name"]}),
    "a package": ("RECORD", "three/__init__.py,sha256=x,1\nthree/a.py,,\n",
                  {"three": ["Its-Name"]}),
    "a module": ("RECORD", "four.py,,\n../../bin/four,,\nx-1.dist-info/RECORD,,\n",
                 {"four": ["Its-Name"]}),
    "an extension": ("RECORD", f"five{'.abi3.so'},,\n", {"five": ["Its-Name"]}),
    "a quoted path": ("RECORD", '"six/a,b.py",,\n', {"six": ["Its-Name"]}),
    "nothing to import": ("RECORD", "x-1.dist-info/METADATA,,\n", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", RECORDS)
def test_names_come_from_what_a_distribution_says_of_itself(case, tmp_path, monkeypatch):
    file, text, expected = RECORDS[case]
    folder = tmp_path / "x-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: Its-Name\nVersion: 1\n")
    (folder / file).write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert packages_distributions() == expected
