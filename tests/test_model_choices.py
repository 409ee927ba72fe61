"""What a model's class decides is decided when the run is planned, and shown."""

import json
import re
import shutil
from pathlib import Path

import pytest
from small_recipe import DEMO, qbench, small_recipe
from tiny import write_tiny

from qbench.checkpoints.find import tried_classes
from qbench.errors import CheckpointError, RecipeError
from qbench.evaluation.scoring import hidden_states
from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.store import Store

KINDS = ("bloom", "gpt2", "gpt_oss", "granite", "llama", "mamba", "ministral", "mistral")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {kind: str(write_tiny(root / kind, kind)) for kind in KINDS}


def recipe(tmp_path, checkpoints, quantizers=("fp32",), calibration=None, **evaluation):
    """Of one task of three documents that the tiny models' own tokenizer reads."""
    return small_recipe(
        tmp_path,
        checkpoints=checkpoints,
        quantizers=list(quantizers),
        tasks=["demo_choice"],
        evaluation={"limit": 3, "max_length": 64, **evaluation},
        calibration=calibration,
    )


def cell(path, device="cpu"):
    (only,) = plan(Recipe.load(path), device=device).cells
    return only


@pytest.mark.parametrize(
    ("kind", "asked", "normalizer", "attention"),
    [
        ("llama", "auto", "softmax", "reference"),
        ("llama", "native", "native", "sdpa"),
        ("gpt_oss", "auto", "softmax-sink", "reference"),
        ("gpt_oss", "native", "native", "sdpa"),
    ],
)
def test_the_attention_is_chosen_for_the_class(
    tmp_path, models, kind, asked, normalizer, attention
):
    found = cell(recipe(tmp_path, {"a": models[kind]}, attention=asked))
    assert (found.checkpoint.normalizer, found.attention) == (normalizer, attention)
    assert found.key_parts["normalizer"] == normalizer
    assert found.key_parts["attention"] == attention
    assert any("native/" in note for note in found.notes) == (normalizer == "native")


@pytest.mark.parametrize(
    ("source", "attention", "words"),
    [
        ("softpick", "native", "trained with softpick, which LlamaForCausalLM of transformers"),
        ({"normalizer": "native"}, "auto", "trained with softpick, the recipe says normalizer"),
    ],
)
def test_an_attention_that_cannot_be_had_is_refused(tmp_path, models, source, attention, words):
    softpick = str(DEMO / "softpick")
    if isinstance(source, dict):
        source = {"path": softpick, **source}
    else:
        source = softpick if source == "softpick" else models[source]
    with pytest.raises((RecipeError, CheckpointError), match=words):
        cell(recipe(tmp_path, {"a": source}, attention=attention))


@pytest.mark.parametrize(("asked", "said"), [(4096, True), (200, False)])
def test_a_max_length_beyond_the_context_is_not_shortened_without_a_word(
    tmp_path, models, asked, said
):
    found = cell(recipe(tmp_path, {"a": models["llama"]}, max_length=asked), "cpu")
    assert found.scoring.max_length == min(asked, 256)
    words = "scored in windows of 256 tokens, its context, and not of evaluation.max_length 4,096"
    assert (words in found.notes) == said


@pytest.mark.parametrize(("template", "said"), [("{{ messages }}", True), (None, False)])
def test_a_chat_model_that_is_asked_without_its_template_is_told(tmp_path, models, template, said):
    folder = tmp_path / "chat"
    shutil.copytree(models["llama"], folder)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    notes = cell(recipe(tmp_path, {"a": str(folder)}), "cpu").notes
    assert any("without its chat template" in note for note in notes) == said


def without_decoder(monkeypatch, kind):
    """Have models of one class give no decoder."""
    right = hidden_states.decoder_of
    monkeypatch.setattr(hidden_states, "decoder_of", lambda model: (
        None if model.config.model_type == kind else right(model)))  # fmt: skip


def test_what_was_measured_at_loading_runs_and_stands_in_the_record(tmp_path, models, monkeypatch):
    """Of BLOOM its own attention, of a model without a decoder of its own lm-eval's scoring,
    whatever a plan expected."""
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    without_decoder(monkeypatch, "granite")
    path = recipe(tmp_path, {kind: models[kind] for kind in ("bloom", "granite", "llama")})
    assert qbench("run", path, "--out", tmp_path / "out", "--device", "cpu") == 0
    records = {record.checkpoint: record for record in Store(tmp_path / "out").records()}
    assert {name: (one.attention, one.scoring.mode) for name, one in records.items()} == {
        "bloom": ("native/eager", "exact"),
        "granite": ("softmax/reference", "lm-eval"),
        "llama": ("softmax/reference", "exact"),
    }
    details = {name: one.stages[0].detail for name, one in records.items()}
    assert "does not take its attention from AttentionInterface" in details["bloom"]
    assert "GraniteForCausalLM has no decoder and LM head" in details["granite"]
    assert not details["llama"]


