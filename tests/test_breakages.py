"""A quantizer broken on purpose does not pass the gate: the bundled pair, end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from qbench.gate import baseline
from qbench.gate.check import check
from qbench.store import Store

DEMO = Path(__file__).parent.parent / "recipes" / "demo"
CELL = "softpick/rtn-4bit"
TASK = "demo_pages"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "gate.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "gate",
                "checkpoints": {"softpick": str(DEMO / "softpick")},
                "compute_dtype": "float32",
                "quantizers": ["fp32", {"name": "rtn-4bit", "group_size": 64}],
                "tasks": [TASK],
                "definitions": str(DEMO / "tasks"),
                "data": str(DEMO / "data"),
                "evaluation": {"damage": False},
            }
        )
    )
    return path


def run_recipe(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Run every cell into ``folder``, with a store of quantized weights of its own."""
    from qbench.cli import app

    monkeypatch.setenv("QBENCH_CACHE", str(folder / "cache"))
    arguments = ["run", path, "--out", folder, "--device", "cpu"]
    code = app([str(one) for one in arguments], standalone_mode=False)
    assert code in (None, 0, 1)
    return Store(folder)


@pytest.fixture(scope="module")
def standard(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as monkeypatch:
        store = run_recipe(recipe, folder / "grid", monkeypatch)
    path = folder / "baseline.parquet"
    baseline.make(store, path)
    return path


def verdict(recipe, folder, monkeypatch, standard):
    result = check(run_recipe(recipe, folder, monkeypatch), standard)
    return result, [gate for gate in result.gates if gate.cell == CELL]


def test_the_same_quantizer_passes(recipe, tmp_path, monkeypatch, standard):
    result, gates = verdict(recipe, tmp_path, monkeypatch, standard)
    assert result.exit_code == 0
    assert {gate.task for gate in gates} == {TASK, "audit"}
    assert {gate.outcome for gate in gates} == {"pass"}


def test_scales_off_by_5_per_cent_fail(recipe, tmp_path, monkeypatch, standard):
    from qbench.quantizers import packed

    whole = packed.tensors_of
    monkeypatch.setattr(
        packed, "tensors_of", lambda codes, scale, *rest: whole(codes, scale * 1.05, *rest)
    )
    result, gates = verdict(recipe, tmp_path, monkeypatch, standard)
    assert result.exit_code == 1
    failed = [gate for gate in gates if gate.outcome == "fail"]
    assert ("audit", "weight_error") in {(gate.task, gate.metric) for gate in failed}


def test_a_skipped_layer_fails(recipe, tmp_path, monkeypatch, standard):
    from qbench.quantizers import linears

    whole = linears.linears_of
    monkeypatch.setattr(linears, "linears_of", lambda *of: dict(list(whole(*of).items())[1:]))
    result, gates = verdict(recipe, tmp_path, monkeypatch, standard)
    assert result.exit_code == 1
    assert [gate.outcome for gate in gates] == ["fail"]
    assert "not quantized" in gates[0].reason
    assert "model.layers.0" in gates[0].reason
