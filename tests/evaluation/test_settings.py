"""What a recipe's evaluation means for one checkpoint: nothing is left open in a key."""

from __future__ import annotations

import dataclasses
import json

import pytest

from qbench.errors import RecipeError
from qbench.evaluation.settings import (
    ScoringSettings,
    Tolerance,
    batch_tokens,
    hidden_size,
    resolve,
)
from qbench.recipe import Evaluation

SMALL = {"hidden_size": 1024}


def resolved(device="cuda", config=SMALL, own_length=4096, mixes_batches=False, **asked):
    return resolve(
        Evaluation(**asked),
        device=device,
        config=config,
        max_length=own_length,
        mixes_batches=mixes_batches,
    )


@pytest.mark.parametrize(
    ("device", "mixes_batches", "mode", "sizes"),
    [
        ("cuda", False, "fast", (64, 8, 32_768, 32)),
        ("cuda", True, "exact", (64, 8, None, 0)),
        ("cpu", False, "exact", (8, 1, None, 0)),
        ("cpu", True, "exact", (8, 1, None, 0)),
    ],
)
def test_auto_is_decided_by_device_and_quantizer(device, mixes_batches, mode, sizes):
    found = resolved(device, mixes_batches=mixes_batches)
    assert found.mode == mode
    assert sizes == (found.batch_size, found.window_batch_size, found.batch_tokens, found.sample)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("scoring", ["auto", "exact", "fast", "lm-eval"])
def test_a_key_holds_every_setting_but_the_tolerance_and_no_auto(device, scoring):
    found = resolved(device, scoring=scoring)
    parts = found.key_parts()
    names = {field.name for field in dataclasses.fields(ScoringSettings)}
    assert set(parts) == names - {"tolerance", "shuffle", "amplifies_rounding", "fallback"}
    assert "auto" not in json.dumps(parts)
    assert resolved(device, scoring=scoring, tolerance=Tolerance(mean=1.0)).key_parts() == parts


@pytest.mark.parametrize(
    "change",
    [
        {"limit": 7}, {"seed": 1}, {"fewshot_seed": 0}, {"batch_size": 3}, {"max_length": 64},
        {"add_bos": True}, {"softmax_dtype": "model"}, {"scoring": "exact"},
    ],
)  # fmt: skip
def test_whatever_changes_a_score_changes_the_key(change):
    assert resolved(**change).key_parts() != resolved().key_parts()


def test_few_shot_examples_are_drawn_with_lm_evals_seed():
    from lm_eval.evaluator import DEFAULT_OTHER_SEED

    assert resolved().fewshot_seed == DEFAULT_OTHER_SEED


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"hidden_size": 384}, 32_768),
        (SMALL, 32_768),
        ({"hidden_size": 2048}, 16_384),
        ({"hidden_size": 4096}, 8_192),
        ({"hidden_size": 100_000}, 1_024),
        ({"n_embd": 1600}, 20_480),
        ({"text_config": {"hidden_size": 2048}}, 16_384),
        ({}, 4_096),
    ],
)
def test_a_pack_is_sized_by_the_models_shape_alone(config, tokens):
    assert batch_tokens("cuda", config) == tokens
    assert batch_tokens("cpu", config) == 2_048


@pytest.mark.parametrize("width", [None, 0, "1024", -3])
def test_a_width_that_is_none_counts_as_unknown(width):
    assert hidden_size({"hidden_size": width}) == 8_192


def test_the_checkpoints_own_context_is_a_bound():
    assert resolved(own_length=512).max_length == 512
    assert resolved(own_length=512, max_length=4096).max_length == 512
    assert resolved(own_length=4096, max_length=512).max_length == 512
    with pytest.raises(RecipeError, match=r"evaluation\.max_length: .* say one"):
        resolved(own_length=None)


def test_fast_scoring_of_what_mixes_batches_is_refused():
    with pytest.raises(RecipeError, match="say scoring: auto or exact"):
        resolved(scoring="fast", mixes_batches=True)
