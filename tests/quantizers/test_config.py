"""Configs: what a recipe may say of a cell's precision, what it is told when it says something
else, and what a key and a table get of it."""

import json
import pickle

import pytest
from quantizer_models import make_with_detail, parse

from qbench.errors import RecipeError
from qbench.quantizers import METHODS, config_of
from qbench.quantizers.config import ignore_advice
from qbench.quantizers.registry import COMBINATIONS, config_of_record, settings_of, split_commas
from qbench.recipe import Overrides, Recipe


@pytest.mark.parametrize("name", list(METHODS))
def test_a_name_gives_plain_data_with_every_default_that_can_be_sent_elsewhere(name):
    method, part = METHODS[name], settings_of(name)
    plain = part.to_dict()
    assert part.name == plain["name"] == name
    assert json.loads(json.dumps(plain)) == plain
    assert set(method.options) <= set(plain)
    assert pickle.loads(pickle.dumps(part)) == part
    assert part.precision if part.kind != "transform" else method.description
    assert all(field.description for field in method.options.values())


@pytest.mark.parametrize("name", sorted({*METHODS, *COMBINATIONS} - {"checkpoint", "lm-eval"}))
def test_a_config_is_written_as_its_name(name):
    if name in METHODS and METHODS[name].settings.kind == "transform":
        name = f"rtn-4bit+{name}"
    config = config_of(name)
    assert config_of(config.name) == config
    assert config.name == COMBINATIONS.get(name, (name,))[0]


def test_one_spelling_of_a_number_makes_one_key():
    assert parse("bnb-8bit", {"threshold": 6}) == parse("bnb-8bit", {"threshold": 6.0})
    assert isinstance(parse("bnb-8bit", {"threshold": 6}).weights.threshold, float)


@pytest.mark.parametrize("option", ["ignore", "leave_out"])  # as older recipes have it
def test_a_list_of_a_recipe_is_kept_and_written_as_one(option):
    chosen = parse("rtn-4bit", {option: ["experts", "*.o_proj"]})
    assert chosen.weights.ignore == ("experts", "*.o_proj")
    assert chosen.to_dict()["ignore"] == ["experts", "*.o_proj"]
    assert hash(chosen) != hash(parse("rtn-4bit"))


@pytest.mark.parametrize(
    ("name", "options", "parts"),
    [
        ("gptq-5bit", {}, ["gptq has no 5-bit; it has 2, 3, 4, 8"]),
        ("kv4", {"residual_length": 8}, ["kv-int4-token: unknown option 'residual_length'"]),
        ("awq", {}, ["unknown quantizer 'awq'; did you mean awq-4bit?"]),
        ("bnb", {}, ["unknown quantizer 'bnb'; did you mean bnb-4bit or bnb-8bit?"]),
        ("hqq4bit", {}, ["unknown quantizer 'hqq4bit'; did you mean hqq-4bit"]),
        ("gptq-4bit+kv4", {"group_size": 8}, ["as in NAME:group_size=…"]),
        ("gptq-4bit:group_size", {}, ["write gptq-4bit:option=value, not 'group_size'"]),
        ("w8a8-int8:per=token", {}, ["w8a8-int8 is int8-row+int8-token; write its parts"]),
        ("gptq-4bit+rtn-4bit", {}, ["two parts quantize weights"]),
        ("gptq-4bit", {"groupsize": 64}, ["gptq-4bit", "'groupsize'", "group_size"]),
        ("gptq-4bit", {"num_bits": 3}, ["unknown option 'num_bits'"]),
        ("bf16", {"group_size": 64}, ["bf16: unknown option 'group_size'; it has no options"]),
        ("gptq-4bit", {"group_size": "64"}, ["group_size", "'64'", "valid integer"]),
        ("gptq-4bit", {"group_size": True}, ["group_size", "True", "valid integer"]),
        ("gptq-4bit", {"group_size": 0}, ["group_size must be greater than or equal to 8, not 0"]),
        ("gptq-4bit", {"symmetric": "no"}, ["symmetric must be a valid boolean, not 'no'"]),
        ("gptq-4bit", {"damp": 0.0}, ["damp", "greater than 0", "not 0.0"]),
        ("gptq-4bit", {"damp": float("nan")}, ["damp", "nan"]),
        ("gptq-4bit", {"desc_act": True, "group_aware": True}, ["desc_act", "group_aware"]),
        ("gptq-4bit", {"group_size": -1, "group_aware": True}, ["set a group_size"]),
        ("bnb-4bit", {"quant_type": "nf3"}, ["quant_type must be 'nf4' or 'fp4', not 'nf3'"]),
        ("hqq-2bit", {"axis": 2}, ["axis must be 0 or 1, not 2"]),
        ("hqq-2bit", {"group_size": 12}, ["group_size must be a multiple of 8, not 12"]),
        ("rtn-2bit", {"ignore": ["a b"]}, ["ignore[0] must be a part of names", "'a b'"]),
        ("rtn-2bit", {"ignore": ["a", 3]}, ["ignore[1] must be a valid string, not 3"]),
        ("rtn-2bit", {"threads": 2}, ["unknown option 'threads'; it has ignore,"]),
        ("rtn-2bit", {"compute_dtype": "bf16"}, ["compute_dtype", "bfloat16", "'bf16'"]),
    ],
)
def test_what_is_impossible_is_refused_with_value_and_remedy(name, options, parts):
    with pytest.raises(RecipeError) as raised:
        parse(name, options)
    message = str(raised.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("name", "expected"),
    [("bf16", ()), ("bnb-8bit", ("bitsandbytes",)), ("hqq-2bit", ("hqq",)), ("gptq-4bit", ())],
)
def test_the_libraries_that_can_change_a_result_are_named(name, expected):
    assert parse(name).requirements == expected


