"""Models with a gate on the output of attention: trained, read, quantized with their gate or
without it."""

import pytest
import torch
from loading import load_model
from small_recipe import qbench, run_small
from torch import nn

from qbench.checkpoints import find
from qbench.training.model import initial_model
from qbench.training.training_recipe import Shape

SHAPE = Shape(hidden=32, layers=2, heads=2, vocabulary=64, context=32)
GATES = {"softmax+head-gate": 2, "softmax+element-gate": 32}  # and outputs of a layer's gate
IDS = torch.arange(12)[None]


@pytest.mark.parametrize("name", GATES)
def test_a_gate_multiplies_attentions_output_and_all_else_starts_alike(name):
    normalizer = name.split("+")[0]
    plain, _ = initial_model(SHAPE, normalizer=normalizer, seed=1, device="cpu")
    gated, attention = initial_model(SHAPE, normalizer=name, seed=1, device="cpu")
    assert attention == f"{normalizer}/reference"
    gates = [layer.self_attn.g_proj for layer in gated.model.layers]
    assert {gate.out_features for gate in gates} == {GATES[name]}
    tensors = gated.state_dict()
    assert all(torch.equal(tensors[n], tensor) for n, tensor in plain.state_dict().items())
    with torch.no_grad():
        for layer, gate in zip(plain.model.layers, gates, strict=True):
            layer.self_attn.o_proj.weight /= 2  # as a gate of σ(0)
            nn.init.zeros_(gate.weight)
        torch.testing.assert_close(gated(IDS).logits, plain(IDS).logits)
        # one closed gate: nothing is left of its part of the output
        gates[0].weight[-1] = -1e4 * torch.sign(gated.model.embed_tokens.weight[0])
        width = 16 if GATES[name] == 2 else 1
        seen = []
        hook = gated.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0])
        )
        gated(IDS[:, :1])
        hook.remove()
        assert seen[0][..., -width:].abs().max() == 0 < seen[0][..., :-width].abs().max()


@pytest.mark.usefixtures("own_cache")
def test_a_trained_gate_is_read_and_quantized_or_left_out(tmp_path, recipe_file):
    names = ["softmax", "softmax+head-gate", "softmax+element-gate"]
    training = recipe_file(
        normalizers=names, model={"hidden": 32, "layers": 1, "context": 64}, tokens=384,
        batch={"tokens": 128, "sequences": 2},
    )  # fmt: skip
    out = tmp_path / "trained"
    assert qbench("train", training, "--out", out, "--device", "cpu") == 0
    folders = {name: out / f"{name}-seed3" for name in names}
    for name, folder in folders.items():
        checkpoint = find(str(folder))
        assert checkpoint.training.normalizer == name
        model = load_model(checkpoint, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            logits = model(IDS).logits
            model.set_attn_implementation("eager")  # the class's own attention
            torch.testing.assert_close(logits, model(IDS).logits)
    store = run_small(
        tmp_path,
        checkpoints={"head": str(folders[names[1]]), "element": str(folders[names[2]])},
        quantizers=["fp32", {"name": "rtn-4bit", "group_size": 32},
                    {"name": "rtn-4bit", "group_size": 32, "ignore": ["g_proj"], "label": "but"}],
        tasks=["demo_lastword"], evaluation={"limit": 4, "damage": False},
    )  # fmt: skip
    records = {(r.checkpoint, r.quantizer): r for r in store.records()}
    assert {record.status for record in records.values()} == {"ok"}
    for name in ("head", "element"):
        layers = {
            label: {module.name for module in records[name, label].audit.modules}
            for label in ("rtn-4bit", "but")
        }
        assert layers["rtn-4bit"] - layers["but"] == {"model.layers.0.self_attn.g_proj"}
