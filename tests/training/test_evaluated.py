"""`qbench train --evaluate`: what was trained is run through a recipe, here or on a cluster."""

import pytest
from small_recipe import qbench, small_recipe

from qbench.errors import RecipeError
from qbench.store import Store

pytestmark = pytest.mark.usefixtures("own_cache")
SHAPE = {"hidden": 32, "layers": 1, "context": 64}


@pytest.fixture
def recipe(tmp_path):
    """Its checkpoints are never looked for: the trained ones take their places."""

    def write(names=("softmax", "softpick")):
        return small_recipe(
            tmp_path,
            checkpoints={name: f"nowhere/{name}" for name in names},
            quantizers=["fp32", {"name": "rtn-4bit", "group_size": 32}],
            tasks=["demo_lastword"],
            evaluation={"limit": 4, "damage": False},
        )

    return write


def test_all_that_was_trained_is_evaluated_and_seeds_are_told_of_as_replicates(
    tmp_path, recipe_file, recipe, capfd
):
    normalizers, seeds = ("softmax", "softpick"), [1, 2]
    training = recipe_file(normalizers=list(normalizers), seeds=seeds, model=SHAPE, tokens=256,
                           batch={"tokens": 128, "sequences": 2})  # fmt: skip
    out = tmp_path / "trained"
    evaluate = ("--evaluate", recipe(normalizers))
    assert qbench("train", training, "--out", out, "--device", "cpu", *evaluate) == 0
    records = Store(out / "evaluation").records()
    assert {record.status for record in records} == {"ok"}
    assert len(records) == 4 * 2
    assert {(record.training.normalizer, record.training.seed) for record in records} == {
        (normalizer, seed) for normalizer in normalizers for seed in seeds
    }
    shown = capfd.readouterr().out
    assert "trained differently" not in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--normalizer", "softmax", "--evaluate", "RECIPE"),
            "softpick: is not trained here",
        ),
        (("--cluster", "local:1"), "needs --evaluate RECIPE"),
        (
            ("--evaluate", "RECIPE", "--cluster", "tcp://host:1", "--gpus", "1"),
            "leave --gpus out",
        ),
        (
            ("--evaluate", "RECIPE"),
            r"--evaluate: softmax/rtn-4bit, softpick/rtn-4bit: .*q_proj .16.",
        ),
    ],
)
def test_what_could_not_be_evaluated_is_refused_before_training(
    tmp_path, recipe_file, recipe, options, said
):
    out = tmp_path / "trained"
    options = [recipe() if one == "RECIPE" else one for one in options]
    with pytest.raises(RecipeError, match=said):
        qbench("train", recipe_file(), "--out", out, "--device", "cpu", *options)
    assert not out.exists()


def test_other_seeds_in_the_folder_are_not_evaluated_in_silence(tmp_path, recipe_file, recipe):
    out = tmp_path / "trained"
    (out / "softpick-seed7").mkdir(parents=True)
    with pytest.raises(RecipeError, match="holds softpick-seed7 too"):
        qbench("train", recipe_file(), "--out", out, "--device", "cpu", "--evaluate", recipe())
    assert [path.name for path in out.iterdir()] == ["softpick-seed7"]
