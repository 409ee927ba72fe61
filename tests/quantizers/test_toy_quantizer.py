"""One file outside the package is enough for a new quantizer, and what the audit makes of modules
that it has never seen."""

import json
from pathlib import Path

import pytest
from plugins import toy_quantizer  # it registers sign-1bit
from quantizer_models import check, llama, parse
from torch import nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    quantize_,
)

from qbench.errors import RecipeError


def test_its_settings_are_checked_keyed_and_explained():
    chosen = parse("sign-1bit", {"gain": 1})
    assert json.loads(json.dumps(chosen.to_dict())) == chosen.to_dict()
    assert (chosen.to_dict()["gain"], chosen.title) == (1.0, "Signs")
    with pytest.raises(RecipeError, match="gain must be less than 2, not 7"):
        parse("sign-1bit", {"gain": 7})
    with pytest.raises(RecipeError, match="sign has no 2-bit; it has 1"):
        parse("sign-2bit", {})


def test_its_own_file_is_part_of_its_key(tmp_path, monkeypatch):
    """The digest of qbench's modules does not know of it."""
    before, changed = parse("sign-1bit").to_dict(), tmp_path / "changed.py"
    changed.write_text(Path(toy_quantizer.__file__).read_text() + "# changed\n")
    monkeypatch.setattr(toy_quantizer, "__file__", str(changed))
    assert parse("sign-1bit").to_dict()["source"] != before["source"]
    assert "source" not in parse("rtn-4bit").to_dict()


@pytest.mark.parametrize("config", [Int8DynamicActivationInt8WeightConfig, Float8WeightOnlyConfig])
def test_a_model_that_torchao_quantized_does_not_pass_for_an_unquantized_one(config):
    model = llama()
    body = lambda module, name: isinstance(module, nn.Linear) and "lm_head" not in name  # noqa: E731
    quantize_(model, config(set_inductor_config=False), filter_fn=body)
    report = check(model, parse("fp32"))
    assert len([line for line in report.problems if "not a plain weight in float32" in line]) == 14
