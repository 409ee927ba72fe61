"""What each normalizer says of itself is so."""

import re

import pytest
import torch
from attention_cases import NORMALIZERS as NAMES
from normalizer_parameters import parameters
from small_recipe import qbench
from tiny import tiny_model
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qbench.attention import choose, reference
from qbench.attention.normalizers import NORMALIZERS, Kernels, Parameter, register
from qbench.attention.normalizers.softmax import SoftmaxSink
from qbench.attention.normalizers.softpick import EPSILON
from qbench.attention.transformers import attention_name, set_attention
from qbench.errors import UnavailableError


def weights(name, scores):
    """Of scores [M, N] or [N], as one head's."""
    given = parameters(name, 1, dtype=scores.dtype)
    rows = scores.reshape(1, -1, scores.shape[-1])
    return NORMALIZERS[name].weights(rows, parameters=given).reshape(scores.shape)


class Sunk(SoftmaxSink):
    """No kernels, and one more parameter, which may be left out."""

    name, kernels = "sunk", None
    parameters = (
        *SoftmaxSink.parameters,
        Parameter(name="factors", trainable=False, attribute="factors", required=False),
    )


@pytest.fixture
def sunk(monkeypatch):
    monkeypatch.setitem(NORMALIZERS, "sunk", Sunk())


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
def test_rows_sum_to_one_and_weights_are_zero_only_where_the_object_says_so(name):
    chosen = NORMALIZERS[name]
    rows = torch.cat([draw(50, 9), -draw(5, 9).abs(), 30 * draw(5, 9)])
    sums = weights(name, rows).sum(-1)
    assert (sums <= (9 if name == "sigmoid" else 1) + 1e-12).all()
    ones = torch.allclose(sums, torch.ones_like(sums), rtol=0, atol=1e-12)
    assert ones == chosen.rows_sum_to_one
    assert bool((weights(name, draw(50, 9)) == 0).any()) == chosen.sparse


def test_a_masked_score_may_be_far_above_the_others():
    """As ALiBi makes keys that come later; e to such a difference is infinite."""
    scores = torch.tensor([[1.0, 2.0, 1e4]], requires_grad=True)
    allowed = torch.tensor([[True, True, False]])
    w = NORMALIZERS["softpick"].weights(scores, allowed=allowed, parameters={})
    (gradient,) = torch.autograd.grad(w[0, 1], scores)
    assert w[0, 2] == 0
    assert gradient.isfinite().all()


