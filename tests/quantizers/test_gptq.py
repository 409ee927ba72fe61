"""GPTQ against gptqmodel's own class, and the walk over blocks against the model's own forward."""

import dataclasses
import threading

import pytest
import torch
from quantizer_models import calibration, ids, llama, make, make_with_detail, settings
from tiny import tiny_model
from torch import nn

from qbench.errors import QuantizationError
from qbench.quantizers import calibration as walks
from qbench.quantizers import config_of, gptq
from qbench.quantizers.calibration import SequentialCalibrator
from qbench.quantizers.linear import linearize, linears
from qbench.quantizers.quantize import quantize, shapes_of

# Columns of one block: rows, columns, bits, groups, what is odd
BLOCKS = [
    (6, 16, 4, 1, ""),
    (7, 16, 8, 8, ""),
    (4, 16, 2, 2, "asymmetric"),
    (5, 24, 3, 4, ""),
    (4, 16, 4, 1, "large"),  # far outside the grid
    (7, 16, 4, 1, "NaN"),
    (4, 16, 4, 1, "ties"),
]


def block_of(case, device="cpu"):
    """The arguments of ``gptq._block``; what is read lies in wider tensors."""
    rows, width, bits, groups, odd = case
    draw = torch.Generator().manual_seed(rows + bits)
    work = torch.randn(rows, width, generator=draw) * 0.02
    columns = torch.randn(512, width, generator=draw)
    inverse = torch.linalg.inv(columns.T @ columns / 512)
    upper = torch.linalg.cholesky(inverse, upper=True)
    scale = (torch.rand(rows, groups, generator=draw) + 0.5) * 0.08 / (2**bits - 1)
    zero = torch.full_like(scale, 2 ** (bits - 1))
    if odd == "asymmetric":
        zero = torch.randint(0, 2**bits, scale.shape, generator=draw).float()
    if odd == "large":
        work *= 1e9
    if odd == "NaN":
        work[3, 5], work[4, -1], work[5, 9] = torch.nan, torch.nan, torch.inf
    if odd == "ties":
        scale[:] = 2**-7
        work = torch.randint(-40, 40, work.shape, generator=draw) * 2**-8
        upper = torch.eye(width)
    wide = torch.full((rows, 3 * width), torch.nan, device=device)
    wide[:, width : 2 * width] = work.to(device)
    group = torch.arange(width, device=device) // (width // groups)
    parts = (upper.to(device), scale.to(device), zero.to(device), group, bits)
    return wide[:, width : 2 * width], *parts


def problem(outputs, inputs, seed=0):
    """A weight [outputs, inputs] and correlated inputs [tokens, inputs], one of them never on."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * inputs, inputs, generator=draw)
    x = x @ torch.randn(inputs, inputs, generator=draw)
    x[:, 3] = 0
    return torch.randn(outputs, inputs, generator=draw), x


def hessian(x):
    return (x.T @ x).mul_(2 / len(x))


def solve(weight, moments, chosen):
    return gptq.solve(weight.clone(), moments.clone(), chosen.weights, "layer")


def gptqmodels(weight, x, chosen):
    """The weight as quantized, scales and zeros that gptqmodel's own class gives."""
    from gptqmodel.quantization import GPTQ, QuantizeConfig

    weights, layer = chosen.weights, nn.Linear(*reversed(weight.shape), bias=False)
    layer.weight.data = weight.clone()
    config = QuantizeConfig(
        bits=weights.num_bits,
        group_size=weights.group_size,
        damp_percent=weights.damp,
        desc_act=weights.desc_act,
        act_group_aware=weights.order == "group-aware",
        sym=weights.symmetric,
        offload_to_disk=False,
    )
    task = GPTQ(layer, qcfg=config)
    task.quantizer.configure(bits=weights.num_bits, sym=weights.symmetric, perchannel=True)
    task.add_batch(x, None)
    with torch.no_grad():
        return task.quantize()[:3]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"symmetric": False, "group_size": 64, "group_aware": False},
        {"group_size": 16, "desc_act": True, "damp": 0.1},
        {"group_size": -1, "desc_act": True, "symmetric": False},
        {"group_size": 32, "group_aware": True},
        {"group_size": -1},
    ],
    ids=str,
)
def test_weights_scales_and_zeros_are_gptqmodels_to_the_bit(bits, options):
    weight, x = problem(32, 192)
    chosen = settings(f"gptq-{bits}bit", **options)
    actual = solve(weight, hessian(x), chosen)
    quantized, scale, zero = gptqmodels(weight, x, chosen)
    assert torch.equal(actual.weight, quantized)
    assert torch.equal(actual.scale, scale)
    assert torch.equal(actual.zero, zero)


