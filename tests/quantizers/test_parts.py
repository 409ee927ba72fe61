"""Cells in parts: what a recipe may say, and what it means."""

import subprocess
import sys

import pytest
from quantizer_models import llama, make

from qbench.errors import RecipeError
from qbench.quantizers import config_of, parse
from qbench.quantizers.names import ACTIVATIONS, COMBINATIONS, KV_CACHES, TRANSFORMS
from qbench.recipe import Recipe

STATED = {
    "{activations: int8-token}": ("int8-token", "W16A8", "activations"),
    "{weights: gptq-4bit, activations: int8-token}": (
        "gptq-4bit+int8-token", "W4A8", "gptq+activations"),
    "{weights: {name: hqq-3bit, axis: 1}, activations: {name: int4-token, group_size: 64}}": (
        "hqq-3bit+int4-token", "W3A4", "hqq+activations"),
    "{weights: gptq-4bit}": ("gptq-4bit", "W4A16", "gptq"),
    "{activations: nvfp4, label: mine}": ("mine", "W16A4", "activations"),
}  # fmt: skip
REFUSED = {
    "{activations: int5-token}": "unknown activation quantizer 'int5-token'; known: ",
    "{activations: {name: int8-token, percentile: 3}}": "int8-token: unknown option 'percentile'; "
    "it has ignore, arithmetic, group_size",
    "{activations: {name: int8-static, percentile: 20}}": "percentile must be a number of at least "
    "50 and at most 100, not 20",
    "{activations: {name: int8-static, percentile: .nan}}": "percentile must be a number",
    "{activations: 8}": "activations: a name, or {name: …, option: value}, not 8",
    "{name: gptq-4bit, activations: int8-token}": "gptq-4bit: say weights: gptq-4bit where there "
    "is activations beside it",
    "{weights: gptq-4bit, group_size: 64}": "unknown part 'group_size'; there are weights, "
    "activations, kv, outliers, prune_heads, and label",
    "{weights: bnb-8bit, activations: int8-token}": "weights: bnb-8bit quantizes activations "
    "itself; leave activations out",
    "{label: x}": "a quantizer is a name, or {name: …, option: value}",
    "{activations: int8-static}": "int8-static needs calibration text; add calibration:",
    "{weights: gptq-9bit, activations: int8-token}": "gptq has no 9-bit; it has 2, 3, 4, 8",
}


def recipe(tmp_path, *entries, more=""):
    path = tmp_path / "recipe.yaml"
    listed = "".join(f"  - {entry}\n" for entry in entries)
    path.write_text(f"name: r\ncheckpoints: {{a: x}}\nquantizers:\n{listed}tasks: [piqa]\n{more}")
    return path


@pytest.mark.parametrize("entry", STATED)
def test_an_entry_in_parts_is_a_quantizer(entry, tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n')
    path = recipe(tmp_path, entry, more="calibration: {path: c.jsonl}\n")
    (column,) = Recipe.load(path).quantizers
    found = column.quantizer
    assert (column.label, found.precision.name, found.method) == STATED[entry]
    assert found.precision.quantized


@pytest.mark.parametrize("entry", REFUSED)
def test_what_cannot_be_is_refused_in_a_line_that_says_where(entry, tmp_path):
    with pytest.raises(RecipeError) as refused:
        Recipe.load(recipe(tmp_path, entry))
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{tmp_path / 'recipe.yaml'}:4: quantizers[0]: ")
    assert REFUSED[entry] in line


def test_weights_that_are_left_out_are_computed_in_the_recipes_dtype(tmp_path):
    path = recipe(tmp_path, "{activations: int8-token}", more="compute_dtype: float16\n")
    (column,) = Recipe.load(path).quantizers
    assert column.quantization.compute_dtype == "float16"
    assert column.quantization.precision.weights is None


def test_another_dtype_reaches_the_weights_of_parts(tmp_path):
    from qbench.overrides import Overrides

    entries = ("{weights: bf16, activations: int8-token}", "{weights: {name: rtn-4bit, "
               "compute_dtype: bfloat16}, activations: int4-token}")  # fmt: skip
    loaded = Recipe.load(recipe(tmp_path, *entries), Overrides(dtype="float32"))
    assert [c.quantization.compute_dtype for c in loaded.quantizers] == ["float32", "float32"]


def test_the_parts_settings_are_all_in_the_key():
    stated = {"weights": "rtn-4bit", "activations": {"name": "int8-static", "percentile": 99.9}}
    settings = config_of(stated, compute_dtype="float32").to_dict()
    assert settings["weights"] == parse("rtn-4bit", {"compute_dtype": "float32"}).to_dict()
    assert settings["activations"] == {
        "name": "int8-static", "ignore": [], "bits": 8, "symmetric": True, "percentile": 99.9,
        "arithmetic": "simulated",
    }  # fmt: skip


@pytest.mark.parametrize("registry", [ACTIVATIONS, KV_CACHES, TRANSFORMS])
def test_every_part_says_what_it_is(registry):
    for name in registry:
        preset = registry.get(name)
        part = registry.parse(name)
        assert part.name == name
        assert part.settings["name"] == name
        assert preset.description
        assert all(preset.explain(option) for option in preset.options)


def test_every_combination_is_one():
    for name in COMBINATIONS:
        found = config_of({"name": name}, compute_dtype="float32")
        assert found.beside_weights
        assert COMBINATIONS.get(name).description


def test_a_group_that_does_not_divide_the_width_is_refused_before_work(tmp_path):
    chosen = config_of({"activations": "mxfp4"}, compute_dtype="float32")
    with pytest.raises(RecipeError, match="hidden_size is 100, no multiple of the 32 values"):
        chosen.check({"hidden_size": 100, "intermediate_size": 64}, "cpu")
    chosen.check({"hidden_size": 96, "intermediate_size": 64}, "cpu")


def test_a_pattern_that_names_no_layer_is_refused(tmp_path):
    stated = {"activations": {"name": "int8-token", "ignore": ["experts"]}}
    with pytest.raises(Exception, match="ignore: 'experts' names no layer; they end in q_proj"):
        make(config_of(stated, compute_dtype="float32"), tmp_path)


def test_combined_cells_come_from_their_artifact_the_second_time(tmp_path):
    chosen = config_of({"activations": "int8-static"}, compute_dtype="float32")
    first = make(chosen, tmp_path)
    again = make(chosen, tmp_path)
    assert again.detail.startswith("artifact reused")
    fixed = [m.model.qbench_inputs.fixed for m in (first, again)]
    assert {n: float(f.scale) for n, f in fixed[0].items()} == {
        n: float(f.scale) for n, f in fixed[1].items()
    }
    assert not hasattr(llama(), "qbench_inputs")


def test_cells_that_share_weights_quantize_them_once(tmp_path):
    """And what is calibrated beside them, with whatever weights."""
    stated = {"weights": {"name": "gptq-4bit", "group_size": 32}}
    details = [
        make(config_of({**stated, **more}, compute_dtype="float32"), tmp_path).detail
        for more in (
            {"activations": "int8-static"},
            {},
            {"activations": "int8-token"},
            {"activations": "int8-static", "weights": {"name": "rtn-8bit", "group_size": 32}},
        )
    ]
    assert details[0] == "unquantized, float32, int8-static; our own GPTQ"
    assert details[1] == details[2] == "artifact reused: our own GPTQ"
    assert details[3].startswith("artifact reused: unquantized, float32, int8-static; ")


def test_parts_are_parsed_without_torch():
    code = "import sys, qbench.quantizers.parts; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
