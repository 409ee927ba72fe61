"""The fields of a config.json of flash-linear-attention's ``transformer`` models: which are used,
and which change no logits. All else is refused. Imports no torch."""

from __future__ import annotations

from typing import Any

from qbench.errors import CheckpointError

USED = frozenset({
    "model_type", "attn_impl", "qbench_normalizer", "vocab_size", "hidden_size", "hidden_ratio",
    "intermediate_size", "num_hidden_layers", "num_heads", "num_kv_heads", "norm_eps",
    "window_size", "qkv_bias", "qk_norm", "qbench_rotary",
    "rope_theta", "max_position_embeddings", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id",
})  # fmt: skip
WITHOUT_EFFECT = frozenset({
    # how the same function is computed, or only its loss
    "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp",
    # training and generation; the dtype is the recipe's to choose
    "initializer_range", "use_cache", "torch_dtype", "dtype",
    # what transformers notes down; auto_map names code, which is never run
    "architectures", "auto_map", "transformers_version", "_name_or_path", "name_or_path",
    # what transformers models may return besides logits, and settings of classifiers
    "return_dict", "output_attentions", "output_hidden_states", "id2label", "label2id",
    "problem_type", "chunk_size_feed_forward",
    # the format is a decoder whatever this says; encoder-decoder models are refused before
    "is_decoder", "is_encoder_decoder",
})  # fmt: skip
ONLY: dict[
    str, tuple[tuple[Any, ...], str]
] = {  # the values that Llama computes, and what others are
    "hidden_act": (("swish", "silu"), "another activation than x·sigmoid(x)"),
    "attention_bias": ((False, None), "biased projections"),
    "attnres_block_size": ((None,), "attention over earlier layers' outputs"),
    "use_myopic_loss": ((False, None), "a second head"),
    "elementwise_affine": ((True,), "norms without weights"),
    "norm_first": ((False, None), "norms within the projections"),
    "norm_bias": ((False, None), "biased norms"),
    "rope_scaling": ((None,), "scaled rotary embeddings"),
}


def require_known(config: dict[str, Any]) -> None:
    """Raise CheckpointError, naming the first, for a field that is not known or that has another
    value than these classes compute."""
    for name, value in config.items():
        if name in ONLY:
            accepted, meaning = ONLY[name]
            if value not in accepted:
                raise CheckpointError(f"{name}={value!r:.60} ({meaning}) is not supported yet")
        elif name not in USED | WITHOUT_EFFECT:
            raise CheckpointError(
                f"config.json: {name}={value!r:.60} is not a known field of "
                "flash-linear-attention's transformer models; remove it from config.json if it "
                "changes nothing"
            )
