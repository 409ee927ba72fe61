"""A quantizer broken on purpose does not pass the gate: a bundled model, end to end."""

import pytest
from small_recipe import DEMO, blocks, run_small

from qbench.gate import baseline
from qbench.gate.check import check
from qbench.gate.verdict import GateResult
from qbench.quantizers import hqq, packed

TASK = "demo_pages"
SLOW = pytest.mark.slow


@pytest.fixture
def gates(tmp_path, monkeypatch):
    """A function: runs a quantizer's one cell anew, and gives its gates by what they ask; those of
    its first run, which makes the baseline, are None."""

    def run(quantizer: str) -> dict[tuple[str, str], GateResult] | None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        monkeypatch.setenv("QBENCH_CACHE", str(folder / "cache"))
        grouped = {"name": quantizer, "group_size": 64}
        store = run_small(
            folder, checkpoints=blocks("softpick"), tasks=[TASK], quantizers=[grouped],
            evaluation={"damage": False, "limit": 3},
            calibration={"path": str(DEMO / "calibration.jsonl"), "samples": 8, "length": 128},
        )  # fmt: skip
        if folder.name == "0":
            return baseline.make(store, tmp_path / "0" / "baseline.tar.xz")
        found = check(store, tmp_path / "0" / "baseline.tar.xz").gates
        return {(gate.task, gate.metric): gate for gate in found}

    return run


@pytest.mark.parametrize(
    ("quantizer", "factor"),
    [
        ("rtn-4bit", 1.05),
        pytest.param("hqq-3bit", 1.03, marks=SLOW),
        pytest.param("gptq-4bit", 1.03, marks=SLOW),
    ],
)
def test_the_same_bits_pass_and_scales_off_by_a_few_per_cent_fail(
    gates, quantizer, factor, monkeypatch
):
    gates(quantizer)
    again = gates(quantizer)
    assert {gate.outcome for gate in again.values()} == {"pass"}
    assert again["audit", "layers"].reason == "same bits in all 14 layers"
    assert again[TASK, "word_perplexity"].reason == "same outcomes on all 3 documents"
    pack, by_hqq = packed.pack, hqq.quantize

    def store(*of):
        tensors = by_hqq(*of)
        return tensors | {"scale": tensors["scale"] * factor}

    monkeypatch.setattr(packed, "pack", lambda codes, scale, *of: pack(codes, scale * factor, *of))
    monkeypatch.setattr(hqq, "quantize", store)
    gate = gates(quantizer)["audit", "layer_gain"]
    assert gate.outcome == "fail"
    assert "and 11 more" in gate.reason  # all 14 layers
    assert gate.worse.estimate > 2
