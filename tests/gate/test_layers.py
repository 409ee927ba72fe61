"""One broken layer is caught and named, though the model's mean and its scores hide it."""

import pytest
from gate_results import CELL, audit_of, changed, failed, of, update
from synthetic import LAYERS

from qbench.gate import check

BROKEN = LAYERS[1]
OTHER_BITS = {"digest": "f" * 64}


def with_layer(folder, **fields):
    """The good grid, one layer of one cell measured otherwise."""
    store = changed(folder)
    audit = audit_of(store, CELL)
    modules = tuple(
        one.model_copy(update=fields) if one.name == BROKEN else one for one in audit.modules
    )
    update(store, CELL, audit=audit.model_copy(update={"modules": modules}))
    return store


def layers_of(result):
    return {gate.metric: gate for gate in of(result, CELL, "audit") if "layer" in gate.metric}


def test_the_same_bits_are_said_to_be_the_same(good, standard):
    (gate,) = layers_of(check.check(good, standard)).values()
    assert (gate.outcome, gate.reason) == ("pass", "same bits in all 4 layers")


def test_the_same_bits_read_wrongly_are_not_the_same(tmp_path, standard):
    (gate,) = failed(with_layer(tmp_path, weight_error=0.9), standard)
    assert (gate.metric, BROKEN in gate.reason) == ("layer_error", True)


def test_other_bits_alone_are_noted_and_pass(tmp_path, standard):
    result = check.check(with_layer(tmp_path, **OTHER_BITS), standard)
    assert result.outcome == "pass"
    assert "same bits in 3 of 4 layers" in layers_of(result)["layer_error"].reason


@pytest.mark.parametrize(
    ("fields", "metric"),
    [
        ({"weight_error": 0.0375 * 0.452 / 0.216}, "layer_error"),  # scales rolled by one
        ({"weight_error": 0.0375 * 1.11}, "layer_error"),
        ({"gain": 0.998 * 1.03}, "layer_gain"),  # scales 3 % too large
        ({"gain": 0.998 * 0.97}, "layer_gain"),
        ({"levels": 8}, "layer_levels"),
        ({"bits_per_weight": 5.0}, "layer_bits"),
    ],
)
def test_a_layer_that_measures_worse_fails_and_is_named(tmp_path, standard, fields, metric):
    (gate,) = failed(with_layer(tmp_path, **OTHER_BITS, **fields), standard)
    assert (gate.cell, gate.metric) == (CELL, metric)
    assert f"beyond the margin: {BROKEN}; worst: {BROKEN} " in gate.reason


@pytest.mark.parametrize(
    "fields",
    [{"weight_error": 0.0375 * 1.013}, {"gain": 0.998 + 0.002}, {"levels": 15},
     {"weight_error": 0.01}],
)  # fmt: skip
def test_what_another_processor_does_to_a_layer_passes(tmp_path, standard, fields):
    assert not failed(with_layer(tmp_path, **OTHER_BITS, **fields), standard)


def test_a_layer_that_is_no_longer_quantized_is_named(tmp_path, standard):
    (gate,) = failed(with_layer(tmp_path, name="model.layers.9.other"), standard)
    assert gate.reason == f"no longer quantized, or not audited: {BROKEN}"
