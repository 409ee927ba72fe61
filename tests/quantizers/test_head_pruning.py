"""Heads that are cut out: which ones, that they give nothing then, and that the record says so."""

import pytest
import torch
from loading import load_model
from small_recipe import DEMO

from qbench.analysis.attention import output_ratios as of_a_text
from qbench.analysis.capture import attention_observed
from qbench.attention import transformers as interface
from qbench.checkpoints import find
from qbench.quantizers.audit.cell import audit
from qbench.quantizers.head_pruning import KEPT, choose, install, output_ratios
from qbench.quantizers.names import config_of
from qbench.quantizers.transforms import Dormant, Weakest


def softpick():
    return load_model(find(str(DEMO / "softpick")), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def texts():
    return torch.randint(3, 400, (3, 40), generator=torch.Generator().manual_seed(0))


def test_what_heads_give_is_what_an_analysis_measures(texts):
    model, seen = softpick(), {}

    def look(layer, call):
        seen.setdefault(layer, []).append(of_a_text(call.output)[0])

    with torch.no_grad(), attention_observed(model, look):
        for row in texts:
            model(input_ids=row[None])
    found = output_ratios(model, texts[:1], lambda *_: None)
    assert list(found) == [f"model.layers.{index}.self_attn" for index in range(4)]
    for layer, ratios in enumerate(found.values()):
        assert ratios.tolist() == pytest.approx(seen[layer][0].tolist(), rel=1e-5)


def test_dormant_heads_are_below_a_share_of_their_layer_and_the_weakest_a_share_of_all():
    ratios = torch.tensor([[0.005, 1.9, 1.1], [0.2, 0.01, 2.8]])
    assert choose(Dormant(), ratios).tolist() == [[False, True, True], [True, True, True]]
    assert choose(Weakest(share=0.34), ratios).tolist() == [
        [False, True, True],
        [True, False, True],
    ]
    assert choose(Weakest(share=0.01), ratios).all()


def pruned(kept):
    model = softpick()
    tensors = {f"model.layers.{i}.self_attn": torch.tensor(row) for i, row in enumerate(kept)}
    install(model, Dormant(), tensors)
    return model


def test_a_model_without_some_heads_is_one_whose_projection_does_not_read_them(texts):
    kept = [[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 0]]
    found = pruned(kept)
    expected = softpick()
    with torch.no_grad():
        for layer, row in zip(expected.model.layers, kept, strict=True):
            weight = layer.self_attn.o_proj.weight
            weight.view(len(weight), 4, -1)[:, torch.tensor(row) == 0] = 0
        ids = {"input_ids": texts, "attention_mask": torch.ones_like(texts)}
        ids["attention_mask"][0, :9] = 0
        assert torch.allclose(found(**ids).logits, expected(**ids).logits, atol=1e-5)


def cell(**options):
    return config_of({"prune_heads": {"name": "weakest", **options}}, compute_dtype="float32")


def test_the_audit_counts_pruned_heads_and_fails_where_one_still_speaks(texts, monkeypatch):
    quantizer = cell(share=0.1)
    kept = [[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1]]
    found = audit(softpick(), pruned(kept), quantizer, texts)
    assert found.passed, found.problems
    assert found.heads.pruned == ((0, 1), (2, 0), (2, 1))
    assert (found.heads.total, found.heads.largest_output) == (16, 0.0)
    assert found.heads.share == 3 / 16
    broken = pruned(kept)
    with monkeypatch.context() as patched:
        patched.setattr(interface, "_of_kept_heads", lambda module, output: output)
        text = "; ".join(audit(softpick(), broken, quantizer, texts).problems)
    assert "pruned heads give up to" in text
    delattr(broken.model.layers[2].self_attn, KEPT)
    text = "; ".join(audit(softpick(), broken, quantizer, texts).problems)
    assert "model.layers.2.self_attn: no head pruning is installed" in text


def test_heads_that_gave_nothing_may_go_without_a_trace(texts):
    found = audit(softpick(), pruned([[1] * 4] * 4), cell(), texts)
    assert found.passed, found.problems
    assert found.logits_moved == 0
    both = config_of(
        {"weights": {"name": "rtn-4bit", "group_size": 64}, "prune_heads": "dormant"},
        compute_dtype="float32",
    )
    assert "the logits are those" in "".join(audit(softpick(), softpick(), both, texts).problems)