@pytest.mark.parametrize("normalizer", list(NORMALIZERS))
@pytest.mark.parametrize("scores", ["all negative", "zeros", "huge", "tiny"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_scores_give_finite_weights_and_gradients(normalizer, scores, dtype):
    x = torch.linspace(-1, 1, 40, dtype=dtype)
    x = {"all negative": x - 120, "zeros": x * 0, "huge": x * 1e4, "tiny": x * 1e-30}[scores]
    x.requires_grad_()
    w = weights(normalizer, x)
    (gradient,) = torch.autograd.grad((w * torch.arange(40)).sum(), x)
    assert w.isfinite().all()
    assert gradient.isfinite().all()
    assert w.sum() <= (40 if normalizer == "sigmoid" else 1) + 1e-5


def test_softpick_keeps_its_precision_where_all_scores_are_near_zero():
    x = torch.tensor([1e-5, -2e-5, 3e-5, -4e-5], dtype=torch.float64)
    total = torch.expm1(x).abs().sum() + EPSILON * x.max().exp()
    expected = torch.expm1(x).relu() / total
    torch.testing.assert_close(weights("softpick", x), expected, rtol=1e-12, atol=0)
    got = weights("softpick", x.float()).double()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_each_is_listed_with_what_sets_it_apart(capfd):
    assert qbench("list", "normalizers") == 0
    entries = re.split(r"\n(?! )", capfd.readouterr().out.strip())
    described = {entry.split()[0]: " ".join(entry.split()) for entry in entries}
    assert list(described) == [*NORMALIZERS, "native"]
    for name in NAMES:
        normalizer, entry = NORMALIZERS[name], described[name]
        assert normalizer.description in entry
        assert "attention: reference, triton; parameters: " in entry
        for parameter in normalizer.parameters:
            needed = "" if parameter.required else " (optional)"
            assert f"{parameter.attribute}{needed}" in entry


@pytest.mark.usefixtures("sunk")
def test_a_models_parameters_are_taken_from_its_attention_modules_and_trained():
    model = tiny_model("llama", num_hidden_layers=2).requires_grad_(True)
    set_attention(model, normalizer="softmax")
    ids = torch.arange(12)[None]
    softmax = model(ids).logits
    set_attention(model, normalizer="sunk")
    with pytest.raises(UnavailableError, match="sunk attention needs its parameter 'sinks'"):
        model(ids)
    for layer in model.model.layers:
        layer.self_attn.sinks = torch.nn.Parameter(torch.full((2,), -1e4))
    torch.testing.assert_close(model(ids).logits, softmax)  # a sink of e^-10000 is none
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(1.0)
    logits = model(ids).logits
    assert (logits - softmax).abs().max() > 0.1
    logits.square().mean().backward()
    assert all(layer.self_attn.sinks.grad.abs().min() > 0 for layer in model.model.layers)


@pytest.mark.usefixtures("sunk")
@pytest.mark.parametrize(
    ("normalizer", "handed_over", "refused"),
    [
        ("softmax", "s_aux", True), ("softpick", "s_aux", True),
        ("softpick", "position_bias", True), ("sunk", "cache", True), ("sunk", "s_aux", False),
    ],
)  # fmt: skip
def test_what_changes_the_weights_is_a_parameter_or_refused(normalizer, handed_over, refused):
    attention = ALL_ATTENTION_FUNCTIONS[attention_name(normalizer, "reference", "cpu")]
    module = torch.nn.Module()
    module.sinks = torch.zeros(2, dtype=torch.float64)  # what is handed over goes before it
    inputs = [draw(1, 2, 5, 4, seed=seed) for seed in range(3)]
    options = {handed_over: torch.ones(2, dtype=torch.float64)}
    if refused:
        with pytest.raises(
            UnavailableError, match=f"{normalizer} .* place for {handed_over}.*native"
        ):
            attention(module, *inputs, None, **options)
    else:
        got, _ = attention(module, *inputs, None, **options)
        given = {"sinks": options[handed_over]}
        expected = reference.attention(
            *inputs, normalizer=normalizer, parameters=given, causal=True
        )
        torch.testing.assert_close(got.transpose(1, 2), expected)


@pytest.mark.usefixtures("sunk")
@pytest.mark.parametrize(
    ("normalizer", "parameters", "error", "message"),
    [
        ("sunk", {}, UnavailableError, r"sunk attention needs its parameter 'sinks' \[4\]"),
        ("sunk", {"sinks": torch.zeros(2)}, ValueError, r"sinks must be \[4\]; it is \[2\]"),
        ("softpick", {"sinks": torch.zeros(4)}, UnavailableError, "no parameter 'sinks'"),
    ],
)
def test_wrong_parameters_are_refused_by_name(normalizer, parameters, error, message):
    query = draw(1, 4, 3, 8)
    with pytest.raises(error, match=message):
        reference.attention(query, query, query, normalizer=normalizer, parameters=parameters)


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ({"score_function": "claimed"}, "no score function 'claimed'; they have softmax, softpick"),
        ({"score_function": "softpick", "sink": True}, "a sink only with the score function 'so"),
        ({"score_function": "sigmoid", "scaled": True}, "cannot scale logits with the elementwise"),
        ({"score_function": "softmax"}, "kernels of 'sunk' do not take its parameter 'sinks'"),
        # which may be left out
        ({"score_function": "softmax", "sink": True}, "'sunk' do not take its parameter 'factors'"),
    ],
)
def test_what_the_kernels_lack_is_named_when_a_normalizer_claims_it(kernels, message):
    with pytest.raises(ValueError, match=message):
        register(type("Claims", (Sunk,), {"kernels": Kernels(**kernels)})())


@pytest.mark.usefixtures("sunk")
@pytest.mark.parametrize(
    ("normalizer", "requested", "device", "chosen"),
    [
        ("sunk", "auto", "cuda", "reference"),
        ("sunk", "reference", "cuda:1", "reference"),
        ("softpick", "auto", "cuda:1", "triton"),
        ("softpick", "auto", "cpu", "reference"),
        ("softpick", "triton", "cuda", "triton"),
    ],
)
def test_auto_is_triton_only_where_there_are_kernels(normalizer, requested, device, chosen):
    assert choose(normalizer, requested, device) == chosen


@pytest.mark.usefixtures("sunk")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_triton_refuses_what_has_no_kernels_by_name(device):
    with pytest.raises(UnavailableError, match="no kernels for the normalizer 'sunk'"):
        choose("sunk", "triton", device)
