"""What a recipe may say, groups of checkpoints, and the line that a user gets for the rest."""

import math
import os
import re
from pathlib import Path

import pytest
import yaml
from small_recipe import DEMO, small_recipe

from qbench.errors import RecipeError
from qbench.recipe import Overrides, Recipe

ROOT = Path(__file__).parents[1]

GOOD = {
    "name": "small",
    "checkpoints": {"softmax": "a/b", "softpick": {"path": "c/d", "normalizer": "softpick"}},
    "quantizers": ["bf16", {"name": "rtn-4bit", "group_size": 64, "label": "rtn-4bit-g64"}],
    "tasks": ["arc_easy", {"name": "sciq", "files": ["test", "validation"]}],
}
RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


def write(folder: Path, **changes: object) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **changes}, allow_unicode=True))
    return path


@pytest.mark.parametrize("names", ["sciq:validation", ("piqa", "sciq:validation")])
def test_a_tasks_name_may_name_the_file_that_is_scored(tmp_path, names):
    """In a recipe and in its stead, for a task that the recipe has and for another one."""
    names = [names] if isinstance(names, str) else list(names)
    in_recipe = Recipe.load(write(tmp_path, tasks=names))
    replaced = Recipe.load(write(tmp_path), Overrides(tasks=tuple(names)))
    for recipe in (in_recipe, replaced):
        assert [task.name for task in recipe.tasks] == [n.partition(":")[0] for n in names]
        assert recipe.tasks[-1].files.evaluation == ("validation",)
    with pytest.raises(RecipeError, match="both name a file"):
        Recipe.load(write(tmp_path, tasks=[{"name": "sciq:test", "files": ["validation"]}]))


@pytest.mark.parametrize(
    ("quantizers", "wanted"),
    [
        (["fp32", "rtn-4bit", {"kv": "int4-token", "label": "kv4"}], ["float32"] * 3),
        (["rtn-4bit", {"name": "fp32", "label": "whole"}], ["float32"] * 2),
        (["fp16", "rtn-4bit"], ["float16"] * 2),
        (["bf16", "rtn-4bit"], ["bfloat16"] * 2),
        (["rtn-4bit"], ["bfloat16"]),
        (["bf16", "fp32", "rtn-4bit"], ["bfloat16", "float32", "bfloat16"]),
        (["fp32", {"name": "rtn-4bit", "compute_dtype": "bfloat16"}], ["float32", "bfloat16"]),
    ],
)
def test_quantized_cells_compute_as_the_unquantized_one_that_their_damage_is_against(
    tmp_path, quantizers, wanted
):
    recipe = Recipe.load(write(tmp_path, quantizers=quantizers))
    assert [q.quantization.compute_dtype for q in recipe.quantizers] == wanted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantizers": ["gptq-5bit"]}, ["quantizers[0]", "gptq has no 5-bit", "2, 3, 4, 8"]),
        ({"quantizers": ["rtn-4bit", "rtn-4bit"]}, ["rtn-4bit", "twice", "label"]),
        ({"quantizers": [{"name": "rtn-4bit", "group_size": 1e21}]}, ["[0]", "group_size"]),
        ({"quantizers": []}, ["quantizers", "at least one"]),
        ({"checkpoints": {"a": {"path": "x", "normalizer": "softpik"}}}, ["softpik", "softpick"]),
        ({"checkpoints": {"a": {"path": "x", "norm": "y"}}}, ["checkpoints.a.norm", "normalizer"]),
        ({"evaluation": {"limits": 3}}, ["evaluation.limits", "unknown key", "limit"]),
        ({"evaluation": {"tolerance": {"men": 1}}}, ["tolerance.men", "known: mean, largest"]),
        ({"evaluation": {"stream": "x"}}, ["evaluation.stream: Input should be True, False or 'a"]),
        ({"quantizer": []}, ["quantizer", "unknown key", "quantizers"]),
        ({"data": "nowhere"}, ["data", "no such folder", "nowhere"]),
        ({"calibration": {"path": "nowhere.jsonl"}}, ["calibration.path", "nowhere.jsonl"]),
        ({"quantizers": [4]}, ["quantizers[0]", "not 4"]),
        ({"quantizers": [{"name": "fp32", "label": 4}]}, ["quantizers[0]", "label 4"]),
        ({"evaluation": []}, ["evaluation: must be a mapping; known: softmax_dtype", "(it is [])"]),
        ({"quantizers": ["y" * 5000]}, ["quantizers[0]", "yyy…"]),
        ({"k" * 5000: 1}, ["kkk…", "unknown key"]),
    ],
)
def test_what_cannot_be_is_refused_with_place_value_and_remedy(tmp_path, changes, words):
    path = write(tmp_path, **changes)
    with pytest.raises(RecipeError) as error:
        Recipe.load(path)
    for word in [str(path), *words]:
        assert word in str(error.value)
    assert len(str(error.value)) < 1500


