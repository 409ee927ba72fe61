"""No kernel has a formula for a family that it does not name."""

import ast
from pathlib import Path

import pytest

from qbench.attention import kernels

FILES = sorted(Path(kernels.__file__).parent.glob("*.py"))


def mentions(node, name):
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))


def ends_in_a_refusal(branch):
    while len(branch.orelse) == 1 and isinstance(branch.orelse[0], ast.If):
        branch = branch.orelse[0]
    calls = [one.func for last in branch.orelse for one in ast.walk(last) if hasattr(one, "func")]
    return any(getattr(called, "attr", None) == "static_assert" for called in calls)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_branch_on_the_family_ends_in_a_static_assert(path):
    tree = ast.parse(path.read_text())
    branches = [n for n in ast.walk(tree) if isinstance(n, ast.If) and mentions(n.test, "FAMILY")]
    later = {id(branch.orelse[0]) for branch in branches if len(branch.orelse) == 1}
    first = [branch for branch in branches if id(branch) not in later]
    assert [branch.lineno for branch in first if not ends_in_a_refusal(branch)] == []
    shorter = [n for n in ast.walk(tree) if isinstance(n, ast.IfExp | ast.BoolOp)]
    inside = {id(part) for branch in branches for part in ast.walk(branch.test)}
    hidden = [n.lineno for n in shorter if mentions(n, "FAMILY") and id(n) not in inside]
    assert hidden == []


def test_there_are_branches_to_find():
    assert sum("FAMILY ==" in path.read_text() for path in FILES) >= 2
