"""Every weight matrix of every class is quantized, or named with the reason why it is not."""

import pytest
import torch
from quantizer_models import make, parse
from tiny import CONFIGS, KINDS, SPARSE_KEYS, STATES, tiny_model
from transformers.models.mixtral import modeling_mixtral

from qbench.checkpoints.find import tried_classes
from qbench.errors import QuantizationError
from qbench.quantizers import config_of
from qbench.quantizers.audit.compare import audit
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.linear import Experts, is_fused, linearize, linears, matrices

# Of GPT-BigCode in transformers 5.17.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


def ids(seed, samples):
    return torch.randint(2, 400, (samples, 24), generator=torch.Generator().manual_seed(seed))


PROBE = ids(0, 2)
CALIBRATION = Calibration(ids=ids(1, 8))
WORDS = {
    "router": "routers", "gate": "routers", "conv": "short convolutions", "A_log": "state spaces",
}  # fmt: skip
# Of a tiny model's weights more than the hundredth that need not be said.
SAID = dict.fromkeys(("mamba2", "falcon_h1", "nemotron_h"), ("conv1d",)) | {
    "mamba": ("conv1d", "A_log", "dt_proj"),
    "gemma3n_text": ("correction_coefs", "prediction_coefs", "modality_router"),
}
QUANTIZED = {row.model_type: row.quantized for row in tried_classes()}
FUSED = [kind for kind, quantized in QUANTIZED.items() if "experts" in quantized]


def report(kind, folder, name, **stated):
    chosen = {"compute_dtype": "float32", **({} if "bnb" in name else {"group_size": 16}), **stated}
    quantizer = parse(name, {} if name == "fp32" else chosen)
    original, model = (tiny_model(kind).to(getattr(torch, chosen["compute_dtype"])) for _ in "ab")
    made = make(quantizer, folder, model=model, calibrated=CALIBRATION)
    return audit(original, made, quantizer, PROBE)


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_is_left_out_is_named_with_the_reason(kind, tmp_path):
    said = SAID.get(kind, ())
    found = report(kind, tmp_path, "rtn-4bit", ignore=said)
    assert found.problems == ()
    assert found.coverage > (0.85 if said else 0.97)
    because = "ignore of the settings" if said else "no linear layer"
    assert all(because in found.left_out_because[name] for name in found.left_out)
    words = {word for name in found.left_out for sign, word in WORDS.items() if sign in name}
    listed = QUANTIZED[kind].partition("; not ")[2]
    assert words == {word for word in WORDS.values() if word in listed}


@pytest.mark.parametrize("kind", KINDS)
def test_an_unquantized_model_passes(kind, tmp_path):
    found = report(kind, tmp_path, "fp32")
    assert found.problems == ()
    assert (found.coverage, found.bits_per_weight) == (0, 32)


METHODS = (
    ("hqq-4bit", {"optimize": False}), ("bnb-4bit", {}), ("bnb-8bit", {}), ("gptq-4bit", {}),
    ("gptq-4bit", {"desc_act": True, "true_sequential": False}),
)  # fmt: skip
DAILY = {
    ("gpt_oss", "hqq-4bit"), ("gpt2", "bnb-8bit"), ("mixtral", "bnb-4bit"), ("gpt2", "gptq-4bit"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "stated"),
    [
        pytest.param(kind, *method, marks=() if (kind, method[0]) in DAILY else pytest.mark.slow)
        for kind in ("mixtral", "deepseek_v3", "gpt_oss", "phimoe", "gpt2")
        for method in METHODS
    ],
    ids=str,
)
def test_experts_and_turned_layers_are_quantized_by_every_method(kind, name, stated, tmp_path):
    found = report(kind, tmp_path, name, **stated)
    assert found.problems == ()
    assert found.coverage > 0.97
    experts = [module for module in found.modules if ".experts." in module.name]
    layers = QUANTIZED[kind].count("router") and 8 * (2 if kind == "gpt_oss" else 1)
    assert len(experts) == layers


@pytest.mark.parametrize(
    ("kind", "left_out"), [("mixtral", ("gate",)), ("qwen3_next", ("mlp.gate", "conv1d"))]
)
def test_inputs_of_what_is_no_linear_layer_stay_as_they_are(kind, left_out, tmp_path, monkeypatch):
    """A mixture's routers, for one: as weights, they need not be named if they are small."""
    quantizer = config_of("rtn-4bit:group_size=16+int8-token", compute_dtype="float32")
    made = make(quantizer, tmp_path, model=tiny_model(kind))
    refused = audit(tiny_model(kind), made, quantizer, PROBE).problems  # of tiny models 2 %
    assert all("not quantized" in line for line in refused)
    for module in ("weights", "activations"):
        monkeypatch.setattr(f"qbench.quantizers.audit.{module}.MOST_UNQUANTIZED", 0.1)
    found = audit(tiny_model(kind), made, quantizer, PROBE)
    assert found.problems == ()
    assert found.activations.left_out
    assert all(name.endswith(left_out) for name in found.activations.left_out)