def test_relative_paths_are_relative_to_the_recipe_and_ids_of_the_hub_stay(tmp_path):
    for folder in ("one", "two/three", "data"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "text.jsonl").write_text("")
    copies = {"a": "one", "b": "owner/name", "c": "owner/name/file.gguf"}
    path = write(
        tmp_path,
        checkpoints={"a": "one", "b": {"path": "two/three"}, "c": "owner/name", "d": "nowhere"},
        quantizers=["bf16", {"name": "checkpoint", "path": copies, "label": "copy"}],
        data="data",
        calibration={"path": "text.jsonl"},
    )
    recipe = Recipe.load(path)
    assert [one.path for one in recipe.checkpoints.values()] == [
        str(tmp_path / "one"), str(tmp_path / "two" / "three"), "owner/name",
        str(tmp_path / "nowhere"),
    ]  # fmt: skip
    found = recipe.quantizers[1].quantization.weights.path
    assert found == {"a": str(tmp_path / "one"), "b": "owner/name", "c": "owner/name/file.gguf"}
    assert (recipe.data, recipe.calibration.path) == (
        tmp_path / "data", str(tmp_path / "text.jsonl"),
    )  # fmt: skip


@pytest.mark.parametrize("named", ["path/to/one", "./one", "one", "../one"])
def test_a_folder_of_the_command_line_is_meant_from_where_it_is_given(tmp_path, monkeypatch, named):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    recipe = Recipe.load(write(tmp_path), Overrides(checkpoints={"softmax": named}))
    assert recipe.checkpoints["softmax"].path == os.path.abspath(named)


def test_a_recipes_data_folder_gives_the_calibration_text_as_the_option_does(tmp_path):
    (tmp_path / "data" / "calibration").mkdir(parents=True)
    text = tmp_path / "data" / "calibration" / "text.jsonl"
    text.write_text('{"text": "a"}\n')
    path = write(tmp_path, quantizers=["fp32", "gptq-4bit"], data="data")
    assert Recipe.load(path).calibration.path == str(text)


def test_a_text_is_one_name(tmp_path):
    """From Python too: a text was taken for its letters."""
    recipe = Recipe.load(write(tmp_path), Overrides(quantizers="fp32", tasks="sciq"))
    assert [column.label for column in recipe.quantizers] == ["fp32"]
    assert [task.name for task in recipe.tasks] == ["sciq"]


def test_a_checkpoint_without_a_default_asks_for_the_option(tmp_path):
    path = write(tmp_path, checkpoints={"softmax": None})
    with pytest.raises(RecipeError, match="softmax: it has no default; add --checkpoint NAME="):
        Recipe.load(path)
    named = Overrides(checkpoints={"softmax": "a/b"})
    assert Recipe.load(path, named).checkpoints["softmax"].path == "a/b"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_is_valid_and_named_like_its_file(path):
    values = yaml.safe_load(path.read_text())
    text = None if "path" in values.get("calibration", {}) else path  # --calibration names one
    changed = Overrides(
        checkpoints=dict.fromkeys(values["checkpoints"], "some/where"),
        calibration=text if "calibration" in values else None,
    )
    recipe = Recipe.load(path, changed)
    assert recipe.name == path.stem


@pytest.mark.parametrize(
    ("quantizers", "labels"),
    [
        (["bf16", "fp32", "rtn-4bit"], ["fp32", "rtn-4bit"]),
        (["bf16", {"name": "rtn-4bit", "compute_dtype": "bfloat16"}], ["fp32", "rtn-4bit"]),
        ([{"name": "bf16", "label": "bf16"}], ["fp32"]),
        ([{"name": "bf16", "label": "a"}, "fp32"], ["a", "fp32"]),
    ],
)
def test_another_dtype_is_that_of_all_columns_and_makes_one_of_two_that_become_alike(
    tmp_path, quantizers, labels
):
    recipe = Recipe.load(write(tmp_path, quantizers=quantizers), Overrides(dtype="float32"))
    assert [column.label for column in recipe.quantizers] == labels
    assert {column.quantization.compute_dtype for column in recipe.quantizers} == {"float32"}


