"""Formats of activations: their definitions, against other definitions and on odd values."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qbench.quantizers import formats
from qbench.quantizers.activations.quantize import by_group, by_tensor, fixed_by
from qbench.quantizers.activations.rounding import ELEMENTS, nearest, rounded
from qbench.quantizers.audit.weights import levels
from qbench.quantizers.config import ActivationEvidence, Grid

INF, NAN = torch.inf, torch.nan
GRIDS = {
    **{f"int{b}": Grid(kind="symmetric", bits=b) for b in (2, 4, 6, 8)},
    **{f"int{b} with a zero": Grid(kind="asymmetric", bits=b) for b in (4, 6, 8)},
    "fp8": Grid(kind="e4m3", bits=8),
    "mxfp8": Grid(kind="e4m3", bits=8, scale_format="e8m0"),
    "mxfp4": Grid(kind="e2m1", bits=4, scale_format="e8m0"),
    "nvfp4": Grid(kind="e2m1", bits=4, scale_format="e4m3"),
}


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


def test_int_codes_are_the_issues():
    """2^(bits − 1) − 1 levels on each side, half to even: by hand."""
    x = torch.tensor([[7.0, -7.0, 0.5, 1.5, 2.5, -0.5, 3.49, -6.51]])
    expected = torch.tensor([[7.0, -7.0, 0.0, 2.0, 2.0, 0.0, 3.0, -7.0]])
    assert torch.equal(rounded(x, GRIDS["int4"]), expected)


def test_a_zero_point_covers_the_values_and_keeps_zero():
    x = torch.tensor([[-1.0, 14.0, 0.0, 3.4, 3.6], [2.0, 30.0, 0.0, 3.4, 16.9]])
    expected = torch.tensor([[-1.0, 14.0, 0.0, 3.0, 4.0], [2.0, 30.0, 0.0, 4.0, 16.0]])
    assert torch.equal(rounded(x, GRIDS["int4 with a zero"]), expected)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_format_has_no_more_levels_than_its_bits_and_is_the_audits(name, dtype):
    grid, x = GRIDS[name], draw().to(dtype)
    found = by_group(x, grid, 32)
    groups = found.reshape(-1, 32)
    assert found.dtype == dtype
    assert levels(groups) <= 2**grid.bits
    about = ActivationEvidence(grid=grid, scale_of="group", group=32)
    wanted, _, _ = formats.expected(x.double().reshape(-1, 32), about)
    off = (groups.double() - wanted).abs() > 4 * torch.finfo(dtype).eps * wanted.abs()
    assert off.double().mean() < 2e-3


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("scale_of", ["group", "tensor", "text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_audit_decides_ties_as_the_definition_does(name, scale_of, dtype):
    grid, x = GRIDS[name], ties().to(dtype)
    if grid.scale_format == "e8m0" and scale_of != "group":
        pytest.skip("every block has its own scale alone")
    fixed = None if scale_of == "group" else fixed_by(*torch.aminmax(x), grid)
    size = {"e8m0": 32, "e4m3": 16}.get(grid.scale_format, 32 if scale_of == "group" else -1)
    given = fixed if scale_of == "text" else None
    about = ActivationEvidence(
        grid=grid,
        scale_of=scale_of,
        group=size,
        scale=given.scale if given else None,
        zero=given.zero if given else None,
    )
    found = formats.groups_of(by_group(x, grid, size, fixed), about)
    wanted, _, _ = formats.expected(formats.groups_of(x.double(), about), about)
    off = (found.double() - wanted).abs() > 4 * torch.finfo(dtype).eps * wanted.abs()
    assert float(off.double().mean()) == 0


def test_e4m3_is_torchs_own_on_every_16_bit_pattern():
    every = (torch.arange(2**16, dtype=torch.int32) << 16).view(torch.float32)
    every = every[every.abs() <= 448]
    cast = every.to(torch.float8_e4m3fn).float()
    assert torch.equal(nearest(every, ELEMENTS["e4m3"]), cast)


@pytest.mark.parametrize(
    ("name", "element", "size"), [("mxfp8", "float8_e4m3fn", 32), ("mxfp4", "float4_e2m1fn_x2", 32)]
)
def test_mx_formats_are_torchaos(name, element, size):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = draw().bfloat16()
    theirs = mx.MXTensor.to_mx(x, getattr(torch, element), size).dequantize(torch.bfloat16)
    assert torch.equal(by_group(x, GRIDS[name], size), theirs)


@pytest.mark.parametrize("level", ["one", "two"])
def test_nvfp4_is_torchaos(level):
    """But for ties, since it multiplies by a reciprocal; and it has no scale below 2⁻⁶."""
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = draw()
    fixed = fixed_by(*torch.aminmax(x), GRIDS["nvfp4"]) if level == "two" else None
    given = fixed.scale if fixed else None
    theirs = nvfp4.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=given).dequantize(torch.float32)
    ours = by_group(x, GRIDS["nvfp4"], 16, fixed)
    blocks = x.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True)
    held = blocks / (1.0 if given is None else given) / 6
    same = ((held > 2**-6) & (held < 448)).expand(-1, -1, 16).flatten(1)
    assert same.double().mean() > 0.3
    different = (ours[same] - theirs[same]).abs() > 1e-6 * ours[same].abs()
    assert different.double().mean() < 1e-3


@pytest.mark.parametrize("name", GRIDS)
def test_zeros_stay_zeros(name):
    x = torch.zeros(3, 32)
    x[1] = 5.0
    assert torch.equal(by_group(x, GRIDS[name], 32)[[0, 2]], torch.zeros(2, 32))
    assert torch.equal(by_tensor(torch.zeros(3, 32), GRIDS[name]), torch.zeros(3, 32))
    assert by_tensor(torch.zeros(0, 32), GRIDS[name]).shape == (0, 32)


@pytest.mark.parametrize("broken", [NAN, INF, -INF])
@pytest.mark.parametrize("name", GRIDS)
def test_what_is_not_finite_is_never_hidden(name, broken):
    x = draw(4, 32)
    x[1, 5] = broken
    found = by_group(x, GRIDS[name], 32)
    assert found[1].isnan().all()
    assert found[[0, 2, 3]].isfinite().all()
    if GRIDS[name].scale_format == "float32":
        fixed = fixed_by(torch.tensor(-2.0), torch.tensor(3.0), GRIDS[name])
        given = by_group(x, GRIDS[name], fixed=fixed)
        assert given[1, 5].isnan()
        assert given.isnan().sum() == 1
        assert by_tensor(x, GRIDS[name]).isnan().all()


@pytest.mark.parametrize("name", ["int8", "int8 with a zero", "fp8"])
def test_a_fixed_scale_clips_what_is_beyond_it(name):
    fixed = fixed_by(torch.tensor(-2.0), torch.tensor(3.0), GRIDS[name])
    found = by_group(torch.tensor([[-100.0, 100.0]]), GRIDS[name], fixed=fixed)
    low = -2.0 if "zero" in name else -3.0
    assert found.flatten().tolist() == pytest.approx([low, 3.0], rel=5e-3)


def test_the_kernel_is_the_definition_bit_for_bit():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    script = Path(__file__).with_name("interpreted_rounding.py")
    ran = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert len(lines) == len(GRIDS) * 4
    assert [line for line in lines if not line.endswith("equal")] == []
