"""Every quantizer on softmax and on softpick: audited, unchanged attention, more bits less harm."""

import pytest
import torch
from quantizer_models import (
    DIGEST,
    PROBE,
    VOCABULARY,
    calibration,
    damage,
    llama,
    logits,
    make,
    settings,
)
from transformers import GPT2Config, GPT2LMHeadModel

from qbench.errors import QuantizationError, UnavailableError
from qbench.quantizers import parse
from qbench.quantizers.audit.cell import audit
from qbench.quantizers.linear import linearize, linears
from qbench.quantizers.matrices import matrices
from qbench.quantizers.quantize import quantize
from qbench.quantizers.weights import Rtn

OWN = {}
CASES = [
    ("bnb-4bit", {}),
    ("bnb-4bit", {"quant_type": "fp4", "double_quant": True, "compute_dtype": "bfloat16"}),
    ("bnb-8bit", {}),
    ("bnb-8bit", {"threshold": 0.5, "compute_dtype": "bfloat16"}),
    ("hqq-2bit", {}),
    ("hqq-3bit", {"compute_dtype": "bfloat16"}),
    ("hqq-4bit", {"axis": 0}),
    ("hqq-8bit", {"optimize": False}),
    ("rtn-2bit", {"compute_dtype": "bfloat16"}),
    ("rtn-3bit", {"group_size": -1}),
    ("rtn-4bit", {"symmetric": True}),
    ("rtn-8bit", {}),
    ("gptq-2bit", OWN),
    ("gptq-3bit", {**OWN, "compute_dtype": "bfloat16", "desc_act": True}),
    ("gptq-4bit", {**OWN, "symmetric": False, "true_sequential": False}),
    ("gptq-8bit", {**OWN, "group_size": -1, "batch_size": 3}),
]


@pytest.mark.parametrize("normalizer", ["softmax", "softpick"])
@pytest.mark.parametrize(("name", "stated"), CASES)
def test_every_quantizer_passes_its_audit_and_leaves_attention_alone(
    name, stated, normalizer, tmp_path
):
    chosen = settings(name, **stated)
    dtype = getattr(torch, chosen.compute_dtype)
    original = llama(normalizer, dtype=dtype)
    quantized = make(chosen, tmp_path, normalizer).model
    report = audit(original, quantized, chosen, PROBE)
    assert report.problems == ()
    assert (report.passed, report.coverage) == (True, 1.0)
    assert report.levels <= 2**chosen.weights.num_bits
    assert quantized.config._attn_implementation == f"qbench-{normalizer}-reference"
    assert type(quantized.lm_head) is torch.nn.Linear
    assert torch.equal(quantized.lm_head.weight, original.lm_head.weight)
    assert torch.equal(quantized.model.embed_tokens.weight, original.model.embed_tokens.weight)


@pytest.mark.parametrize(("method", "stated"), [("rtn", {}), ("hqq", {}), ("gptq", OWN)])
def test_more_bits_do_less_harm(method, stated, tmp_path):
    harm = [
        damage(make(settings(f"{method}-{bits}bit", **stated), tmp_path).model, llama())
        for bits in (2, 3, 4, 8)
    ]
    assert harm == sorted(harm, reverse=True)
    assert harm[0] > 20 * harm[3]


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gptq_does_less_harm_than_rounding_to_the_same_grid(bits, tmp_path):
    gptq = make(settings(f"gptq-{bits}bit", **OWN), tmp_path).model
    rtn = make(settings(f"rtn-{bits}bit", symmetric=True), tmp_path).model
    text = calibration(seed=5).ids
    assert damage(gptq, llama(), text) < damage(rtn, llama(), text)


@pytest.mark.parametrize(
    ("name", "stated", "bits"),
    [
        ("bnb-4bit", {}, 4.5),
        ("bnb-4bit", {"double_quant": True}, 4 + 8 / 64 + 32 / (64 * 256)),
        ("rtn-3bit", {"group_size": 32}, 3 + (16 + 8) / 32),
        ("hqq-4bit", {"group_size": 32, "compute_dtype": "bfloat16"}, 4 + 2 * 16 / 32),
        ("hqq-2bit", {"group_size": 16}, 2 + 2 * 32 / 16),
    ],
)
def test_bits_a_weight_count_scales_and_zeros(name, stated, bits, tmp_path):
    chosen = settings(name, **stated)
    original = llama(dtype=getattr(torch, chosen.compute_dtype))
    report = audit(original, make(chosen, tmp_path).model, chosen, PROBE)
    assert report.bits_per_weight == pytest.approx(bits, rel=0.01)


@pytest.mark.parametrize(
    ("name", "stated"),
    [("bnb-4bit", {}), ("bnb-8bit", {}), ("hqq-3bit", {}), ("rtn-3bit", {}), ("gptq-3bit", OWN)],
)
def test_biases_stay(name, stated, tmp_path):
    chosen = settings(name, **stated)
    original = llama(bias=True)
    quantized = quantize(
        llama(bias=True),
        chosen,
        calibration=calibration(),
        digest=DIGEST,
        artifacts=tmp_path,
    ).model
    report = audit(original, quantized, chosen, PROBE)
    assert report.problems == ()
    for layer in (original, quantized):
        assert layer.model.layers[0].self_attn.q_proj.bias.abs().sum() > 1


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_an_unquantized_cell_is_the_model_itself(name, dtype, tmp_path):
    model = llama(dtype=dtype)
    made = quantize(model, parse(name, {}), calibration=None, digest=DIGEST, artifacts=tmp_path)
    assert made.model is model
    assert "unquantized" in made.detail
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["rtn-4bit", "hqq-4bit", "gptq-4bit"])
def test_a_group_size_that_does_not_divide_a_layer_is_named_with_what_does(name, tmp_path):
    stated = OWN if name.startswith("gptq") else {}
    with pytest.raises(QuantizationError) as raised:
        make(settings(name, group_size=64, **stated), tmp_path)
    assert str(raised.value) == (
        f"{name}: model.layers.0.mlp.down_proj has 160 inputs, no multiple of group_size 64; "
        "choose 8 or 16 or 32"
    )


