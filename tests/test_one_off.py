"""A run without a recipe, a recipe's parts replaced, and several runs in one folder."""

import re

import pytest
import yaml
from small_recipe import DEMO, qbench, small_recipe

from qbench.errors import DataError, RecipeError
from qbench.plan import plan
from qbench.recipe import Overrides, Recipe, added_column, save
from qbench.store import Store

pytestmark = pytest.mark.usefixtures("own_cache")
HERE = ("--definitions", DEMO / "tasks", "--data", DEMO / "data", "--device", "cpu")
ONE = ("--checkpoint", f"softpick={DEMO / 'softpick'}", "--quantizers", "fp32,rtn-4bit", "--tasks",
       "demo_lastword", "--limit", "3", *HERE)  # fmt: skip


def test_options_alone_are_a_run_and_its_recipe_can_be_kept(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert qbench("run", *ONE, "--dtype", "float32", "--save-recipe", "kept/one.yaml") == 0
    shown = capfd.readouterr().out
    assert shown.startswith("softpick: softpick (")
    assert "\nDocuments: demo_lastword 3 (limit 3)" in shown
    row = r"\| rtn-4bit +\| +4\.\d+ \| +[\d.]+ \|"
    assert re.search(row, shown)
    records = Store(tmp_path / "results" / "softpick").records()
    assert [record.cell for record in records] == ["softpick/fp32", "softpick/rtn-4bit"]
    kept = tmp_path / "kept" / "one.yaml"
    (tmp_path / "results").rename(tmp_path / "all results")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert qbench("run", kept, "--out=~/all results/softpick", "--device", "cpu") == 0
    said = capfd.readouterr().err
    assert said.count("already finished") == 2
    assert f"All of it: qbench view '{tmp_path}/all results/softpick'\n" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "name a recipe, or give all of it as options: --checkpoint NAME=FOLDER_OR_HUB_ID, -"),
        ({"checkpoints": {"a": "b/c"}, "tasks": ("sciq",)}, "--quantizers bf16,gptq-4bit missing"),
        (
            {"checkpoints": {"a": "b/c"}, "tasks": ("sciq",), "quantizers": ("gptq-4bit",)},
            "options: quantizers[0]: gptq-4bit needs calibration text; add calibration: {path: ",
        ),
    ],
)
def test_options_that_do_not_say_what_to_run_are_refused(options, words):
    with pytest.raises(RecipeError) as error:
        Recipe.load(None, Overrides(**options))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"quantizers": ("rtn-4bit",)}, ["rtn-4bit", "bf16"]),
        ({"quantizers": ("rtn-4bit", "kv4"), "dtype": "float32"}, ["rtn-4bit", "kv4", "fp32"]),
        ({"quantizers": ("fp16", "rtn-4bit")}, ["fp16", "rtn-4bit"]),
        ({"quantized": {"awq": "c/d"}}, ["bf16", "awq"]),
        ({"quantized": {"awq": "c/d"}, "quantizers": ("rtn-4bit",)}, ["rtn-4bit", "awq", "bf16"]),
    ],
)
def test_an_unquantized_column_is_added_and_said(options, labels):
    given = Overrides(checkpoints={"a": "b/c"}, tasks=("sciq",), **options)
    recipe = Recipe.load(None, given)
    assert [column.label for column in recipe.quantizers] == labels
    (unquantized,) = {"bf16", "fp16", "fp32"} & {*labels}
    said = f"{unquantized} is added: damage is measured against an unquantized column"
    assert added_column(recipe, given) == ("" if unquantized == "fp16" else said)


def test_copies_without_an_original_stay_alone():
    given = Overrides(quantized={"awq": "c/d"}, tasks=("sciq",))
    recipe = Recipe.load(None, given)
    assert [column.label for column in recipe.quantizers] == ["checkpoint"]
    assert added_column(recipe, given) == ""


def test_quantizers_and_tasks_replace_a_recipes_and_keep_what_it_says_of_them(tmp_path):
    path = small_recipe(tmp_path, quantizers=["fp32", {"name": "rtn-4bit", "group_size": 64},
                        {"name": "rtn-4bit", "group_size": 32, "label": "fine"}])  # fmt: skip
    changed = Overrides(quantizers=("fine", "rtn-8bit"), tasks=("demo_pages", "sciq"))
    recipe = Recipe.load(path, changed)
    assert [column.label for column in recipe.quantizers] == ["fine", "rtn-8bit"]
    assert recipe.quantizers[0].quantization.weights.group_size == 32
    assert [task.name for task in recipe.tasks] == ["demo_pages", "sciq"]


def test_a_kept_recipe_has_absolute_paths(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "models" / "one").mkdir(parents=True)
    path = tmp_path / "recipes" / "r.yaml"
    path.write_text("name: r\ncheckpoints: {one: ../models/one, two: {path: a/b, revision: x}}\n"
                    "quantizers: [bf16, {name: checkpoint, path: ../models/one}]\n"
                    "tasks: [sciq]\n")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    save(path, Overrides(limit=3), tmp_path / "kept.yaml")
    kept = yaml.safe_load((tmp_path / "kept.yaml").read_text())
    assert kept["checkpoints"] == {"one": str(tmp_path / "models" / "one"),
                                   "two": {"path": "a/b", "revision": "x"}}  # fmt: skip
    assert kept["quantizers"][1]["path"] == str(tmp_path / "models" / "one")
    assert kept["evaluation"] == {"limit": 3}


def test_all_data_that_are_missing_are_said_at_once_and_can_be_left_out(tmp_path, capfd):
    data = tmp_path / "data"
    (data / "demo_pages").mkdir(parents=True)
    file = DEMO / "data" / "demo_pages" / "test.jsonl"
    (data / "demo_pages" / "test.jsonl").write_bytes(file.read_bytes())
    path = small_recipe(tmp_path, data=str(data))
    with pytest.raises(DataError) as error:
        plan(Recipe.load(path), device="cpu")
    assert [line.partition(":")[0] for line in error.value.lines] == [
        "demo_choice", "demo_lastword",
    ]  # fmt: skip
    with pytest.raises(DataError) as error:  # nothing is left: which files, as without the option
        qbench("plan", path, "--skip-missing", "--tasks", "demo_choice")
    assert [line.partition(" in ")[0] for line in error.value.lines] == [
        "demo_choice: no test.jsonl"
    ]
    options = ("--skip-missing", "--device", "cpu", "--out", tmp_path / "out")
    assert qbench("plan", path, *options) == 0
    said = capfd.readouterr().out
    assert "left out  demo_choice: no data\nleft out  demo_lastword: no data\ntask  demo_p" in said
    assert qbench("run", path, *options, "--only", "softmax/fp32") == 0
    assert "Left out, without data: demo_choice, demo_lastword." in capfd.readouterr().out