@pytest.mark.parametrize(
    ("kind", "asked", "quantizers", "words"),
    [
        ("bloom", {"attention": "reference"}, ["fp32"], "set attention: native to run its own"),
        (
            "granite",
            {"scoring": "exact"},
            ["fp32"],
            "LM head.*set scoring: auto or lm-eval",
        ),
        ("bloom", {}, [{"kv": "int8-token", "label": "kv8"}], "KV cache is quantized in qbench's"),
    ],
)
def test_a_cell_that_asks_for_what_its_model_does_not_have_fails_with_the_measurement(
    tmp_path, models, monkeypatch, kind, asked, quantizers, words
):
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    without_decoder(monkeypatch, "granite")
    path = recipe(tmp_path, {"a": models[kind]}, quantizers, **asked)
    assert qbench("run", path, "--out", tmp_path / "out", "--device", "cpu") == 1
    [record] = Store(tmp_path / "out").records()
    assert re.search(words, record.error)


def test_the_documents_hold_that_table():
    from qbench.cli.lookup import model_table

    root = Path(__file__).parent.parent
    assert (root / "docs" / "models.md").read_text().rstrip().endswith(model_table())
    assert f"[{len(tried_classes())} classes](docs/models.md)" in (root / "README.md").read_text()


REFUSED = [
    ("llama", {"name": "rtn-4bit", "group_size": 48}, "group_size 48 does not divide the in"),
    ("gpt2", {"name": "hqq-4bit", "group_size": 128}, ".*c_attn .64.*; without group_size one"),
    ("llama", {"kv": {"name": "int4-token", "group_size": 7}}, "group_size 7 does not divide"),
    ("llama", {"name": "bnb-4bit", "ignore": ["down_pro"]}, "ignore: 'down_pro' matches no weight"),
    (
        "gpt2", {"activations": {"name": "int8-token", "ignore": ["c_fc", "attn.proj"]}},
        r"int8-token: ignore: 'proj' matches no weight matrix; parts of their names are .*c_attn",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "quantizer", "words"), REFUSED)
def test_a_cell_that_can_never_run_is_refused_before_work(
    tmp_path, models, kind, quantizer, words, capfd
):
    text = {"path": str(DEMO / "calibration.jsonl"), "samples": 2, "length": 32}
    path = recipe(
        tmp_path, {"a": models[kind]}, ("fp32", {"label": "x", **quantizer}), calibration=text
    )
    label = quantizer.get("label", "x")
    with pytest.raises(RecipeError, match=words) as refusal:
        plan(Recipe.load(path), device="cpu")
    assert str(refusal.value).startswith(f"a/{label}: ")
    others = plan(Recipe.load(path), device="cpu", only="*/fp32")
    assert [bool(cell.unsupported_reason) for cell in others.cells] == [False, True]
    with pytest.raises(RecipeError, match=words):
        qbench("plan", path, "--out", tmp_path / "out")
    assert f"refused   a/{label}" in capfd.readouterr().out
    assert qbench("plan", path, "--out", tmp_path / "out", "--only", "*/fp32") == 0


def test_calibration_text_beyond_the_positions_of_a_model_is_refused(tmp_path, models):
    text = {"path": str(DEMO / "calibration.jsonl"), "samples": 2, "length": 257}
    asked = ("fp32", {"activations": "int8-static"})
    cells = {
        kind: plan(
            Recipe.load(recipe(tmp_path, {"a": models[kind]}, asked, text)), device="cpu", show=True
        ).cells
        for kind in ("gpt2", "llama")
    }
    assert [cell.unsupported_reason for cell in cells["llama"]] == [None, None]
    assert [cell.unsupported_reason for cell in cells["gpt2"]] == [
        None,
        "calibration.length 257: GPT2LMHeadModel has 256 positions; set length: 256, or "
        "--calibration-length 256",
    ]


def test_every_checkpoint_that_cannot_be_scored_is_said_at_once(tmp_path):
    configs = {
        "t5": {"model_type": "t5", "is_encoder_decoder": True},
        "none": {"model_type": "llama"},
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    path = small_recipe(tmp_path, checkpoints={**{n: str(tmp_path / n) for n in configs},
                                               "softmax": str(DEMO / "softmax")})  # fmt: skip
    with pytest.raises(CheckpointError) as error:
        plan(Recipe.load(path), device="cpu")
    second, first = sorted(error.value.lines)
    assert "no model.safetensors in" in second
    assert "is_encoder_decoder: true" in first
