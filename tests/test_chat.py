"""Chat templates, system instructions and few-shot turns: in recipes, plans, keys and tables."""

import json
import shutil

import pytest
from small_recipe import DEMO, qbench, small_recipe

from qbench.errors import RecipeError
from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.store import Store

pytestmark = pytest.mark.usefixtures("own_cache")
TEMPLATE = "{% for turn in messages %}<{{ turn.role }}> {{ turn.content }} {% endfor %}"


def chat_checkpoint(folder):
    shutil.copytree(DEMO / "softmax", folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return folder


def recipe(folder, checkpoint, **evaluation):
    return small_recipe(folder, checkpoints={"base": str(checkpoint)},
                        quantizers=["fp32", {"name": "rtn-4bit", "group_size": 64}],
                        evaluation={"limit": 3, **evaluation}, tasks=["demo_choice"])  # fmt: skip


def test_a_checkpoint_without_a_chat_template_is_refused_before_work_begins(tmp_path):
    path = recipe(tmp_path, DEMO / "softmax", apply_chat_template=True)
    with pytest.raises(RecipeError, match=r"checkpoints\.base has no chat template"):
        plan(Recipe.load(path), device="cpu")


def test_keys_hold_what_is_asked_and_nothing_where_nothing_is(tmp_path):
    checkpoint = chat_checkpoint(tmp_path / "chat")

    def cell(**evaluation):
        return plan(Recipe.load(recipe(tmp_path, checkpoint, **evaluation)), device="cpu").cells[0]

    plain = cell()
    assert "chat" not in plain.key_parts["scoring"]
    assert cell(fewshot_as_multiturn=False).key == plain.key
    asked = cell(apply_chat_template=True, system_instruction="Be brief.")
    assert asked.key_parts["scoring"]["chat"] == {
        "apply_chat_template": True, "fewshot_as_multiturn": True,
        "system_instruction": "Be brief.",
    }  # fmt: skip
    assert len({plain.key, asked.key, cell(apply_chat_template=True).key}) == 3


def test_tables_say_how_prompts_were_made(tmp_path):
    path = recipe(tmp_path, chat_checkpoint(tmp_path / "chat"), apply_chat_template=True,
                  system_instruction="Be brief.")  # fmt: skip
    assert qbench("run", path, "--out", tmp_path / "out", "--device", "cpu") == 0
    shown = (tmp_path / "out" / "tables.md").read_text()
    assert (
        "- Prompts: by the model's chat template, few-shot examples as turns of their own" in shown
    )
    assert "with the system instruction “Be brief.”." in shown
    assert all(record.status == "ok" for record in Store(tmp_path / "out").records())
