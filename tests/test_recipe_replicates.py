"""Several checkpoints of one kind in a recipe: lists, paths with *, groups by name."""

import pytest
from small_recipe import DEMO, small_recipe

from qbench.errors import RecipeError
from qbench.recipe import Overrides, Recipe

PAIR = {"softmax": str(DEMO / "softmax"), "softpick": str(DEMO / "softpick")}


def copies(folder, count=3):
    for number in range(count):
        (folder / f"softmax-seed{number}").mkdir()
    (folder / "softmax-seed9.txt").write_text("no folder")
    return folder


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
    copies(tmp_path)
    recipe = Recipe.load(small_recipe(tmp_path, checkpoints={"softmax": entry}))
    assert [one.path for one in recipe.checkpoints.values()] == [
        str(tmp_path / f"softmax-seed{n}") for n in range(3)
    ]
    assert {one.normalizer for one in recipe.checkpoints.values()} == {
        entry["normalizer"] if isinstance(entry, dict) else None
    }


def test_the_command_line_may_name_a_group(tmp_path):
    copies(tmp_path)
    path = small_recipe(tmp_path)
    recipe = Recipe.load(path, Overrides(checkpoints={"softmax": str(tmp_path / "softmax-seed*")}))
    assert list(recipe.checkpoints) == ["softmax.1", "softmax.2", "softmax.3", "softpick"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"checkpoints": {"softmax": ["a"]}}, "gives 1 checkpoints; replicates need two"),
        ({"checkpoints": {"softmax": "nowhere-*"}}, "gives 0 checkpoints"),
        ({"baseline": "softpick"}, "baseline was removed: list the checkpoint"),
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
