"""What an unquantized cell keeps for its quantized ones, and that a plain rerun mends it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import yaml

from qbench.cli.app import app
from qbench.store import Store

DEMO = Path(__file__).parents[2] / "recipes" / "demo"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a small recipe on the bundled softpick model; gives its records by quantizer."""
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    path, out = tmp_path / "small.yaml", tmp_path / "out"
    recipe = {
        "name": "small",
        "checkpoints": {"softpick": str(DEMO / "softpick")},
        "compute_dtype": "float32",
        "quantizers": ["fp32", {"name": "rtn-4bit", "group_size": 64}],
        "tasks": ["demo_choice"],
        "definitions": str(DEMO / "tasks"),
        "data": str(DEMO / "data"),
        "evaluation": {"limit": 3},
    }
    path.write_text(yaml.safe_dump(recipe))

    def once(*options, passes=True):
        arguments = ("run", path, "--out", out, "--device", "cpu", *options)
        assert bool(app([str(a) for a in arguments], standalone_mode=False)) != passes
        return {record.quantizer: record for record in Store(out).records()}

    return once


def rows_file(tmp_path):
    (path,) = (tmp_path / "cache").rglob("*.safetensors.sha256")
    return path.with_suffix("")


@pytest.mark.parametrize("damage", ["flipped", "another cell's"])
def test_a_base_that_is_not_whole_is_made_again_by_a_plain_rerun(tmp_path, run, damage):
    first = run()
    path = rows_file(tmp_path)
    whole = path.read_bytes()
    if damage == "flipped":
        changed = bytearray(whole)
        changed[len(whole) // 2] ^= 1
        path.write_bytes(changed)
    else:
        other = whole.replace(first["fp32"].key.encode(), b"0" * 64)
        assert other != whole
        path.write_bytes(other)
        digest = hashlib.sha256(other).hexdigest()
        path.with_name(path.name + ".sha256").write_text(f"{digest}  {path.name}\n")
    for record in (tmp_path / "out").rglob("records/softpick/rtn-4bit/*.json"):
        os.unlink(record)
    again = run()
    assert path.read_bytes() == whole
    assert again["fp32"].finished > first["fp32"].finished
    assert again["rtn-4bit"].damage == first["rtn-4bit"].damage
    assert again["rtn-4bit"].damage.tasks["demo_choice"].distributions.kl.mean > 0
    assert run() == again  # now it is whole


def test_a_base_that_nobody_needs_is_not_made_again(tmp_path, run):
    first = run()
    rows_file(tmp_path).unlink()
    assert run() == first


def test_damage_that_is_not_asked_for_keeps_nothing(tmp_path, run):
    recipe = tmp_path / "small.yaml"
    content = yaml.safe_load(recipe.read_text())
    content["evaluation"]["damage"] = False
    recipe.write_text(yaml.safe_dump(content))
    assert run()["rtn-4bit"].damage is None
    assert not list((tmp_path / "cache").rglob("*.sha256"))


def test_lm_evals_own_scoring_has_no_damage_and_says_why(tmp_path, run):
    damage = run("--scoring", "lm-eval")["rtn-4bit"].damage
    assert "lm-eval shows nobody its log-probabilities" in damage.reason
    assert not damage.retry


def test_a_tightened_tolerance_is_held_against_records_that_are_there(tmp_path, run):
    first = run("--scoring", "fast")
    assert run("--scoring", "fast") == first
    recipe = tmp_path / "small.yaml"
    content = yaml.safe_load(recipe.read_text())
    for largest, status in ((0.4, "ok"), (1e-12, "failed")):
        content["evaluation"]["tolerance"] = {"largest": largest}
        recipe.write_text(yaml.safe_dump(content))
        found = run("--scoring", "fast", passes=status == "ok")
        assert {record.key for record in found.values()} == {r.key for r in first.values()}
        assert {record.status for record in found.values()} == {status}
    assert "more than evaluation.tolerance.largest 1e-12" in found["fp32"].error