# Entries of a recipe

STATED = {
    "bnb-8bit": ("bnb-8bit", "W8A8", "bnb"),
    "{activations: int8-token}": ("int8-token", "W16A8", "activations"),
    "{weights: gptq-4bit, activations: int8-token}": (
        "gptq-4bit+int8-token", "W4A8", "gptq+activations"),
    "{weights: {name: hqq-3bit, axis: 1}, activations: {name: int4-token, group_size: 64}}": (
        "hqq-3bit+int4-token", "W3A4", "hqq+activations"),
    "{weights: gptq-4bit}": ("gptq-4bit", "W4A16", "gptq"),
    "{activations: int8-token, kv: int4-token, outliers: rotation}": (
        "rotation+int8-token+kv-int4-token", "W16A8KV4", "activations+kv"),
    "{activations: nvfp4, label: mine}": ("mine", "W16A4", "activations"),
    "{name: gptq-4bit, group_size: 64, kv_cache: int4-token:group_size=16}": (
        "gptq-4bit", "W4A16KV4", "gptq+kv"),
    "gptq-4bit:group_size=64,ignore=[o_proj]+kv4": (
        "gptq-4bit-group_size-64-ignore-o_proj-+kv4", "W4A16KV4", "gptq+kv"),
}  # fmt: skip
REFUSED = {
    "{activations: int5-token}": "activations: unknown quantizer 'int5-token'; did you mean int",
    "{activations: gptq-4bit}": "activations: 'gptq-4bit' is no method for activations; known: int",
    "{kv: {name: int4-token, before_rope: true}}": "kv-int4-token: unknown option 'before_rope'",
    "{activations: 8}": "activations: a name, or {name: …, option: value}, not 8",
    "{weights: gptq-4bit, group_size: 64}": "unknown part 'group_size'; known: weights, "
    "transform, activations, kv_cache, label",
    "{weights: bnb-8bit, activations: int8-token}": "weights: bnb-8bit quantizes activations "
    "itself; leave activations out",
    "{transform: rotation}": "transform: rotation alone quantizes nothing",
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
def test_an_entry_is_a_config(entry, tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "a"}\n')
    path = recipe(tmp_path, entry, more="calibration: {path: c.jsonl}\n")
    (column,) = Recipe.load(path).quantizers
    actual = column.quantization
    assert (column.label, actual.precision.name, actual.method) == STATED[entry]
    assert actual.precision.quantized


@pytest.mark.parametrize("entry", REFUSED)
def test_what_cannot_be_is_refused_in_a_line_that_says_where(entry, tmp_path):
    with pytest.raises(RecipeError) as refused:
        Recipe.load(recipe(tmp_path, entry))
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{tmp_path / 'recipe.yaml'}:4: quantizers[0]: ")
    assert REFUSED[entry] in line


def test_a_dtype_reaches_weights_that_are_left_out_and_those_of_parts(tmp_path):
    path = recipe(tmp_path, "{activations: int8-token}", more="compute_dtype: float16\n")
    (column,) = Recipe.load(path).quantizers
    assert column.quantization.compute_dtype == "float16"
    assert column.quantization.weights is None
    entries = ("{weights: bf16, activations: int8-token}", "{weights: {name: rtn-4bit, "
               "compute_dtype: bfloat16}, activations: int4-token}")  # fmt: skip
    loaded = Recipe.load(recipe(tmp_path, *entries), Overrides(dtype="float32"))
    assert [c.quantization.compute_dtype for c in loaded.quantizers] == ["float32", "float32"]


def test_all_settings_are_in_the_key_by_the_recipes_words():
    options = {"weights": "rtn-4bit", "kv": "int4-token", "outliers": "rotation"}
    plain = config_of(options, compute_dtype="float32").to_dict()
    assert list(plain) == ["name", "method", "weights", "transform", "kv_cache"]
    assert plain["weights"] == parse("rtn-4bit", {"compute_dtype": "float32"}).to_dict()
    assert plain["kv_cache"]["name"] == "kv-int4-token"


def test_a_record_of_a_mix_is_read_whose_options_were_none_by_default():
    layers = {"*": {"name": "gptq-4bit", "method": "gptq", "batch_size": None, "group_size": 64}}
    read = config_of_record({"name": "mixed", "method": "mixed", "layers": layers})
    assert read == config_of({"name": "mixed", "layers": {"*": "gptq-4bit:group_size=64"}})


def test_cells_that_share_weights_quantize_them_once(tmp_path):
    """And what is calibrated beside them, with whatever weights."""
    options = {"weights": {"name": "gptq-4bit", "group_size": 32}}
    details = [
        make_with_detail(config_of({**options, **more}, compute_dtype="float32"), tmp_path)[1]
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


GRAMMAR = {  # a text, and the mapping that says the same
    "gptq-4bit:group_size=64,desc_act=true": {
        "name": "gptq-4bit", "group_size": 64, "desc_act": True},
    "gptq-4bit:damp=0.01+kv4": {
        "weights": {"name": "gptq-4bit", "damp": 0.01}, "kv_cache": "int4-token"},
    "rtn-4bit:ignore=[o_proj,*.up_proj]": {"name": "rtn-4bit", "ignore": ["o_proj", "*.up_proj"]},
    "rtn-4bit:ignore=o_proj": {"name": "rtn-4bit", "ignore": ["o_proj"]},
    "int4-token-asymmetric": {"activations": {"name": "int4-token", "symmetric": False}},
    "w8a8-fp8-tensor+rotation": {
        "weights": "fp8-tensor", "activations": "fp8-tensor", "outliers": "rotation"},
    "kv-int3-token:keep_first=4": {"kv": {"name": "int3-token", "sink_tokens": 4}},
    "bf16+fp8-token": {"weights": "bf16", "activations": "fp8-row"},
    "mixed:layers=[*.down_proj=gptq-8bit:group_size=64,*=gptq-4bit]": {
        "name": "mixed", "layers": {"*.down_proj": "gptq-8bit:group_size=64", "*": "gptq-4bit"}},
}  # fmt: skip


@pytest.mark.parametrize("text", GRAMMAR)
def test_a_text_and_a_mapping_say_the_same(text):
    assert config_of(text) == config_of(GRAMMAR[text])


def test_quantizers_are_split_at_commas_between_names():
    assert split_commas("bf16,gptq-4bit:group_size=64,desc_act=true+kv4,a:ignore=[b,c],d") == [
        "bf16", "gptq-4bit:group_size=64,desc_act=true+kv4", "a:ignore=[b,c]", "d",
    ]  # fmt: skip


def test_advice_leaves_out_what_was_refused_and_nothing_else():
    experts = [f"layers.{i}.experts.{j}.up" for i in (0, 1) for j in (0, 1)]
    every = [*experts, "layers.0.down", "layers.1.down"]
    assert ignore_advice(experts[:1], every) == "ignore: ['layers.0.experts.0.up']"
    advice = "ignore: ['layers.*.experts.*.up', 'layers.1.down']"
    assert ignore_advice([*experts, "layers.1.down"], every) == advice
