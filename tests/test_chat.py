"""Chat templates, system instructions and few-shot turns: in recipes, plans, keys and tables."""

import json
import shutil

import pytest
from small_recipe import DEMO, run_small, small_recipe

from qbench.errors import RecipeError
from qbench.plan import plan
from qbench.recipe import Recipe

pytestmark = pytest.mark.usefixtures("own_cache")
TEMPLATE = "{% for turn in messages %}<{{ turn.role }}> {{ turn.content }} {% endfor %}"


def chat_checkpoint(folder):
    shutil.copytree(DEMO / "softmax", folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return folder


def changes(checkpoint, **evaluation):
    return {"checkpoints": {"base": str(checkpoint)}, "tasks": ["demo_choice"],
            "evaluation": {"limit": 3, **evaluation}}  # fmt: skip


def test_a_checkpoint_without_a_chat_template_is_refused_before_work_begins(tmp_path):
    path = small_recipe(tmp_path, **changes(DEMO / "softmax", apply_chat_template=True))
    with pytest.raises(RecipeError, match=r"checkpoints\.base has no chat template"):
        plan(Recipe.load(path), device="cpu")


def test_keys_hold_what_is_asked_and_nothing_where_nothing_is(tmp_path):
    checkpoint = chat_checkpoint(tmp_path / "chat")

    def cell(**evaluation):
        path = small_recipe(tmp_path, **changes(checkpoint, **evaluation))
        return plan(Recipe.load(path), device="cpu").cells[0]

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
    asked = {"apply_chat_template": True, "system_instruction": "Be brief."}
    store = run_small(
        tmp_path, quantizers=["fp32"], **changes(chat_checkpoint(tmp_path / "chat"), **asked)
    )
    shown = (store.directory / "tables.md").read_text()
    assert (
        "- Prompts: by the model's chat template, few-shot examples as turns of their own" in shown
    )
    assert "with the system instruction “Be brief.”." in shown
    assert all(record.status == "ok" for record in store.records())