def test_the_defaults_are_gptqmodels():
    """What a model's layers are quantized with if nothing but the bits is stated."""
    quantization = pytest.importorskip("gptqmodel.quantization")
    theirs = quantization.QuantizeConfig(bits=4, offload_to_disk=False)
    fitted = config_of("gptq-4bit").fitted({"layer": (256, 1024)})
    ours = fitted.weights
    assert (ours.group_size, ours.symmetric, ours.desc_act, ours.group_aware, ours.damp) == (
        theirs.group_size, theirs.sym, bool(theirs.desc_act), theirs.act_group_aware,
        theirs.damp_percent,
    )  # fmt: skip
    assert theirs.damp_auto_increment == gptq.DAMP_STEP
    assert ours.true_sequential == theirs.true_sequential
    scheme = fitted.precision.weights.scheme
    assert scheme == "int4 symmetric in groups of 128, group-aware order"
    other = config_of("gptq-4bit:desc_act=true").weights
    assert other.order == "activation"
    assert config_of("gptq-4bit:group_size=-1").weights.order == "column"


def test_damping_is_raised_where_the_hessian_is_singular_and_told(tmp_path):
    row = torch.linspace(1, 2, 64)
    chosen = settings("gptq-4bit", damp=1e-12)
    assert solve(torch.ones(2, 64), torch.outer(row, row), chosen).damp == pytest.approx(0.01)
    _, detail = make_with_detail(
        settings("gptq-4bit", damp=1e-9), tmp_path, model=llama(intermediate=512)
    )
    assert "damp raised to 0.01 in" in detail
    with pytest.raises(QuantizationError, match=r"gptq-4bit: layer: .*singular.*more samples"):
        solve(torch.ones(2, 64), -torch.outer(row, row), chosen)


@pytest.mark.parametrize(
    "options",
    [{}, {"group_size": 16, "desc_act": True}, {"group_size": -1},
     {"group_size": 192, "group_aware": False}, {"group_size": 48, "group_aware": True}],
    ids=str,
)  # fmt: skip
def test_a_block_may_get_the_errors_of_all_before_when_it_begins(options, monkeypatch):
    """As on a GPU: in float64, without the ties of a symmetric grid's ends, codes are the same."""
    weight, x = problem(24, 576)
    chosen, actual = settings("gptq-3bit", symmetric=False, **options), []
    for left_looking in (False, True):
        monkeypatch.setitem(gptq.LEFT_LOOKING, "cpu", left_looking)
        actual.append(solve(weight.double(), hessian(x.double()), chosen))
    assert torch.equal(actual[0].codes, actual[1].codes)
    torch.testing.assert_close(actual[0].weight, actual[1].weight)
    assert actual[0].damp == actual[1].damp


# The walk over blocks


@pytest.mark.parametrize("batch_size", [1, 3])
def test_hessians_are_those_of_every_calibration_token(batch_size):
    model, names, seen = llama(), ["self_attn.q_proj", "mlp.down_proj"], {}
    for name in names:

        def note(_, args, name=name):
            seen.setdefault(name, args[0])  # of the first forward, of all tokens

        model.model.layers[0].get_submodule(name).register_forward_pre_hook(note)
    with torch.no_grad():
        model(input_ids=calibration().ids, use_cache=False)
    walk = SequentialCalibrator(model, linears(model), calibration(), batch_size)
    for name, actual in zip(names, walk.hessians(0, names), strict=True):
        expected = hessian(seen[name].flatten(0, 1).double())
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)


def test_products_of_bfloat16_are_exact_and_float32_is_left_as_it_was():
    torch.manual_seed(0)
    x, y = torch.randn(2 * walks.PRODUCT_ROWS + 7, 300).bfloat16(), torch.randn(64, 64)
    before = y @ y
    off = walks._hessian([x, x[:5]], 2) - hessian(torch.cat([x, x[:5]]).double())
    assert off.norm() < 1e-6 * hessian(x.double()).norm()
    assert torch.equal(y @ y, before)


