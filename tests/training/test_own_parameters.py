"""Parameters of normalizers that a recipe asks for: trained or fixed, kept in the checkpoint, and
read as they were; with and without a rotary embedding, the sigmoid paper's two set-ups."""

import pytest
import torch
from loading import load_model

from qbench.attention.normalizers import NORMALIZERS
from qbench.checkpoints import find
from qbench.errors import RecipeError
from qbench.training.checkpoint import Run
from qbench.training.model import initial_model
from qbench.training.training_recipe import Shape, TrainingRecipe

SLOPES = [2.0**-4, 2.0**-8]  # of two heads
CASES = {  # what model.parameters says; what each head has at the end, None: something else
    "slopes": ("softmax", {"alibi_slopes": {}}, SLOPES),
    "trained slopes": ("softpick", {"alibi_slopes": {"trained": True}}, None),
    "trained slopes beside s": ("scalable-softmax", {"alibi_slopes": {"trained": True}}, None),
    "a constant bias": ("sigmoid", {"sigmoid_bias": {"start": -3.0, "trained": False}}, [-3.0] * 2),
    "a trained bias": ("sigmoid", {"sigmoid_bias": {"start": -1.0}}, None),
    "fixed sinks": ("softmax-sink", {"sinks": {"start": 1.5, "trained": False}}, [1.5] * 2),
    **{name: (name, {}, None) for name in NORMALIZERS},
}
QUICK = [("slopes", None), ("a trained bias", 10_000.0), ("scalable-softpick", 10_000.0)]
EVERY = [(name, theta) for name in CASES for theta in (None, 10_000.0)]


@pytest.mark.parametrize(
    ("name", "rope_theta"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY if case not in QUICK)],
)
def test_they_are_trained_or_fixed_and_read_as_they_were(
    tmp_path, train, name, rope_theta, monkeypatch
):
    normalizer, options, expected = CASES[name]
    kept, save = [], Run.save

    def keep(run, model, folder):
        kept.append(model)
        return save(run, model, folder)

    monkeypatch.setattr(Run, "save", keep)
    [record] = train(
        tmp_path, normalizers=[normalizer], tokens=640, watch={"every": 100}, log_every=5,
        model={"parameters": options, "rope_theta": rope_theta},
    )  # fmt: skip
    checkpoint = find(str(tmp_path / f"{normalizer}-seed3"))
    assert checkpoint.normalizer == normalizer
    read = load_model(checkpoint, dtype=torch.float32, device="cpu")
    trained = kept[-1].eval()
    for parameter in trained.parameters():  # the rotary frequencies are not rounded
        parameter.data = parameter.data.bfloat16().float()
    ids = torch.arange(12)[None] % 16
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, trained(ids).logits)
    defined = NORMALIZERS[normalizer].parameters
    parameters = [p for p in defined if p.required or p.attribute in options]
    for parameter in parameters:
        changes = options.get(parameter.attribute, {})
        start = torch.tensor(
            parameter.start(2) if changes.get("start") is None else [changes["start"]] * 2
        )
        for layer in read.model.layers:
            values = getattr(layer.self_attn, parameter.attribute)
            if changes.get("trained", parameter.trainable):
                assert not torch.equal(values, start)
                assert torch.allclose(values, start, atol=0.1)
            else:
                assert values.tolist() == (expected or start.tolist())
    # Two numbers a layer for each of what it has.
    shape = {k: v for k, v in record.settings["model"].items() if k != "parameters"}
    plain, _ = initial_model(Shape(**shape), normalizer="softmax", seed=0, device="cpu")
    assert record.parameters - plain.num_parameters() == 2 * 2 * len(parameters)
    rotated = type(read).__name__ == "LlamaForCausalLM"
    assert rotated == (rope_theta is not None)
    if not rotated:  # nothing but slopes tells where a token stands: a sum over keys has no order
        assert not any(layer.self_attn.use_rope for layer in read.model.layers)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"parameters": {"sinks": {}}}, "none of softmax, softpick has 'sinks'; known: alibi_slop"),
        ({"parameters": {"alibi_slopes": {"learned": True}}}, "learned"),
        ({"rope_theta": 0}, "rope_theta"),
    ],
)
def test_what_no_normalizer_of_the_recipe_has_is_refused(recipe_file, changed, words):
    with pytest.raises(RecipeError, match=words):
        TrainingRecipe.load(recipe_file(model=changed))


def test_a_recipe_that_names_none_says_what_it_said_before(recipe_file):
    assert "parameters" not in TrainingRecipe.load(recipe_file()).settings()["model"]
