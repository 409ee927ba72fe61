"""Formats: their one definition, against other definitions, the kernels, and on odd values."""

from dataclasses import replace

import pytest
import torch

from qbench.quantizers import fake_quant, packed
from qbench.quantizers.audit import activations as audit
from qbench.quantizers.audit.weights import levels
from qbench.quantizers.config import ActivationEvidence
from qbench.quantizers.fake_quant import KVFakeQuant, fake_quantize, scale_of_tensor
from qbench.quantizers.formats import ELEMENTS, QuantFormat
from qbench.quantizers.registry import settings_of

INF, NAN = torch.inf, torch.nan
FP8 = {"num_bits": 8, "type": "float"}
FP4 = {"num_bits": 4, "type": "float"}
FORMATS = {
    **{f"int{b}": QuantFormat(num_bits=b) for b in (2, 4, 6, 8)},
    **{f"int{b} with a zero": QuantFormat(num_bits=b, symmetric=False) for b in (4, 8)},
    "fp8": QuantFormat(**FP8),
    "mxfp8": QuantFormat(**FP8, scale_dtype="float8_e8m0fnu"),
    "mxfp4": QuantFormat(**FP4, scale_dtype="float8_e8m0fnu"),
    "nvfp4": QuantFormat(**FP4, scale_dtype="float8_e4m3fn"),
}
KV_FORMATS = {
    "int4": QuantFormat(num_bits=4, scale_dtype="float16"),
    "fp8": QuantFormat(**FP8, scale_dtype="float16"),
}


def test_layers_with_one_input_round_it_once_unless_it_is_written_to(monkeypatch):
    rounded = []
    monkeypatch.setattr(
        fake_quant, "fake_quantize", lambda *a: rounded.append(fake_quantize(*a)) or rounded[-1]
    )
    form = replace(FORMATS["int8"], strategy="tensor")
    first, second = (fake_quant.FakeQuant(form, {"q": None, "k": None}).hook(name) for name in "qk")
    x = torch.randn(4, 16)
    (a,), (b,) = first(None, (x,)), second(None, (x,))
    assert a is b
    x.mul_(2)
    (c,) = second(None, (x,))
    assert len(rounded) == 2
    assert torch.equal(c, fake_quantize(x, form))
    fixed = scale_of_tensor(torch.tensor(-1.0), torch.tensor(1.0), form)
    (d,) = fake_quant.FakeQuant(form, {"q": fixed}).hook("q")(None, (x,))
    assert torch.equal(d, fake_quantize(x, form, fixed))


def of_tensor(form, *, dynamic=False):
    """``form`` under one scale; None for MX, whose blocks have their own alone."""
    if form.scale_dtype == "float8_e8m0fnu":
        return None
    if form.scale_dtype == "float8_e4m3fn":
        return replace(form, strategy="tensor_group", dynamic=dynamic)
    return replace(form, strategy="tensor", dynamic=dynamic)


def equal(actual, expected):
    """To the bit, but for the sign of zeros and what kind of NaN there is."""
    same = torch.equal(actual.nan_to_num(0.0), expected.nan_to_num(0.0))
    return same and torch.equal(actual.isnan(), expected.isnan())


