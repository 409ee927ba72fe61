"""Checkpoints of both formats are treated alike: they are the same models of transformers here."""

import pytest
import torch
from folders import CONFIG, random_tensors, write

from qbench.checkpoints import find, load_model
from qbench.quantizers import rotation
from qbench.quantizers.transforms import Rotation

TEXT = torch.arange(2, 30)[None]


@pytest.mark.parametrize("attention", ["parallel_attn", "parallel_softpick_attn"])
def test_a_rotated_checkpoint_gives_the_same_logits_from_both_formats(attention, tmp_path):
    config = {**CONFIG, "attn_impl": attention, "num_heads": 4, "num_kv_heads": 2}
    first = find(str(write(tmp_path / "fla", config, random_tensors(config))))
    model = load_model(first, dtype=torch.float32, device="cpu")
    normalizer = model.config.qbench_normalizer
    model.save_pretrained(tmp_path / "hf")
    second = find(str(tmp_path / "hf"), normalizer=normalizer)
    assert (first.format, second.format) == ("flash-linear-attention", "transformers")
    with torch.no_grad():
        wanted = model(TEXT).logits
        for checkpoint in (first, second):
            treated = load_model(checkpoint, dtype=torch.float32, device="cpu")
            settings = Rotation()
            tensors = rotation.calibrate(treated, settings, None, lambda what, done: None)
            rotation.transform(treated, settings, tensors)
            assert not torch.equal(treated.lm_head.weight, model.lm_head.weight)
            torch.testing.assert_close(treated(TEXT).logits, wanted, rtol=1e-4, atol=1e-5)
