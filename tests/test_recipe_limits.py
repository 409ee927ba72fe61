"""Odd recipes: one line with its location within seconds, and bounds on every value."""

import math
import re

import pytest
from test_recipe import write

from qbench.errors import RecipeError
from qbench.recipe import Overrides, Recipe

ODD = {
    "holds itself": ("name: &a [*a]", "nested too deeply"),
    "deep": ("".join(" " * n + "a:\n" for n in range(600)), "nested too deeply"),
    "int foo": ("name: a\ncompute_dtype: !!int foo", "cannot be read: .*'foo'"),
    "python": ("name: !!python/object/apply:os.system [ls]", ":1: cannot be read: could not"),
    "date": ("\nname: 2024-11-05", ":2: name: Input should be a valid string"),
    "NUL": ("name: a\n\nx: a\0b", "special characters are not allowed"),
    "number as key": ("name: a\n3: b", ":2: a key must be a word"),
    "two documents": ("name: a\n---\nname: b", "single document"),
    "open bracket": ("name: [a", "expected"),
    "empty": ("", "a recipe is a mapping"),
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
        ({"evaluation": {"limit": True}}, "evaluation.limit"),
        ({"evaluation": {"max_length": 10**9}}, "evaluation.max_length"),
        ({"evaluation": {"batch_size": 10**9}}, "evaluation.batch_size"),
        ({"evaluation": {"batch_size": "many"}}, "evaluation.batch_size"),
        ({"evaluation": {"seed": 2**32}}, "evaluation.seed"),
        ({"evaluation": {"add_bos": "yes"}}, "evaluation.add_bos"),
        ({"evaluation": {"tolerance": {"mean": math.inf}}}, "evaluation.tolerance.mean"),
        ({"tasks": [{"name": "piqa", "num_fewshot": 10**12}]}, "tasks[0].num_fewshot"),
        ({"tasks": [{"name": "../piqa"}]}, "tasks[0].name"),
        ({"tasks": [3]}, "tasks[0]"),
        ({"tasks": [{"name": "sciq", "files": ["../x"]}]}, "tasks[0].files.evaluation[0]"),
        (
            {"tasks": [{"name": "sciq", "files": {"fewshot": ["../x"]}}]},
            "tasks[0].files.fewshot[0]",
        ),
        ({"tasks": [{"name": "sciq", "files": "test"}]}, "tasks[0].files"),
        ({"calibration": {"path": __file__, "samples": 10**9}}, "calibration.samples"),
        ({"calibration": {"path": __file__, "seed": -1}}, "calibration.seed"),
        ({"calibration": {"path": "a\0b"}}, "calibration.path"),
        ({"checkpoints": {"a": {"path": "b\0"}}}, "checkpoints.a.path"),
        ({"checkpoints": {"a": {"path": "b", "revision": ""}}}, "checkpoints.a.revision"),
        ({"checkpoints": {"../a": "b"}}, "checkpoints.../a"),
        ({"data": "a\0b"}, "data"),
        ({"definitions": 3}, "definitions"),
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
