"""A quantizer broken on purpose does not pass the gate: a bundled model, end to end."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from small_recipe import DEMO, SOFTPICK, qbench, small_recipe

from qbench.gate import baseline
from qbench.gate.check import check
from qbench.gate.verdict import GateResult
from qbench.quantizers import bnb, hqq, packed, quantize
from qbench.store import Store

GROUPED = ("rtn-4bit", "gptq-4bit", "hqq-3bit")
TASK = "demo_pages"
SLOW = pytest.mark.slow
LAYER = "model.layers.1.self_attn.v_proj"


def run_recipe(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Run it into ``folder``, with a store of quantized weights of its own."""
    monkeypatch.setenv("QBENCH_CACHE", str(folder / "cache"))
    assert qbench("run", path, "--out", folder, "--device", "cpu") in (0, 1)
    return Store(folder)


@pytest.fixture(scope="module")
def standard(tmp_path_factory):
    """A function: the recipe of a quantizer's one cell, and the baseline of its results."""

    @functools.cache
    def of(quantizer: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("good")
        path = small_recipe(
            folder, checkpoints=SOFTPICK, tasks=[TASK], evaluation={"damage": False, "limit": 3},
            quantizers=[{"name": quantizer, "group_size": 64} if quantizer in GROUPED
                        else quantizer],
            calibration={"path": str(DEMO / "calibration.jsonl"), "samples": 8, "length": 128},
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            baseline.make(run_recipe(path, folder / "grid", patch), folder / "baseline.tar.xz")
        return path, folder / "baseline.tar.xz"

    return of


@pytest.fixture
def again(standard, tmp_path, monkeypatch):
    """A function: makes sure of a quantizer's baseline, and gives a function that runs its cell
    again, for its gates by what they ask."""

    def prepared(quantizer: str) -> Callable[[], dict[tuple[str, str], GateResult]]:
        recipe, held = standard(quantizer)

        def gates():
            result = check(run_recipe(recipe, tmp_path, monkeypatch), held)
            return {(gate.task, gate.metric): gate for gate in result.gates}

        return gates

    return prepared


@pytest.mark.parametrize(
    "quantizer",
    ["rtn-4bit", *(pytest.param(name, marks=SLOW) for name in (*GROUPED[1:], "bnb-4bit"))],
)
def test_the_same_quantizer_passes_with_the_same_bits(again, quantizer):
    gates = again(quantizer)()
    assert {gate.outcome for gate in gates.values()} == {"pass"}
    assert gates["audit", "layers"].reason == "same bits in all 28 layers"
    assert gates[TASK, "word_perplexity"].reason == "same outcomes on all 3 documents"


@pytest.mark.parametrize(
    ("quantizer", "factor"),
    [
        ("rtn-4bit", 1.05),
        pytest.param("hqq-3bit", 1.03, marks=SLOW),
        pytest.param("gptq-4bit", 1.03, marks=SLOW),
    ],
)
def test_scales_off_by_a_few_per_cent_fail(again, quantizer, factor, monkeypatch):
    gates, pack, by_hqq = again(quantizer), packed.pack, hqq.quantize

    def store(*of):
        tensors = by_hqq(*of)
        return tensors | {"scale": tensors["scale"] * factor}

    monkeypatch.setattr(packed, "pack", lambda codes, scale, *of: pack(codes, scale * factor, *of))
    monkeypatch.setattr(hqq, "quantize", store)
    gate = gates()["audit", "layer_gain"]
    assert gate.outcome == "fail"
    assert "and 25 more" in gate.reason  # all 28 layers
    assert gate.worse.estimate > 2


def test_one_layer_with_its_scales_rolled_fails_and_is_named(again, monkeypatch):
    gates, whole = again("rtn-4bit"), packed.quantize

    def store(name, layer, settings):
        tensors = whole(name, layer, settings)
        if name == LAYER:
            tensors["scale"] = tensors["scale"].roll(1, dims=0)
        return tensors

    monkeypatch.setattr(packed, "quantize", store)
    gate = gates()["", ""]
    assert gate.outcome == "fail"
    assert gate.reason.startswith(f"failed: audit: {LAYER}: ")
    assert gate.reason.endswith("as if rows or scales were exchanged")


@SLOW  # test_bnb has such layers without a run
@pytest.mark.parametrize("quantizer", ["bnb-4bit", "bnb-8bit"])
def test_bitsandbytes_layers_with_their_scales_rolled_fail(again, quantizer, monkeypatch):
    """The layers that run are changed, as by a kernel that reads another row's scales."""
    gates, whole = again(quantizer), bnb.from_packed

    def rolled(shape, tensors, settings):
        return whole(shape, {**tensors, "absmax": tensors["absmax"].roll(1, dims=0)}, settings)

    monkeypatch.setattr(bnb, "from_packed", rolled)
    assert "fail" in {gate.outcome for gate in gates().values()}


def test_a_skipped_layer_fails(again, monkeypatch):
    gates, whole = again("rtn-4bit"), quantize.linears
    monkeypatch.setattr(quantize, "linears", lambda *of: dict(list(whole(*of).items())[1:]))
    (gate,) = gates().values()
    assert gate.outcome == "fail"
    assert "not quantized" in gate.reason
    assert "model.layers.0" in gate.reason
