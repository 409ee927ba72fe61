"""Passkey retrieval, an lm-eval task that comes with the package."""

import pytest
from small_recipe import DEMO, small_recipe
from tiny import write_tiny

from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import DataError, RecipeError
from qbench.evaluation.evaluate import load_task
from qbench.evaluation.tasks import plan_task
from qbench.plan import plan
from qbench.recipe import Overrides, Recipe
from qbench.tasks.passkey import process_results


def task_of(length):
    return plan_task(f"passkey_{length}", data=None, definitions=None)


@pytest.mark.parametrize("length", [256, 890])
def test_prompts_have_their_tokens_and_hide_their_key_at_its_depth(length):
    checkpoint = find(str(DEMO / "softpick"))
    tokenizer = load_tokenizer(checkpoint)
    task = load_task(task_of(length), checkpoint.folder).task
    places = []
    for document in list(task.eval_docs)[:8]:
        text, key = task.doc_to_text(document), document["key"]
        assert len(tokenizer.encode(text, add_special_tokens=False)) == length
        line = f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
        assert text.count(line) == 1
        assert text.startswith("There is an important info hidden")
        assert text.endswith("\nWhat is the pass key? The pass key is")
        places.append(text.index(line) / len(text))
    depths = [0, 1 / 2, 1 / 4, 3 / 4, 1 / 8, 5 / 8, 3 / 8, 7 / 8]
    assert sorted(range(8), key=places.__getitem__) == sorted(range(8), key=depths.__getitem__)
    assert len({document["key"] for document in task.eval_docs}) > 190


@pytest.mark.parametrize(
    ("answer", "exact", "digits"),
    [(" 12345", 1, 1), ("12346", 0, 0.8), ("1234", 0, 0.8), (" 54321", 0, 0.2), ("", 0, 0)],
)
def test_answers_must_begin_with_the_key(answer, exact, digits):
    found = process_results({"key": "12345"}, [answer])
    assert found == {"exact_match": exact, "acc_digits": pytest.approx(digits)}


def test_prompts_need_a_tokenizer():
    with pytest.raises(DataError, match=r"passkey_256: .* needs a tokenizer"):
        load_task(task_of(256))


def test_prompts_longer_than_a_models_positions_are_refused_when_planned(tmp_path):
    gpt2 = str(write_tiny(tmp_path / "gpt2", "gpt2", n_positions=600, max_position_embeddings=600))
    for name, fits in (("passkey_512", True), ("passkey_890", False)):
        path = small_recipe(tmp_path, tasks=[name], checkpoints={"base": gpt2}, data=None)
        recipe = Recipe.load(path, Overrides())
        if fits:
            assert [task.name for task in plan(recipe, device="cpu").tasks] == [name]
        else:
            with pytest.raises(RecipeError, match=r"passkey_890: .* take 899 tokens, .* has 600"):
                plan(recipe, device="cpu")
