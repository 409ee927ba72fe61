"""What a plan takes from headers is what quantizers will meet."""

import pytest
from checkpoints.folders import CONFIG, random_tensors, write
from tiny import KINDS, tiny_model, write_tiny

from qbench.checkpoints import find
from qbench.checkpoints.find import has_other_matrices, linear_shapes
from qbench.quantizers.linear import linearize, linears, matrices


def met(model):
    """Sorted shapes of the linear layers, each expert's aside."""
    linearize(model)
    return sorted(
        (layer.out_features, layer.in_features)
        for name, layer in linears(model).items()
        if ".experts." not in name
    )


@pytest.mark.parametrize("kind", KINDS)
def test_headers_give_the_shapes_of_the_models_linear_layers(kind, tmp_path):
    found = linear_shapes(find(str(write_tiny(tmp_path, kind, intermediate_size=96))))
    model = tiny_model(kind, intermediate_size=96)
    dense = sorted(shape for name, shape in found.items() if ".experts." not in name)
    expected = met(model)
    if kind == "afmoe":  # whose routers are linear layers
        expected = [shape for shape in expected if shape[0] != 4]
    assert dense == expected


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_matrices_end_in_words_of_the_files(kind, tmp_path):
    """So that a plan refuses no ``ignore`` that the model knows."""
    checkpoint = find(str(write_tiny(tmp_path, kind)))
    if not has_other_matrices(checkpoint):
        found = linear_shapes(checkpoint)
        words = {word for name in found for word in name.split(".")}
        assert {name.rpartition(".")[2] for name in matrices(tiny_model(kind))} <= words


def test_fused_experts_are_read_as_they_multiply(tmp_path):
    found = linear_shapes(find(str(write_tiny(tmp_path, "gpt_oss", intermediate_size=96))))
    experts = {name.rpartition(".")[2]: shape for name, shape in found.items() if "experts" in name}
    assert experts == {"gate_up_proj": (192, 64), "down_proj": (64, 96)}


def test_the_format_of_flash_linear_attention_is_read_too(tmp_path):
    config = {**CONFIG, "num_kv_heads": 1}
    found = linear_shapes(find(str(write(tmp_path / "c", config, random_tensors(config)))))
    assert {name.rpartition(".")[2]: shape for name, shape in found.items()} == {
        "q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64),
        "gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96),
    }  # fmt: skip
