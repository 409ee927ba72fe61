"""A quantizer broken on purpose does not pass the gate: a bundled model, end to end."""

from pathlib import Path

import pytest
from small_recipe import DEMO, qbench, small_recipe

from qbench.gate import baseline
from qbench.gate.check import check
from qbench.gate.verdict import GateResult
from qbench.quantizers import bnb
from qbench.store import Store

RTN, GPTQ, HQQ = "softpick/rtn-4bit", "softpick/gptq-4bit", "softpick/hqq-3bit"
TASK = "demo_pages"
ONE = {"checkpoints": {"softpick": str(DEMO / "softpick")}, "tasks": [TASK]}
SLOW = pytest.mark.slow
LAYER = "model.layers.1.self_attn.v_proj"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return small_recipe(
        tmp_path_factory.mktemp("recipe"), **ONE,
        quantizers=["fp32", *({"name": name.partition("/")[2], "group_size": 64}
                              for name in (RTN, GPTQ, HQQ))],
        calibration={"path": str(DEMO / "calibration.jsonl"), "samples": 8, "length": 128},
        evaluation={"damage": False, "limit": 8},
    )  # fmt: skip


def run_recipe(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, only: str = "*") -> Store:
    """Run the cells into ``folder``, with a store of quantized weights of its own."""
    monkeypatch.setenv("QBENCH_CACHE", str(folder / "cache"))
    assert qbench("run", path, "--out", folder, "--device", "cpu", "--only", only) in (0, 1)
    return Store(folder)


@pytest.fixture(scope="module")
def standard(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    with pytest.MonkeyPatch.context() as monkeypatch:
        store = run_recipe(recipe, folder / "grid", monkeypatch)
    path = folder / "baseline.tar.xz"
    baseline.make(store, path)
    return path


@pytest.fixture
def gates_of(recipe, tmp_path, monkeypatch, standard):
    """Runs one cell again; its gates by what they ask."""

    def ask(cell: str) -> dict[tuple[str, str], GateResult]:
        result = check(run_recipe(recipe, tmp_path, monkeypatch, cell), standard)
        return {(gate.task, gate.metric): gate for gate in result.gates if gate.cell == cell}

    return ask


@pytest.mark.parametrize("cell", [GPTQ, *(pytest.param(name, marks=SLOW) for name in (RTN, HQQ))])
def test_the_same_quantizer_passes_with_the_same_bits(gates_of, cell):
    gates = gates_of(cell)
    assert {gate.outcome for gate in gates.values()} == {"pass"}
    assert gates["audit", "layers"].reason == "same bits in all 28 layers"
    assert gates[TASK, "word_perplexity"].reason == "same outcomes on all 8 documents"


@pytest.fixture(
    params=[(RTN, 1.05), pytest.param((GPTQ, 1.03), marks=SLOW), (HQQ, 1.03)],
    ids=["rtn", "gptq", "hqq"],
)
def scaled(request, monkeypatch):
    """A cell whose scales are all too large by a few per cent."""
    from qbench.quantizers import hqq, packed

    cell, factor = request.param
    whole, stored = packed.pack, hqq.quantize

    def store(*of):
        tensors = stored(*of)
        return tensors | {"scale": tensors["scale"] * factor}

    monkeypatch.setattr(
        packed, "pack", lambda codes, scale, *rest: whole(codes, scale * factor, *rest)
    )
    monkeypatch.setattr(hqq, "quantize", store)
    return cell


def test_scales_off_by_a_few_per_cent_fail(gates_of, scaled):
    gate = gates_of(scaled)["audit", "layer_gain"]
    assert gate.outcome == "fail"
    assert "and 25 more" in gate.reason  # all 28 layers
    assert gate.worse.estimate > 2


def test_one_layer_with_its_scales_rolled_fails_and_is_named(gates_of, monkeypatch):
    from qbench.quantizers import packed

    whole = packed.quantize

    def store(name, layer, settings):
        tensors = whole(name, layer, settings)
        if name == LAYER:
            tensors["scale"] = tensors["scale"].roll(1, dims=0)
        return tensors

    monkeypatch.setattr(packed, "quantize", store)
    gate = gates_of(RTN)["", ""]
    assert gate.outcome == "fail"
    assert gate.reason.startswith(f"failed: audit: {LAYER}: ")
    assert gate.reason.endswith("as if rows or scales were exchanged")


def test_a_skipped_layer_fails(gates_of, monkeypatch):
    from qbench.quantizers import quantize

    whole = quantize.linears
    monkeypatch.setattr(quantize, "linears", lambda *of: dict(list(whole(*of).items())[1:]))
    (gate,) = gates_of(RTN).values()
    assert gate.outcome == "fail"
    assert "not quantized" in gate.reason
    assert "model.layers.0" in gate.reason


@pytest.fixture(scope="module")
def bitsandbytes(tmp_path_factory):
    """A recipe with bitsandbytes' layers, and the baseline of its results."""
    folder = tmp_path_factory.mktemp("bnb")
    path = small_recipe(
        folder, **ONE, quantizers=["fp32", "bnb-4bit", "bnb-8bit"],
        evaluation={"damage": False, "limit": 4},
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as monkeypatch:
        store = run_recipe(path, folder / "good", monkeypatch)
    baseline.make(store, folder / "baseline.tar.xz")
    return path, folder / "baseline.tar.xz"


@pytest.mark.parametrize("kind", ["bnb-4bit", pytest.param("bnb-8bit", marks=pytest.mark.slow)])
def test_bitsandbytes_layers_with_their_scales_rolled_fail(
    bitsandbytes, tmp_path, monkeypatch, kind
):
    """The layers that run are changed, as by a kernel that reads another row's scales."""
    path, held = bitsandbytes
    cell = f"softpick/{kind}"
    good = check(run_recipe(path, tmp_path / "same", monkeypatch, cell), held)
    assert {gate.outcome for gate in good.gates if gate.cell == cell} == {"pass"}
    whole = bnb.from_packed

    def rolled(shape, tensors, settings):
        return whole(shape, {**tensors, "absmax": tensors["absmax"].roll(1, dims=0)}, settings)

    monkeypatch.setattr(bnb, "from_packed", rolled)
    bad = check(run_recipe(path, tmp_path / "broken", monkeypatch, cell), held)
    assert "fail" in {gate.outcome for gate in bad.gates if gate.cell == cell}
