"""Faults of published copies that scores of short endings cannot show are found in answers."""

import json

import pytest
from published_copies import copy_of, original
from small_recipe import DEMO, qbench, small_recipe

from qbench.comparison.compare import compare
from qbench.store import Store

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.slow]
SYSTEM = "{% if messages[0]['role'] != 'system' %}Feven painted the basket white. {% endif %}"
TURNS = "{% for turn in messages %}{{ turn['content'] }} {% endfor %}"


def set_field(path, name, value):
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, name: value}))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A good copy, one whose template lost its system line, one with another end token, and KV
    caches of 8 and 3 bits."""
    folder = tmp_path_factory.mktemp("faults")
    source = original(folder / "whole")
    set_field(source / "tokenizer_config.json", "chat_template", SYSTEM + TURNS)
    copies = {name: copy_of(source, "bnb-nf4", folder / name) for name in ("good", "line", "end")}
    set_field(copies["line"] / "tokenizer_config.json", "chat_template", TURNS)
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    set_field(copies["end"] / "generation_config.json", "eos_token_id", vocabulary["."])
    prompts = folder / "prompts.jsonl"
    lines = (DEMO / "data" / "demo_lastword" / "test.jsonl").read_text().splitlines()[:60]
    texts = [json.loads(line)["text"].rsplit(" ", 3)[0] for line in lines]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    recipe = small_recipe(
        folder, checkpoints={"base": str(source)}, compute_dtype="bfloat16", tasks=[],
        quantizers=["bf16", {"kv_cache": "int8-token", "label": "kv8"},
                    {"kv_cache": "int3-token", "label": "kv3"},
                    *({"name": "checkpoint", "label": name, "path": {"base": str(path)}}
                      for name, path in copies.items())],
        answers={"prompts": str(prompts), "max_new_tokens": 24}, evaluation={},
    )  # fmt: skip
    assert qbench("run", recipe, "--out", folder / "out", "--device", "cpu") == 0
    return Store(folder / "out")


def test_planted_faults_are_found(results):
    comparison = compare(results)
    pairs = comparison.primary.pairs  # of KL along answers, on the logarithm
    assert pairs["base", "good", "line"].high < -0.3
    assert pairs["base", "kv8", "kv3"].high < -1
    lengths = {row.quantizer: row for row in comparison.lines if row.metric == "length"}
    assert lengths["end"].of("damages")["base"].high < 0  # shorter, on the logarithm
    assert lengths["end"].of("damages")["base"].significant
    differing = {name.split("/")[1]: a.other_prompts for name, a in comparison.answers.items()}
    assert differing == {"kv8": 0, "kv3": 0, "good": 0, "line": 60, "end": 0}
    tables = (results.directory / "tables.md").read_text()
    assert "line renders 60 of 60 prompts differently" in tables
