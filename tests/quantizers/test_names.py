"""Settings by name: what a recipe may say, and what it is told when it says something else."""

import json
import pickle
import subprocess
import sys

import pytest

from qbench.errors import RecipeError
from qbench.quantizers import QUANTIZERS, parse
from qbench.quantizers.weights import Gptq


@pytest.mark.parametrize("name", list(QUANTIZERS))
def test_a_name_gives_settings_of_that_name(name):
    assert parse(name, {}).name == name


def test_the_names_are_those_of_the_paper_and_its_yardsticks():
    expected = {"bf16", "fp16", "fp32", "bnb-4bit", "bnb-8bit"}
    expected |= {f"{m}-{n}bit" for m in ("gptq", "hqq", "rtn") for n in (2, 3, 4, 8)}
    expected |= {"int8-row", "fp8-row", "fp8-tensor"}  # what hardware multiplies
    own = {n for n in QUANTIZERS if QUANTIZERS.get(n).kind.__module__.startswith("qbench.")}
    assert own == expected


@pytest.mark.parametrize("name", list(QUANTIZERS))
def test_settings_are_plain_json_and_hold_every_default(name):
    plain = parse(name, {}).to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert (plain["name"], plain["method"]) == (name, parse(name, {}).method)
    assert set(QUANTIZERS.get(name).options) <= set(plain)


@pytest.mark.parametrize("name", list(QUANTIZERS))
def test_a_quantizer_can_be_sent_to_another_process(name):
    assert pickle.loads(pickle.dumps(parse(name))) == parse(name)


def test_one_spelling_of_a_number_makes_one_key():
    assert parse("bnb-8bit", {"threshold": 6}) == parse("bnb-8bit", {"threshold": 6.0})
    assert isinstance(parse("bnb-8bit", {"threshold": 6}).threshold, float)


def test_options_reach_the_settings():
    settings = parse("gptq-3bit", {"group_size": 64, "desc_act": True})
    assert settings == Gptq(bits=3, group_size=64, desc_act=True)


def test_a_list_of_a_recipe_is_kept_and_written_as_one():
    chosen = parse("rtn-4bit", {"ignore": ["experts", "*.o_proj"]})
    assert chosen.ignore == ("experts", "*.o_proj")
    assert chosen.to_dict()["ignore"] == ["experts", "*.o_proj"]
    assert hash(chosen) != hash(parse("rtn-4bit"))


@pytest.mark.parametrize("name", list(QUANTIZERS))
def test_every_option_is_explained_with_what_it_may_be(name):
    preset = QUANTIZERS.get(name)
    for option in preset.options:
        meaning, _, values = preset.explain(option).rpartition(" (")
        assert meaning != option
        assert values


@pytest.mark.parametrize(
    ("name", "precision"),
    [("fp32", "W16A16"), ("bnb-8bit", "W8A8"), ("gptq-3bit", "W3A16"), ("hqq-2bit", "W2A16")],
)
def test_precision_has_its_parts(name, precision):
    assert parse(name).precision.name == precision


@pytest.mark.parametrize(
    ("name", "stated", "parts"),
    [
        ("gptq-5bit", {}, ["gptq has no 5-bit; it has 2, 3, 4, 8"]),
        ("bnb-3bit", {}, ["bnb has no 3-bit; it has 4, 8"]),
        ("awq-4bit", {}, ["unknown quantizer 'awq-4bit'", "gptq-4bit", "hqq-2bit"]),
        ("gptq-4bit", {"groupsize": 64}, ["gptq-4bit", "'groupsize'", "group_size"]),
        ("gptq-4bit", {"bits": 3}, ["unknown option 'bits'"]),
        ("bf16", {"group_size": 64}, ["bf16: unknown option 'group_size'; it has no options"]),
        ("gptq-4bit", {"group_size": "64"}, ["group_size", "'64'", "whole number"]),
        ("gptq-4bit", {"group_size": True}, ["group_size", "True", "whole number"]),
        ("gptq-4bit", {"group_size": 0}, ["group_size", "not 0", "at least 8", "or -1"]),
        ("gptq-4bit", {"symmetric": "no"}, ["symmetric must be true or false, not 'no'"]),
        ("gptq-4bit", {"damp": 0.0}, ["damp", "between 0 and 1", "not 0.0"]),
        ("gptq-4bit", {"damp": float("nan")}, ["damp", "nan"]),
        ("gptq-4bit", {"damp": "1e-2"}, ["damp", "'1e-2'", "a number"]),
        ("gptq-4bit", {"backend": "exllama"}, ["backend", "'exllama'", "gptqmodel or torch"]),
        ("gptq-4bit", {"desc_act": True, "group_aware": True}, ["desc_act", "group_aware"]),
        ("bnb-4bit", {"quant_type": "nf3"}, ["quant_type must be nf4 or fp4, not 'nf3'"]),
        ("bnb-4bit", {"threshold": 6.0}, ["'threshold'", "quant_type, double_quant"]),
        ("hqq-2bit", {"axis": 2}, ["axis must be 0 or 1, not 2"]),
        ("hqq-2bit", {"group_size": -1}, ["group_size", "not -1"]),
        ("rtn-2bit", {"ignore": "experts"}, ["ignore must be a list", "'experts'"]),
        ("rtn-2bit", {"ignore": ["a b"]}, ["ignore[0] must be a part of names", "'a b'"]),
        ("rtn-2bit", {"ignore": ["a", 3]}, ["ignore[1] must be text, not 3"]),
        ("rtn-2bit", {"threads": 0}, ["threads must be a whole number of at least 1", "not 0"]),
        ("rtn-2bit", {"compute_dtype": "bf16"}, ["compute_dtype", "bfloat16", "'bf16'"]),
    ],
)
def test_what_is_impossible_is_refused_with_value_and_remedy(name, stated, parts):
    with pytest.raises(RecipeError) as raised:
        parse(name, stated)
    message = str(raised.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_settings_made_directly_are_checked_as_well():
    with pytest.raises(ValueError, match="Input should be 2, 3, 4 or 8"):
        Gptq(bits=5)


@pytest.mark.parametrize(
    ("name", "stated", "expected"),
    [
        ("bf16", {}, ()),
        ("bnb-8bit", {}, ("bitsandbytes",)),
        ("hqq-2bit", {}, ("hqq",)),
        ("gptq-4bit", {}, ("gptqmodel", "optimum")),
        ("gptq-4bit", {}, ()),
        ("gptq-4bit", {"backend": "auto-gptq"}, ("auto-gptq",)),
        ("rtn-4bit", {}, ()),
    ],
)
def test_the_libraries_that_can_change_a_result_are_named(name, stated, expected):
    assert parse(name, stated).requirements == expected


def test_planning_with_quantizers_imports_no_torch():
    program = (
        "import sys; from qbench.quantizers import QUANTIZERS, parse\n"
        "for name in QUANTIZERS:\n"
        "    one = parse(name, {}); (one.settings, one.precision, one.requirements, one.title)\n"
        "    [QUANTIZERS.get(name).explain(o) for o in QUANTIZERS.get(name).options]\n"
        "print({'torch', 'transformers', 'bitsandbytes', 'hqq'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.stdout == "set()\n", run.stderr
