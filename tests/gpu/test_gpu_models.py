"""Every class of models on CUDA: scored as on its own attention, quantized, audited."""

from typing import get_args

import pytest
import torch
from loading import load_model
from quantizer_models import DIGEST, parse
from scoring_models import ask, choices, scorer, settings
from tiny import CONFIGS, write_tiny
from transformers import AutoModelForCausalLM

from qbench.checkpoints import find
from qbench.evaluation.scoring.forward import fit_settings
from qbench.evaluation.settings import Mode, Tolerance
from qbench.quantizers.audit.compare import audit
from qbench.quantizers.calibration import Calibration
from qbench.quantizers.quantize import quantize

LOOSE = Tolerance(mean=1, largest=5, changed=1.0)
CLOSE = 0.05  # nats a request of a few tokens: float32 products may be TF32


def answers(model, mode, **changes):
    lm = scorer(model, mode, tolerance=LOOSE, **changes)
    scores = ask(lm, choices(3))
    return torch.tensor([value for value, _ in scores])


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_is_scored_as_on_its_own_attention(kind, tmp_path):
    checkpoint = find(str(write_tiny(tmp_path, kind)))
    ours = load_model(checkpoint, dtype=torch.float32, device="cuda")
    chosen = ours.chosen_attention
    own = "eager" if kind == "gemma2" or chosen.implementation == "eager" else None
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation=own
    )
    expected = answers(theirs.cuda().eval(), "lm-eval")
    if not chosen.why:
        assert ours.config._attn_implementation == f"qbench-{chosen.normalizer}-triton"
    fitted, _ = fit_settings(ours, settings("fast"))
    modes = get_args(Mode)  # the fastest first
    for mode in modes[modes.index(fitted.mode) :]:
        packed = {"packed": fitted.packed} if mode == "fast" else {}
        assert (answers(ours, mode, **packed) - expected).abs().max() < CLOSE, mode


@pytest.mark.parametrize("kind", CONFIGS)
def test_it_is_loaded_in_half_precision(kind, tmp_path):
    """What our attention gives is held against the class's own there."""
    assert load_model(find(str(write_tiny(tmp_path, kind))), dtype=torch.bfloat16, device="cuda")


EXPERTS = ("mixtral", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("name", ["hqq-4bit", "bnb-4bit", "bnb-8bit", "gptq-4bit"])
@pytest.mark.parametrize("kind", [*EXPERTS, "gpt2", "gemma2"])
def test_experts_and_turned_layers_are_quantized(kind, name, tmp_path):
    checkpoint = find(str(write_tiny(tmp_path / "model", kind)))
    stated = {"compute_dtype": "bfloat16", "group_size": 32}
    known = parse(name).to_dict()
    quantizer = parse(name, {k: v for k, v in stated.items() if k in known})
    ids = torch.randint(2, 400, (8, 24), generator=torch.Generator().manual_seed(1))

    def model():
        return load_model(checkpoint, dtype=torch.bfloat16, device="cuda")

    made = quantize(
        model(), quantizer, calibration=Calibration(ids=ids), digest=DIGEST,
        artifacts=tmp_path / "kept",
    )[0]  # fmt: skip
    assert audit(model(), made, quantizer, ids[:2].cuda()).problems == ()
