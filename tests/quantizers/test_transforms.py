"""Transformed models compute what they did: SmoothQuant and rotation, folded into weights."""

import pytest
import torch
from quantizer_models import calibration, ids, logits
from treated_models import decoder

from qbench.errors import RecipeError
from qbench.quantizers import config_of
from qbench.quantizers.hadamard import factors
from qbench.quantizers.methods.equal_models import Rotation, SmoothQuant
from qbench.quantizers.quantize import backend
from qbench.quantizers.rotation import hadamard_transform

TEXT = ids(3, 2, 40)
TRANSFORMS = {
    "smoothquant": SmoothQuant(),
    "smoothquant-paper": SmoothQuant(layers=("attention", "mlp")),
    "smoothquant-alpha": SmoothQuant(alpha=0.8, layers=("o_proj", "down_proj")),
    "rotation": Rotation(),
    "rotation-offline": Rotation(online=False, seed=3),
}


def say_nothing(what: str, done: float) -> None:
    pass


def calibrated(settings, model):
    if not settings.needs_calibration:
        return {}
    return backend(settings).calibrate(model, settings, calibration(), say_nothing)


def transformed(settings, model, tensors=None):
    tensors = calibrated(settings, model) if tensors is None else tensors
    backend(settings).transform(model, settings, tensors)
    return model


def relative(found, wanted):
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("which", "normalizer"),
    [
        ("llama-tied", "softmax"),
        ("qwen3-head-norms", "softmax"),
        ("llama-biases", "softpick"),
        ("smollm3-without-rope", "softmax"),
    ],
)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transformed_model_gives_the_same_logits(name, which, normalizer):
    """Within 1e-5 of their norm in float32, whose rounding alone gives about 1e-6."""
    original = decoder(which, normalizer)
    model = transformed(TRANSFORMS[name], decoder(which, normalizer))
    assert relative(logits(model, TEXT), logits(original, TEXT)) < 1e-5


def test_smoothing_keeps_channels_that_calibration_never_reaches():
    """A head of softpick can be silent on all text; its scale would be next to nothing."""
    model = decoder("llama")
    model.model.layers[1].self_attn.v_proj.weight[:12] = 0
    scales = calibrated(SmoothQuant(), model)["model.layers.1.o_proj"]
    assert torch.equal(scales[:12], torch.ones(12))
    assert (scales[12:] != 1).all()


@pytest.mark.parametrize(
    ("outliers", "config", "says"),
    [
        (
            "smoothquant", {"model_type": "gemma2"},
            "transform: smoothquant: the blocks of gemma2 models are not supported; supported: "
            "llama, mistral, qwen2, qwen3, smollm3; leave the transform out",
        ),
        (
            "rotation", {"model_type": "llama", "hidden_size": 50},
            "transform: rotation: hidden_size 50: no Hadamard matrix of that order by Sylvester's "
            "and Paley's constructions; leave the transform out",
        ),
        (
            "rotation", {"model_type": "qwen2", "hidden_size": 48, "num_attention_heads": 8},
            "transform: rotation: head_dim 6: no Hadamard matrix of that order by Sylvester's "
            "and Paley's constructions; leave the transform out",
        ),
        (
            "rotation", {"model_type": "llama", "intermediate_size": 92},
            "transform: rotation: intermediate_size 92: no Hadamard matrix of that order by "
            "Sylvester's and Paley's constructions; set online: false",
        ),
    ],
)  # fmt: skip
def test_what_can_be_seen_in_a_config_is_refused_before_work(outliers, config, says):
    entry = {"activations": "int8-token", "outliers": outliers}
    with pytest.raises(RecipeError) as raised:
        config_of(entry, compute_dtype="float32").transform.check(config, "cpu")
    assert str(raised.value) == says


# Head widths, hidden and intermediate sizes of models, and small orders of each construction.
ORDERS = [1, 2, 8, 12, 20, 28, 36, 44, 64, 148, 384, 640]


@pytest.mark.parametrize("order", ORDERS)
def test_a_transform_is_a_hadamard_matrix_over_the_root_of_its_order(order):
    identity = torch.eye(order, dtype=torch.float64)
    matrix = hadamard_transform(identity)
    assert torch.equal((matrix * order**0.5).round().abs(), torch.ones_like(matrix))
    torch.testing.assert_close(matrix @ matrix.T, identity, rtol=0, atol=1e-12)


@pytest.mark.parametrize("order", [3, 6, 50, 92, 344, 1001])
def test_orders_without_a_known_matrix_are_none(order):
    assert factors(order) is None