def test_a_layer_that_no_group_size_divides_can_be_left_out(tmp_path):
    narrow = llama(intermediate=36)
    with pytest.raises(QuantizationError, match=r"36 inputs.*say ignore: \[down_proj\]"):
        make(settings("rtn-4bit"), tmp_path, model=narrow)
    chosen = settings("rtn-4bit", ignore=("down_proj",))
    made = make(chosen, tmp_path, model=llama(intermediate=36)).model
    assert audit(llama(intermediate=36), made, chosen, PROBE).problems == ()


def test_a_calibrated_quantizer_without_calibration_is_refused(tmp_path):
    with pytest.raises(QuantizationError, match="gptq-4bit: needs calibration text"):
        quantize(
            llama(),
            settings("gptq-4bit"),
            calibration=None,
            digest=DIGEST,
            artifacts=tmp_path,
        )


def test_auto_gptq_says_why_it_cannot_run_and_what_supersedes_it(tmp_path):
    with pytest.raises(UnavailableError) as raised:
        make(settings("gptq-4bit", backend="auto-gptq"), tmp_path)
    message = str(raised.value)
    assert "auto_gptq" in message
    assert "superseded by gptqmodel" in message
    assert "\n" not in message


def test_what_a_library_raises_becomes_one_line_with_the_quantizer(tmp_path, monkeypatch):
    from qbench.quantizers import packed

    def broken(*_, **__):
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(packed, "grid", broken)
    with pytest.raises(QuantizationError, match=r"^rtn-4bit: RuntimeError: out of luck$"):
        make(settings("rtn-4bit"), tmp_path)


def test_a_model_without_linear_layers_is_refused(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(n_layer=0, n_head=2, n_embd=8, vocab_size=11))
    with pytest.raises(QuantizationError, match="rtn-4bit: GPT2LMHeadModel has no linear layers"):
        quantize(
            model,
            settings("rtn-4bit"),
            calibration=None,
            digest=DIGEST,
            artifacts=tmp_path,
        )


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=VOCABULARY, n_positions=64)
    return GPT2LMHeadModel(config).eval().requires_grad_(False)


def test_conv1d_layers_become_linear_ones_of_the_same_function():
    model, original = gpt2(), gpt2()
    linearize(model)
    assert not [m for m in model.modules() if type(m).__name__ == "Conv1D"]
    assert len(linears(model)) == 8
    torch.testing.assert_close(logits(model), logits(original), rtol=1e-5, atol=1e-6)
    assert {n: m.weight.shape for n, m in matrices(model).items()} == {
        n: m.weight.shape for n, m in matrices(original).items()
    }


@pytest.mark.parametrize(
    ("name", "stated"), [("rtn-4bit", {}), ("gptq-4bit", OWN), ("gptq-4bit", {})]
)
def test_gpt2_is_quantized_whole(name, stated, tmp_path):
    chosen = settings(name, **stated)
    report = audit(gpt2(), make(chosen, tmp_path, model=gpt2()).model, chosen, PROBE)
    assert report.problems == ()
    assert (report.coverage, len(report.modules)) == (1.0, 8)


def test_progress_goes_from_nothing_to_all(tmp_path):
    told = []
    quantize(
        llama(),
        settings("gptq-3bit", **OWN),
        calibration=calibration(),
        digest=DIGEST,
        artifacts=tmp_path,
        progress=lambda what, done: told.append((what, done)),
    )
    shares = [done for _, done in told]
    assert shares == sorted(shares)
    assert told[0] == ("model.layers.0", 0.0)
    assert told[-1] == ("quantized", 1.0)


def test_the_lm_head_is_no_layer_to_quantize():
    names = linears(llama())
    assert len(names) == 14
    assert "lm_head" not in names


def test_a_quantized_model_decodes_with_a_cache_as_without(tmp_path):
    model = make(settings("rtn-4bit"), tmp_path, "softpick").model
    whole = logits(model)
    with torch.no_grad():
        first = model(input_ids=PROBE[:, :-3], use_cache=True)
        rest = model(input_ids=PROBE[:, -3:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, -3:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["torch", "gptqmodel"])
def test_the_number_of_threads_around_it_changes_no_bit(backend, tmp_path):
    """The order of a sum depends on it; a rounding decided the other way moves the scores."""
    chosen, before = settings("gptq-3bit", backend=backend), torch.get_num_threads()
    digests = set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            model = make(chosen, tmp_path / str(threads)).model
            assert torch.get_num_threads() == threads
            digests.add(audit(llama(), model, chosen, PROBE).digest)
    finally:
        torch.set_num_threads(before)
    assert len(digests) == 1


def test_the_threads_that_the_settings_say_quantize(tmp_path, monkeypatch):
    seen, inner = [], Rtn.make
    monkeypatch.setattr(
        Rtn, "make", lambda *of: (seen.append(torch.get_num_threads()), inner(*of))[1]
    )
    for threads in (2, 1):
        make(settings("rtn-4bit", threads=threads), tmp_path)
    assert seen == [2, 1]
