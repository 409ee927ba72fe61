"""Passkey retrieval: prompts, greedy decoding beside transformers' own, and a run's records."""

import pytest
import torch
from loading import load_model
from small_recipe import DEMO, qbench, small_recipe
from tiny import write_tiny

from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import DataError, RecipeError
from qbench.evaluation.passkey import Passkey, key, prompts, score
from qbench.evaluation.scoring import generate as decoding
from qbench.evaluation.scoring.generate import greedy
from qbench.evaluation.tasks import plan_task
from qbench.passkey import DOCUMENTS, depth, task_length, task_lengths
from qbench.plan import plan
from qbench.recipe import Overrides, Recipe
from qbench.store import Store


@pytest.fixture(scope="module", params=["softmax", "softpick"])
def loaded(request):
    checkpoint = find(str(DEMO / request.param))
    model = load_model(checkpoint, dtype=torch.float32, device="cpu")
    return model, load_tokenizer(checkpoint)


@pytest.mark.parametrize("length", [256, 301])
def test_prompts_are_alike_long_and_hide_their_key_at_its_depth(loaded, length):
    tokenizer = loaded[1]
    asked = prompts(Passkey(length), tokenizer, limit=8, add_bos=True)
    assert {len(ids) for ids in asked.ids} == {length}
    places = []
    for ids, wanted, tokens in zip(asked.ids, asked.keys, asked.answers, strict=True):
        assert ids[0] == tokenizer.bos_token_id
        text = tokenizer.decode(ids[1:])
        line = f"The pass key is {wanted}. Remember it. {wanted} is the pass key."
        assert text.count(line) == 1
        assert text.startswith("There is an important info hidden")
        assert text.endswith("\nWhat is the pass key? The pass key is")
        end = tokenizer.encode(text + " " + wanted, add_special_tokens=False)
        assert tokenizer.decode(end[-tokens:]).strip() == wanted
        places.append(text.index(line) / len(text))
    order = sorted(range(8), key=lambda document: depth(document))
    assert sorted(range(8), key=lambda document: places[document]) == order
    assert places[1] == pytest.approx(0.5, abs=0.15)


def test_depths_of_any_first_documents_are_spread_evenly():
    for count in (4, 16, DOCUMENTS):
        depths = sorted(depth(document) for document in range(count))
        assert depths[0] == 0
        assert max(b - a for a, b in zip(depths, [*depths[1:], 1.0], strict=True)) <= 2 / count
    assert len({key(256, document) for document in range(DOCUMENTS)}) > 190
    assert key(256, 3) == key(256, 3) != key(512, 3)


def test_answers_must_be_the_key_to_the_digit():
    answers = [" 12345", "12346", "1234", " 54321", "123456"]
    found = [score(answer, "12345") for answer in answers]
    assert [one["exact_match"] for one in found] == [1, 0, 0, 0, 0]
    assert [one["acc_digits"] for one in found] == pytest.approx([1, 0.8, 0.8, 0.2, 1])


def test_a_tokenizer_that_needs_more_tokens_is_refused(loaded):
    with pytest.raises(DataError, match="tokens for the prompt without filler"):
        prompts(Passkey(60), loaded[1], limit=1, add_bos=False)
    with pytest.raises(RecipeError, match="passkey_256 or longer"):
        plan_task("passkey_100", data=None, definitions=None)


def test_greedy_decoding_gives_what_transformers_gives_one_by_one(loaded, monkeypatch):
    model, tokenizer = loaded
    asked = prompts(Passkey(256), tokenizer, limit=5, add_bos=True).ids
    expected = [
        model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=6,
            min_new_tokens=6, do_sample=False, pad_token_id=0,
        )[0, len(ids) :].tolist()
        for ids in asked
    ]  # fmt: skip
    assert greedy(model, asked, 6) == expected
    monkeypatch.setattr(decoding, "at_once", lambda model, length: 2)
    steps = []
    assert greedy(model, asked, 6, progress=lambda *done: steps.append(done)) == expected
    assert steps == [(2, 5), (4, 5), (5, 5)]


def test_a_group_has_lengths_up_to_four_times_the_context(tmp_path):
    assert task_lengths(2048) == [256, 512, 1024, 2048, 4096, 8192]
    assert task_lengths(100) == [256]
    assert (task_length("passkey_890"), task_length("passkey_x")) == (890, None)
    recipe = Recipe.load(small_recipe(tmp_path, tasks=["passkey"]), Overrides())
    names = [task.name for task in plan(recipe, device="cpu").tasks]
    assert names == ["passkey_256", "passkey_512", "passkey_1024"]  # the demo's context is 256


def test_a_model_without_positions_beyond_its_context_has_no_longer_prompts(tmp_path):
    gpt2 = {
        "base": str(
            write_tiny(tmp_path / "gpt2", "gpt2", n_positions=600, max_position_embeddings=600)
        )
    }
    recipe = Recipe.load(small_recipe(tmp_path, tasks=["passkey"], checkpoints=gpt2), Overrides())
    asked = plan(recipe, device="cpu", only="*/fp32")
    assert [task.name for task in asked.tasks] == ["passkey_256", "passkey_512"]
    recipe = small_recipe(tmp_path, tasks=["passkey_596"], checkpoints=gpt2)
    with pytest.raises(RecipeError, match=r"passkey_596: GPT2LMHeadModel .* up to 595 tokens"):
        plan(Recipe.load(recipe, Overrides()), device="cpu", only="*/fp32")


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_run_scores_it_like_any_task(tmp_path):
    pair = {"softpick": str(DEMO / "softpick")}
    path = small_recipe(tmp_path, tasks=["passkey_256", "passkey_300"], checkpoints=pair)
    out = tmp_path / "out"
    assert qbench("run", path, "--out", out, "--device", "cpu") == 0
    records = Store(out).records()
    assert len(records) == 2
    for record in records:
        assert [(s.task, s.metric, s.documents) for s in record.scores] == [
            ("passkey_256", "exact_match", 3), ("passkey_256", "acc_digits", 3),
            ("passkey_300", "exact_match", 3), ("passkey_300", "acc_digits", 3),
        ]  # fmt: skip
        assert record.key_parts["tasks"].keys() == {"passkey_256", "passkey_300"}
        assert len(Store(out).outcomes(record)) == 12
    text = (out / "tables.md").read_text()
    assert "At chance, which guessing reaches" in text
    assert "passkey_256 Exact Match of all; passkey_256 Acc Digits of all" in text
    quantized = next(record for record in records if record.cell == "softpick/rtn-4bit")
    flips = quantized.damage.tasks["passkey_256"].flips["exact_match"]
    assert (flips.documents, flips.right_to_wrong) == (3, 0)
