"""Every field of a flash-linear-attention config is used, without effect, or refused by name."""

import pytest
from checkpoints.folders import CONFIG, write

from qbench.checkpoints import find
from qbench.checkpoints.fla import llama_settings
from qbench.errors import CheckpointError

# A config.json as the authors' fork saves it, with what transformers adds.
PUBLISHED = {
    **CONFIG, "architectures": ["TransformerForCausalLM"], "attention_bias": False,
    "auto_map": {"AutoModelForCausalLM": "evil.py--Model"}, "bos_token_id": 1, "dtype": "bfloat16",
    "elementwise_affine": True, "eos_token_id": 2, "fuse_cross_entropy": True,
    "fuse_linear_cross_entropy": False, "fuse_norm": True, "fuse_swiglu": True,
    "hidden_ratio": 4, "initializer_range": 0.006, "norm_bias": False, "norm_first": False,
    "pad_token_id": 2, "qk_norm": False, "qkv_bias": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.3", "use_cache": True, "use_l2warp": False, "window_size": None,
    "_name_or_path": "exp/x",
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "powlu"),
        ("qk_norm", True),
        ("qkv_bias", True),
        ("attention_bias", True),
        ("window_size", 128),
        ("attnres_block_size", 4),
        ("use_myopic_loss", True),
        ("elementwise_affine", False),
        ("norm_first", True),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("logit_scale", 0.5),
        ("use_rope", None),
        ("qbench_rotary", False),  # and yet there is a rope_theta
        ("qbench_gate", "layer"),
        ("rope_theta", float("nan")),
        ("norm_eps", 0),
        ("hidden_ratio", -4),
        *[(size, None) for size in ("hidden_size", "num_heads", "vocab_size", "num_hidden_layers",
                                    "max_position_embeddings")],
        ("num_kv_heads", 3),
        ("bos_token_id", "<s>"),
        ("pad_token_id", 32),
        ("is_encoder_decoder", True),
    ],
)  # fmt: skip
def test_a_field_or_value_that_would_be_ignored_is_refused_by_name(tmp_path, field, value):
    changed = {**PUBLISHED, field: value}
    if field == "hidden_ratio":
        changed["intermediate_size"] = None
    with pytest.raises(CheckpointError, match=field):
        find(str(write(tmp_path / "c", changed)))


def test_a_gate_without_a_rotary_embedding_is_refused(tmp_path):
    no_rotary = {**PUBLISHED, "qbench_rotary": False, "rope_theta": None}
    assert llama_settings(no_rotary)["no_rope_layers"] == [0]
    assert llama_settings({**PUBLISHED, "qbench_gate": "head"})["gate"] == "head"
    with pytest.raises(CheckpointError, match="qbench_gate head without a rotary embedding"):
        find(str(write(tmp_path / "c", {**no_rotary, "qbench_gate": "head"})))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden_act": "silu"},
        {"fuse_norm": False, "fuse_swiglu": False, "fuse_cross_entropy": False, "use_l2warp": True},
        {"initializer_range": 1.0, "use_cache": False, "torch_dtype": "float32"},
    ],
)
def test_fields_without_effect_leave_the_model_as_it_is(tmp_path, changes):
    found = find(str(write(tmp_path / "c", {**PUBLISHED, **changes})))
    assert llama_settings(found.config) == llama_settings(PUBLISHED)


@pytest.mark.parametrize(
    ("field", "value", "llama"),
    [
        ("rope_theta", 5e5, ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5})),
        ("norm_eps", 1e-5, ("rms_norm_eps", 1e-5)),
        ("pad_token_id", 3, ("pad_token_id", 3)),
        ("max_position_embeddings", 64, ("max_position_embeddings", 64)),
        ("tie_word_embeddings", True, ("tie_word_embeddings", True)),
        ("hidden_ratio", 8, ("intermediate_size", 512)),
    ],
)
def test_fields_with_effect_reach_the_model(field, value, llama):
    changed = {**PUBLISHED, field: value}
    if field == "hidden_ratio":
        changed["intermediate_size"] = None
    assert llama_settings(changed)[llama[0]] == llama[1]
