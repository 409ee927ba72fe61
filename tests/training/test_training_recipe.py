"""Training recipes: strict, with the place of what is wrong, and the shipped ones as stated."""

import re
from pathlib import Path

import pytest
import torch

from qbench.errors import RecipeError
from qbench.recipe import Recipe
from qbench.training.model import flops_per_token, initial_model, utilization
from qbench.training.training_recipe import TrainingRecipe

SHIPPED = sorted((Path(__file__).parents[2] / "recipes" / "train").glob("*.yaml"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"normalisers": ["softmax"]}, "normalisers: unknown key; known: name, model, normali"),
        ({"model": {"width": 3}}, "model.width: unknown key; known: hidden, layers"),
        ({"normalizers": ["softplus"]}, "unknown normalizer 'softplus'; known: softmax, softpick"),
        ({"normalizers": ["softmax+gate"]}, "each also with +head-gate or +element-gate"),
        ({"normalizers": ["softmax", "softmax"]}, "softmax is listed twice"),
        ({"seeds": [1, 1]}, "1 is listed twice"),
        ({"model": {"heads": 3}}, "hidden / heads must be an even whole number"),
        ({"batch": {"tokens": 65}}, "batch.tokens 65 must be a multiple of model.context 16"),
        ({"batch": {"sequences": 3}}, "batch.sequences 3 must divide the 4 sequences of a step"),
        ({"tokens": 8}, "tokens 8 are fewer than batch.tokens 64"),
        ({"watch": {"length": 17}}, "watch.length 17 is more than model.context 16"),
        ({"optimizer": {"learning_rate": float("inf")}}, "finite"),
        (
            {"normalizers": ["softmax+head-gate"], "model": {"rope_theta": None}},
            "model.rope_theta: a gate needs a rotary embedding",
        ),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas[1]: Input should be less than 1"),
        ({"compute": {"compile": "reduce-overhead"}}, "'max-autotune-no-cudagraphs'"),
        ({"model": {"positions": 8}}, "model: positions 8 are fewer than context 16"),
    ],
)
def test_what_cannot_work_is_refused_with_its_line(recipe_file, changed, words):
    with pytest.raises(RecipeError) as error:
        TrainingRecipe.load(recipe_file(**changed))
    assert words in str(error.value)
    assert re.match(r"\S+/recipe\.yaml(:\d+)?: \w", str(error.value))


def test_recipes_of_one_kind_are_no_recipes_of_the_other(recipe_file):
    with pytest.raises(RecipeError, match=r"gptq\.yaml:\d+: checkpoints: it is a recipe of `qbe"):
        TrainingRecipe.load(SHIPPED[0].parents[1] / "gptq.yaml")
    with pytest.raises(RecipeError, match=r"recipe\.yaml: it is a training recipe; use qbench"):
        Recipe.load(recipe_file())


def test_the_command_line_replaces_parts_of_a_recipe(recipe_file, tmp_path):
    recipe = TrainingRecipe.load(
        recipe_file(), normalizers=["rectified"], seeds=[5, 6], tokens=6400, data=tmp_path,
        sequences=4,
    )  # fmt: skip
    assert recipe.runs() == [("rectified", 5), ("rectified", 6)]
    assert (recipe.steps, recipe.batch.sequences) == (100, 4)
    assert recipe.data.tokens == str(tmp_path)


def test_runs_go_seed_by_seed_so_that_pairs_are_whole_early(recipe_file):
    assert TrainingRecipe.load(recipe_file(seeds=[1, 2])).runs() == [
        ("softmax", 1), ("softpick", 1), ("softmax", 2), ("softpick", 2),
    ]  # fmt: skip


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_are_well(path):
    recipe = TrainingRecipe.load(path)
    assert recipe.name == path.stem
    assert recipe.normalizers[0] == "softmax"


SIZES = {"pair-1m": 1_311_872, "pair-27m": 27_534_720, "pair-124m": 134_105_856}


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_shipped_shapes_have_their_size(name, size):
    recipe = TrainingRecipe.load(next(path for path in SHIPPED if path.stem == name))
    with torch.device("meta"):
        model, _ = initial_model(recipe.model, normalizer="softmax", seed=0, device="meta")
    assert model.num_parameters() == size


def test_work_counts_every_matrix_that_is_multiplied_and_half_of_attentions_pairs():
    shape = TrainingRecipe.load(next(path for path in SHIPPED if path.stem == "pair-124m")).model
    layers = 12 * (4 * 768**2 + 3 * 768 * 2048)
    expected = 6 * (layers + 32_000 * 768) + 12 * 12 * 768 * 2048 / 2
    for tied in (False, True):
        changed = shape.model_copy(update={"tied": tied})
        with torch.device("meta"):
            model, _ = initial_model(changed, normalizer="softmax", seed=0, device="meta")
        assert flops_per_token(model, 2048) == expected
        for gpu, peak in (("NVIDIA H200", 790e12), ("NVIDIA H100 80GB HBM3", 757e12)):
            assert utilization(model, 2048, 1e5, gpu) == 1e5 * expected / peak
        assert utilization(model, 2048, 1e5, "another") is None