@pytest.mark.parametrize(("kind", "cores"), [("llama", 1), ("bfloat16", 3), ("mixtral", 3)])
def test_paused_forwards_give_what_forwards_from_the_beginning_give(kind, cores, monkeypatch):
    """To the bit, experts that some batches do not reach included; each batch runs once."""
    text = dataclasses.replace(calibration(), ids=calibration().ids[:, :5])
    monkeypatch.setattr(walks, "CORES", cores)
    results, ran, threads = [], [], threading.active_count()
    for pauses in (True, False):
        monkeypatch.setattr(SequentialCalibrator, "_can_pause", lambda *_, pauses=pauses: pauses)
        model = tiny_model(kind) if kind == "mixtral" else llama()
        linearize(model.bfloat16() if kind == "bfloat16" else model)
        chosen = settings("gptq-4bit", batch_size=2, damp=0.5).fitted(shapes_of(model)).weights
        mlp = model.model.layers[0].mlp
        handle = mlp.register_forward_hook(lambda *_, pauses=pauses: ran.append(pauses))
        layers = linears(model)
        tensors, _ = gptq.quantize_model(
            model, dict.fromkeys(layers, chosen), text, lambda done, total: None
        )
        handle.remove()
        results.append((tensors, [p.clone() for p in model.parameters()]))
    (first, weights), (second, expected) = results
    assert all(torch.equal(first[n][part], t) for n in second for part, t in second[n].items())
    assert all(map(torch.equal, weights, expected))
    assert ran.count(True) == -(-len(text.ids) // 2) + 1  # once each, and to trace
    assert threading.active_count() == threads


def test_an_error_inside_a_block_ends_all_paused_forwards():
    model, threads = llama(), threading.active_count()
    walk = SequentialCalibrator(model, linears(model), calibration(), 2)
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(walk.sequence(0, ["self_attn.q_proj", "mlp.down_proj"]))
    assert threading.active_count() == threads


KINDS = {  # layers of several kinds, with masks and rotary angles of their own
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
}


def seen_by(blocks, run):
    """The last input and output of each block while ``run`` runs, of all texts at once."""
    seen, hooks = {}, []
    for index, block in enumerate(blocks):

        def note(_, args, kwargs, output, index=index):
            hidden = args[0] if args else kwargs["hidden_states"]
            states = output[0] if isinstance(output, tuple) else output
            if hidden.shape[0] == len(calibration().ids):
                seen[index] = hidden.clone(), states.clone()

        hooks.append(block.register_forward_hook(note, with_kwargs=True))
    result = run()
    for hook in hooks:
        hook.remove()
    return seen, result


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_see_in_calibration_what_the_models_forward_shows_them(kind, tmp_path):
    """The quantized model's own forward shows each block what the blocks before it, quantized,
    give: that is what calibration must have shown it."""
    model, text = tiny_model(kind, num_hidden_layers=4, **KINDS[kind]), calibration()
    chosen = settings("gptq-8bit", batch_size=len(text.ids), damp=0.1)
    calibrated, made = seen_by(
        model.model.layers,
        lambda: quantize(model, chosen, calibration=text, digest="0" * 64, artifacts=tmp_path)[0],
    )
    with torch.no_grad():
        shown, _ = seen_by(
            made.model.layers, lambda: made(input_ids=text.ids.clone(), use_cache=False)
        )
    assert calibrated.keys() == shown.keys() == set(range(4))
    for index, states in shown.items():
        for actual, expected in zip(calibrated[index], states, strict=True):
            off = float((actual - expected).norm() / expected.norm())
            assert off < 5e-3, (index, off)  # scales are stored in float16


def test_true_sequential_and_the_order_of_blocks_matter_and_text_decides_all(tmp_path):
    chosen, tokens = settings("gptq-3bit"), ids(9, 1, 17)
    first, second = (make(chosen, tmp_path / name) for name in "ab")
    apart = make(settings("gptq-3bit", true_sequential=False), tmp_path)
    assert torch.equal(first(tokens).logits, second(tokens).logits)
    assert not torch.equal(first(tokens).logits, apart(tokens).logits)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("model.model.extra = nn.Linear(8, 8)",
         r"outside the decoder blocks .*: model.extra; set ignore: \['model.extra'\]"),
        ("second.register_forward_pre_hook(lambda _, x: (x[0] * 2, *x[1:]))",
         r"layers.1: does not receive"),
        ("first.forward = lambda hidden, **rest: second.forward(hidden, **rest)",
         r"never reaches model.layers.0.*: ignore: \['model.layers.0.mlp.down_proj', "),
        ("first.register_forward_pre_hook(lambda _, x, rest: (x, {**rest, 'total': x[0].sum()}), "
         "with_kwargs=True)", "depend on the text"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_walked_is_refused_with_the_reason(change, says):
    model = llama()
    first, second = model.model.layers
    exec(change, globals() | {"model": model, "first": first, "second": second})
    with pytest.raises(QuantizationError, match=says):
        SequentialCalibrator(model, linears(model), calibration(), 1)