@pytest.mark.parametrize(
    ("changes", "overrides", "part"),
    [
        ({"evaluation": "foo"}, {"limit": 3}, "evaluation"),
        ({"calibration": "x.jsonl"}, {"calibration": Path("y.jsonl")}, "calibration"),
    ],
)
def test_an_option_on_top_of_a_malformed_part_is_refused_with_the_part(
    tmp_path, changes, overrides, part
):
    with pytest.raises(RecipeError, match=f"{part}: must be a mapping"):
        Recipe.load(write(tmp_path, **changes), Overrides(**overrides))


def test_every_key_says_what_it_means():
    schema = Recipe.model_json_schema()
    assert schema["properties"].keys() == Recipe.model_fields.keys() - {"replicates"}
    for kind in ("CheckpointSource", "CalibrationSource", "Evaluation", "Task"):
        for key, about in schema["$defs"][kind]["properties"].items():
            assert about.get("description"), (kind, key)


PAIR = {"softmax": str(DEMO / "softmax"), "softpick": str(DEMO / "softpick")}


def test_a_list_is_a_group_of_checkpoints(tmp_path):
    path = small_recipe(tmp_path, checkpoints={"softmax": ["a", "b"], "softpick": PAIR["softpick"]})
    recipe = Recipe.load(path)
    assert {name: one.path for name, one in recipe.checkpoints.items()} == {
        "softmax.1": str(tmp_path / "a"), "softmax.2": str(tmp_path / "b"),
        "softpick": PAIR["softpick"],
    }  # fmt: skip
    assert recipe.replicates == {"softmax": ("softmax.1", "softmax.2")}


@pytest.mark.parametrize(
    "entry", ["softmax-seed*", {"path": "softmax-seed*", "normalizer": "softmax"}]
)
def test_a_path_with_a_star_is_a_group_of_its_folders_in_order(tmp_path, entry):
    folders = [tmp_path / f"softmax-seed{number}" for number in range(3)]
    for folder in folders:
        folder.mkdir()
    (tmp_path / "softmax-seed9.txt").write_text("no folder")
    recipe = Recipe.load(small_recipe(tmp_path, checkpoints={"softmax": entry}))
    assert [one.path for one in recipe.checkpoints.values()] == [*map(str, folders)]
    normalizer = entry["normalizer"] if isinstance(entry, dict) else None
    assert {one.normalizer for one in recipe.checkpoints.values()} == {normalizer}
    given = Overrides(checkpoints={"softmax": str(tmp_path / "softmax-seed*")})
    recipe = Recipe.load(small_recipe(tmp_path), given)
    assert list(recipe.checkpoints) == ["softmax.1", "softmax.2", "softmax.3", "softpick"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"checkpoints": {"softmax": ["a"]}}, "gives 1 checkpoints; replicates need two"),
        ({"checkpoints": {"softmax": "nowhere-*"}}, "gives 0 checkpoints"),
        ({"baseline": "softpick"}, "baseline: unknown key; known: name, plugins"),
        ({"replicates": {"a": ["softmax", "softpick"]}}, "replicates was removed: list the paths"),
    ],
)
def test_what_is_no_group_is_refused_with_its_place(tmp_path, changes, said):
    with pytest.raises(RecipeError, match=said) as error:
        Recipe.load(small_recipe(tmp_path, **changes))
    assert "small.yaml:" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("order", [("a.1", "a"), ("a", "a.1")])
def test_a_checkpoint_called_as_a_groups_training_is_refused_not_dropped(tmp_path, order):
    entries = {"a.1": PAIR["softmax"], "a": ["x", "y"]}
    path = small_recipe(tmp_path, checkpoints={name: entries[name] for name in order})
    with pytest.raises(RecipeError, match=r"a: its trainings are a\.1, a\.2, and a\.1"):
        Recipe.load(path)