@pytest.mark.parametrize("kind", ["gpt2", "bloom", "falcon", "mamba2"])
def test_noise_comes_after_each_layer_whatever_its_list_is_called(kind, tmp_path):
    quantizer = config_of({"name": "noise-floor"}, compute_dtype="float32")
    found = audit(
        tiny_model(kind), make(quantizer, tmp_path, model=tiny_model(kind)), quantizer, PROBE
    )
    assert found.problems == ()
    assert 0 < found.logits_moved < 1e-3


def test_bitsandbytes_does_not_choose_an_experts_kernel_by_its_number_of_rows(tmp_path):
    """On a GPU the library multiplies few rows by kernels that round elsewhere than for many."""
    chosen = parse("bnb-4bit", {"compute_dtype": "float32"})
    layers = linears(make(chosen, tmp_path, model=tiny_model("mixtral")))
    assert not any(layer.by_library("cpu") for layer in layers.values())
    assert {n.split(".")[3] for n, layer in layers.items() if layer.by_library("cuda")} == {
        "self_attn"
    }


@pytest.mark.parametrize("kind", FUSED)
def test_experts_taken_apart_compute_what_they_did(kind):
    model = tiny_model(kind)
    before = model(PROBE, use_cache=False).logits
    weights = {name: one.weight.clone() for name, one in matrices(model).items()}
    fused = sum(is_fused(module) for module in model.modules())
    linearize(model)
    assert sum(isinstance(module, Experts) for module in model.modules()) == fused > 0
    assert not any(is_fused(module) for module in model.modules())
    torch.testing.assert_close(model(PROBE, use_cache=False).logits, before, rtol=1e-4, atol=1e-5)
    after = matrices(model)
    assert after.keys() == weights.keys()
    assert all(torch.equal(after[name].weight, weight) for name, weight in weights.items())
    assert {name for name, one in after.items() if one.linear} == set(linears(model))


def test_an_expert_that_no_calibration_text_reaches_is_named(tmp_path, monkeypatch):
    plain = modeling_mixtral.MixtralTopKRouter.forward

    def never_the_last(self, hidden_states):
        logits, weights, chosen = plain(self, hidden_states)
        return logits, weights, chosen.clamp(max=2)

    monkeypatch.setattr(modeling_mixtral.MixtralTopKRouter, "forward", never_the_last)
    with pytest.raises(QuantizationError, match=r"experts\.3\.gate_up_proj: no calibration text"):
        report("mixtral", tmp_path, "gptq-4bit")


def test_leaving_experts_out_is_the_reason_that_is_named(tmp_path):
    found = report("mixtral", tmp_path, "rtn-4bit", ignore=("experts",))
    assert found.problems == ()
    assert found.coverage < 0.5
    reasons = {found.left_out_because[name] for name in found.left_out if ".experts." in name}
    assert reasons == {"ignore of the settings"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_logits_that_an_appended_text_changes_are_recorded(kind, dtype, tmp_path, monkeypatch):
    """Among keys of equal score a top-k of transformers chooses by how long the text is: one token
    in ten moves, by a lot; in 16 bits too."""
    kinds = {"mlp_layer_types": ["sparse"]} if kind == "glm_moe_dsa" else {}
    monkeypatch.setitem(CONFIGS, kind, {**SPARSE_KEYS, **kinds})
    found = report(kind, tmp_path, "rtn-4bit", compute_dtype=dtype)
    assert found.problems == ()
    assert found.causality.moved > 1


@pytest.mark.parametrize("kind", ["deepseek_v3", "mixtral"])
def test_rounding_that_sends_tokens_to_other_experts_is_no_leak(kind, tmp_path):
    assert report(kind, tmp_path, "rtn-4bit", compute_dtype="bfloat16").causality.moved == 0


def test_a_block_that_has_two_names_is_quantized_once(tmp_path, monkeypatch):
    shared = {
        **STATES, "num_hidden_layers": 4, "hybrid_layer_ids": [1, 3], "num_mem_blocks": 1,
        "mamba_headdim": 32, "n_mamba_heads": 4, "adapter_rank": 16, "mamba_ngroups": 1,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    }  # fmt: skip
    monkeypatch.setitem(CONFIGS, "zamba2", shared)
    found = report("zamba2", tmp_path, "rtn-4bit", ignore=("conv1d",))
    assert found.problems == ()
    assert found.coverage > 0.97
