"""KL's noise floor: the unquantized model with noise of the size of rounding."""

import pytest
import torch
from quantizer_models import damage, llama, logits, make
from small_recipe import DEMO, qbench, small_recipe

from qbench.quantizers import config_of
from qbench.quantizers.audit.cell import audit
from qbench.quantizers.noise_floor import ONE_IN, moved
from qbench.store import Store


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_twelfth_of_the_values_move_by_a_unit_in_the_last_place(dtype):
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = moved(x, 3)
    unit = torch.finfo(dtype).eps * 2.0 ** x.double().abs().log2().floor()
    steps = (found.double() - x.double()) / unit
    changed = steps != 0
    assert float(changed.double().mean()) == pytest.approx(1 / ONE_IN, rel=0.05)
    assert float(steps.mean()) == pytest.approx(0, abs=0.01)
    assert float(steps.square().mean()) == pytest.approx(1 / 12, rel=0.06)
    assert torch.equal(moved(x[5:6], 3), found[5:6])
    assert not torch.equal(moved(x, 4), found)


def test_what_is_zero_or_not_finite_stays():
    x = torch.tensor([[0.0, -0.0, torch.inf, -torch.inf]] * 64)
    assert torch.equal(moved(x, 0), x)


def test_the_floor_lies_below_quantization_and_passes_the_audit(tmp_path):
    original = llama(dtype=torch.bfloat16)
    found = {}
    for name in ("noise-floor", "rtn-8bit"):
        more = {"group_size": 32} if name == "rtn-8bit" else {}
        config = config_of({"name": name, **more}, compute_dtype="bfloat16")
        model = make(config, tmp_path).model
        found[name] = damage(model, original)
        result = audit(llama(dtype=torch.bfloat16), model, config, torch.arange(46).reshape(2, 23))
        assert result.problems == ()
        assert torch.equal(logits(model), logits(model))
    assert 0 < found["noise-floor"] < found["rtn-8bit"]


@pytest.mark.usefixtures("own_cache")
def test_it_is_a_row_of_a_recipe(tmp_path):
    recipe = small_recipe(
        tmp_path,
        checkpoints={"base": str(DEMO / "softpick")},
        compute_dtype="bfloat16",
        quantizers=["bf16", "noise-floor"],
        tasks=["demo_pages"],
    )
    assert qbench("run", recipe, "--out", tmp_path / "out", "--device", "cpu") == 0
    floor = Store(tmp_path / "out").records()[1]
    assert (floor.cell, floor.precision.name) == ("base/noise-floor", "W16A16")
    assert 0 < floor.damage.tasks["demo_pages"].distributions.kl.mean < 0.01