ODD = {
    "holds itself": ("name: &a [*a]", "nested too deeply"),
    "deep": ("".join(" " * n + "a:\n" for n in range(600)), "nested too deeply"),
    "int foo": ("name: a\ncompute_dtype: !!int foo", "cannot be read: .*'foo'"),
    "python": ("name: !!python/object/apply:os.system [ls]", ":1: cannot be read: could not"),
    "date": ("\nname: 2024-11-05", ":2: name: Input should be a valid string"),
    "NUL": ("name: a\n\nx: a\0b", "special characters are not allowed"),
    "number as key": ("name: a\n3: b", ":2: a key is not text; put quotes"),
    "two documents": ("name: a\n---\nname: b", "single document"),
    "open bracket": ("name: [a", "expected"),
    "empty": ("", "not a mapping; write the keys name"),
    "key twice": ("name: a\nname: b\n", ':2: cannot be read: .*found duplicate key "name"'),
    "surrogate": ('name: "\\ud800"', "name: "),
}  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("odd", ODD)
def test_odd_yaml_is_one_line_within_seconds(tmp_path, odd):
    text, words = ODD[odd]
    path = tmp_path / "odd.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as error:
        Recipe.load(path)
    assert re.search(words, str(error.value))
    for line in str(error.value).splitlines():
        assert line.startswith(str(path))
        assert len(line) < 400


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.symlink_to(path), "cannot be read \\(Too many levels"),
        (lambda path: path.symlink_to("nowhere"), "no such recipe"),
        (lambda path: path.write_bytes("name: a".encode("utf-16")), "not UTF-8"),
    ],
    ids=["folder", "loop", "dangling", "UTF-16"],
)
def test_what_is_no_file_is_no_recipe(tmp_path, make, words):
    path = tmp_path / "odd.yaml"
    make(path)
    with pytest.raises(RecipeError, match=words):
        Recipe.load(path)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"evaluation": {"limit": 10**12}}, "evaluation.limit"),
        ({"evaluation": {"batch_size": "many"}}, "evaluation.batch_size"),
        ({"evaluation": {"seed": 2**32}}, "evaluation.seed"),
        ({"evaluation": {"add_bos": "yes"}}, "evaluation.add_bos"),
        ({"evaluation": {"tolerance": {"mean": math.inf}}}, "evaluation.tolerance.mean"),
        ({"tasks": [{"name": "../piqa"}]}, "tasks[0].name"),
        ({"tasks": [3]}, "tasks[0]"),
        ({"tasks": [{"name": "sciq", "files": ["../x"]}]}, "tasks[0].files.evaluation[0]"),
        ({"tasks": [{"name": "b", "files": {"fewshot": ["../x"]}}]}, "tasks[0].files.fewshot[0]"),
        ({"tasks": [{"name": "sciq", "files": "test"}]}, "tasks[0].files"),
        ({"calibration": {"path": __file__, "samples": 10**9}}, "calibration.samples"),
        ({"calibration": {"path": "a\0b"}}, "calibration.path"),
        ({"checkpoints": {"a": {"path": "b\0"}}}, "checkpoints.a.path"),
        ({"checkpoints": {"a": {"path": "b", "revision": ""}}}, "checkpoints.a.revision"),
        ({"checkpoints": {"../a": "b"}}, "checkpoints.../a"),
        ({"data": "a\0b"}, "data"),
        ({"name": ".."}, "name"),
    ],
)
def test_values_have_bounds_and_problems_have_lines(tmp_path, changes, where):
    path = write(tmp_path, **changes)
    with pytest.raises(RecipeError) as error:
        Recipe.load(path)
    (line,) = str(error.value).splitlines()
    found = re.fullmatch(rf"{re.escape(str(path))}:(\d+): {re.escape(where)}(\.\[key\])?: .*", line)
    assert found, line
    key = re.findall(r"\w+|\.\./a", where)[-1]
    stands_in = path.read_text().splitlines()[int(found[1]) - 1]
    assert key in stands_in or stands_in.lstrip().startswith("-")


def test_a_problem_in_the_file_has_its_line_and_one_of_an_option_has_none(tmp_path):
    path = tmp_path / "lines.yaml"
    path.write_text(
        "name: lines\ncheckpoints: {a: b/c}\nquantizers:\n  - bf16\n  - name: rtn-5bit\n"
        "tasks:\n  - piqa\n  - piqa\nevaluation:\n  seed: 1\n  limit: 0\n"
    )
    with pytest.raises(RecipeError) as error:
        Recipe.load(path)
    assert [line.split(": ")[:2] for line in str(error.value).splitlines()] == [
        [f"{path}:5", "quantizers[1]"],
        [f"{path}:11", "evaluation.limit"],
    ]
    with pytest.raises(RecipeError) as error:
        Recipe.load(path, Overrides(limit=10**12))
    assert f"\n{path}: evaluation.limit: " in str(error.value)
    path.write_text(path.read_text().replace("rtn-5bit", "rtn-4bit").replace("limit: 0", ""))
    with pytest.raises(RecipeError, match=rf"{path}:8: tasks\[1\]: piqa is listed twice"):
        Recipe.load(path)