def draw(rows=64, columns=96, seed=0):
    """Rows of very different sizes, each with an outlier."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x[:, 0] *= 20
    return x * torch.logspace(-3, 3, rows)[:, None]


def ties(rows=256, columns=384):
    """What down_proj takes in, silu(gate) · up, of 8 bits of mantissa: the largest is 7, so that
    NVFP4's block scales lie on E4M3's ties, and every 32 reach as far below 0 as above, so that
    zero points do."""
    generator = torch.Generator().manual_seed(1)
    gate, up = torch.randn(2, rows, columns, generator=generator)
    x = (torch.nn.functional.silu(gate) * up).bfloat16().float().clamp(-7, 7)
    groups = x.view(-1, 32)
    groups[0, 0] = 7.0
    groups[:, 0] = groups.abs().amax(1)
    groups[:, 1] = -groups[:, 0]
    return x


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("int4", [7.5, -7.5, 0.5, 1.5, 2.5, -0.5, 3.49], [7.0, -8.0, 0.0, 2.0, 2.0, 0.0, 3.0]),
        ("int4 with a zero", [-1.0, 14.0, 0.0, 3.4, 3.6], [-1.0, 14.0, 0.0, 3.0, 4.0]),
        ("int4 with a zero", [2.0, 30.0, 0.0, 3.4, 16.9], [2.0, 30.0, 0.0, 4.0, 16.0]),
        ("int4 with a zero", [2.0, 30.0, 3.4, 16.9], [2.0, 30.0, 4.0, 16.0]),  # as if 0 were there
    ],
)
def test_codes_by_hand(name, x, expected):
    """2^bits levels, half to even; a zero point covers the values and keeps 0."""
    assert fake_quantize(torch.tensor([x]), FORMATS[name]).tolist() == [expected]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_integers_are_those_of_compressed_tensors(bits, symmetric):
    """To the bit; of ties with a zero point, which the library adds before it rounds, to a step."""
    ct = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize as theirs
    from compressed_tensors.quantization.utils import calculate_qparams

    x = draw()
    args = ct.QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy="channel")
    scale, zero = calculate_qparams(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), args)
    expected = theirs(x, scale, zero, args)
    actual = fake_quantize(x, QuantFormat(num_bits=bits, symmetric=symmetric))
    if symmetric:
        assert torch.equal(actual, expected)
    else:
        different = (actual - expected).abs() > 1e-4 * scale
        assert different.double().mean() < 2e-3
        assert ((actual - expected).abs() <= 1.001 * scale).all()
    assert levels(actual) <= 2**bits
    assert levels(actual) == 2**bits or bits > 4


def test_e4m3_is_torchs_own_on_every_16_bit_pattern():
    every = (torch.arange(2**16, dtype=torch.int32) << 16).view(torch.float32)
    every = every[every.abs() <= 448]
    cast = every.to(torch.float8_e4m3fn).float()
    assert torch.equal(fake_quant.nearest(every, ELEMENTS["e4m3"]), cast)


def test_tokens_that_stay_unquantized_are_no_part_of_the_range():
    """Values up to 1 beside a first token of 50: the step is a fifteenth of 2, not of 100."""
    keys = torch.rand(1, 2, 20, 8, generator=torch.Generator().manual_seed(0))
    keys[:, :, 0] = 50
    options = {"sink_tokens": 1}
    cache = KVFakeQuant(settings_of("kv-int4-tensor", options))
    positions = torch.arange(20)[None].int()
    actual = cache.rounded(keys, positions)
    assert torch.equal(actual[:, :, 0], keys[:, :, 0])
    assert (actual - keys).abs().max() <= 1.01 / 15  # scales are float16
    assert torch.equal(cache.rounded(keys[:, :, :1], positions[:, :1]), keys[:, :, :1])


@pytest.mark.parametrize(
    ("name", "element", "size"), [("mxfp8", "float8_e4m3fn", 32), ("mxfp4", "float4_e2m1fn_x2", 32)]
)
def test_mx_formats_are_torchaos(name, element, size):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = draw().bfloat16()
    theirs = mx.MXTensor.to_mx(x, getattr(torch, element), size).dequantize(torch.bfloat16)
    assert torch.equal(
        fake_quantize(x, replace(FORMATS[name], strategy="group", group_size=size)), theirs
    )


@pytest.mark.parametrize("level", ["one", "two"])
def test_nvfp4_is_torchaos(level):
    """But for ties, since it multiplies by a reciprocal; and it has no scale below 2⁻⁶."""
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x, form = draw(), replace(FORMATS["nvfp4"], group_size=16)
    form = replace(form, strategy="group" if level == "one" else "tensor_group")
    given = scale_of_tensor(*torch.aminmax(x), form).scale if level == "two" else None
    theirs = nvfp4.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=given).dequantize(torch.float32)
    ours = fake_quantize(x, form)
    blocks = x.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True)
    held = blocks / (1.0 if given is None else given) / 6
    same = ((held > 2**-6) & (held < 448)).expand(-1, -1, 16).flatten(1)
    assert same.double().mean() > 0.3
    different = (ours[same] - theirs[same]).abs() > 1e-6 * ours[same].abs()
    assert different.double().mean() < 1e-3


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scales", ["group", "tensor", "fixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_audit_decides_ties_as_the_definition_does(name, scales, dtype):
    form, x = FORMATS[name], ties().to(dtype)
    blocks = {"float8_e8m0fnu": 32, "float8_e4m3fn": 16}.get(form.scale_dtype)
    if scales == "group":
        form = replace(form, strategy="group", group_size=blocks or 32)
    elif blocks == 32 or (blocks and scales == "tensor"):
        pytest.skip("blocks have scales of their own, under a static one at most")
    else:
        form = of_tensor(form, dynamic=scales == "tensor")
        form = replace(form, group_size=blocks or -1)
    fixed = None if form.dynamic else scale_of_tensor(*torch.aminmax(x), form)
    about = ActivationEvidence(format=form, fixed=fixed)
    actual = audit.groups_of(fake_quantize(x, form, fixed), about)
    expected, _, _ = audit.expected(audit.groups_of(x.double(), about), about)
    off = (actual.double() - expected).abs() > 4 * torch.finfo(dtype).eps * expected.abs()
    assert float(off.double().mean()) == 0
    assert levels(actual) <= 2**form.num_bits


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
@pytest.mark.parametrize("form", [*FORMATS.values(), *KV_FORMATS.values()], ids=str)
def test_what_is_not_finite_is_never_hidden(form, broken):
    x = draw(4, 32)
    x[1, 5] = broken
    actual = fake_quantize(x, form)
    assert actual[1].isnan().all()
    assert actual[[0, 2, 3]].isfinite().all()
    if form.scale_dtype == "float32":
        whole = of_tensor(form)
        fixed = scale_of_tensor(torch.tensor(-2.0), torch.tensor(3.0), whole)
        given = fake_quantize(x, whole, fixed)
        assert given[1, 5].isnan()
        assert given.isnan().sum() == 1
        assert fake_quantize(x, of_tensor(form, dynamic=True)).isnan().all()


@pytest.mark.parametrize("name", ["int8", "int8 with a zero", "fp8"])
def test_a_fixed_scale_clips_what_is_beyond_it(name):
    form = of_tensor(FORMATS[name])
    fixed = scale_of_tensor(torch.tensor(-2.0), torch.tensor(3.0), form)
    actual = fake_quantize(torch.tensor([[-100.0, 100.0]]), form, fixed)
    low = -2.0 if "zero" in name else -3.0
    assert actual.flatten().tolist() == pytest.approx([low, 3.0], rel=6e-3)


# Codes packed to their real bits, and the grid that they stand for.


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("width", [1, 9, 64])
def test_unpacking_gives_back_every_code(bits, width):
    codes = torch.randint(
        0, 2**bits, (5, width), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    assert torch.equal(packed.unpack_codes(packed.pack_codes(codes, bits), bits, width), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", [1, 8, 33])
def test_a_weight_inside_the_grid_moves_half_a_step_at_most(bits, symmetric, size):
    weight = torch.randn(11, 3, size, generator=torch.Generator().manual_seed(0))
    scale, zero = packed.grid(weight, bits, symmetric=symmetric)
    codes = packed.nearest(weight, scale, zero, bits)
    inside = (weight / scale + zero >= -0.5) & (weight / scale + zero <= 2**bits - 0.5)
    moved = ((codes - zero) * scale - weight).abs()
    assert inside.float().mean() > 0.5
    assert bool((moved <= scale * 0.5001)[inside].all())
