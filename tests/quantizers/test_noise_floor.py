"""KL's noise floor: the unquantized model with noise of the size of rounding."""

import pytest
import torch
from quantizer_models import damage, llama, logits, make

from qbench.quantizers import config_of
from qbench.quantizers.audit.compare import audit
from qbench.quantizers.noise_floor import ONE_IN, moved


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
        model = make(config, tmp_path)
        found[name] = damage(model, original)
        result = audit(llama(dtype=torch.bfloat16), model, config, torch.arange(46).reshape(2, 23))
        assert result.problems == ()
        assert torch.equal(logits(model), logits(model))
    assert 0 < found["noise-floor"] < found["rtn-8bit"]
