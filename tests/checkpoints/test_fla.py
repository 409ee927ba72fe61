"""flash-linear-attention's models: each field of a config counts or is refused; the logits."""

import pytest
import torch
from checkpoints.folders import CONFIG, random_tensors, write
from loading import load_model
from torch.nn import functional

from qbench.attention.normalizers import NORMALIZERS
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


NOT_COMPUTED = [  # another value would be another model
    ("hidden_act", "powlu"), ("qk_norm", True), ("qkv_bias", True), ("attention_bias", True),
    ("window_size", 128), ("attnres_block_size", 4), ("use_myopic_loss", True),
    ("elementwise_affine", False), ("norm_first", True),
    ("rope_scaling", {"type": "linear", "factor": 2.0}), ("qbench_gate", "layer"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *NOT_COMPUTED,
        ("logit_scale", 0.5),
        ("use_rope", None),
        ("qbench_rotary", False),  # and yet there is a rope_theta
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
    with pytest.raises(CheckpointError, match=field) as refusal:
        find(str(write(tmp_path / "c", changed)))
    only_left_out = str(refusal.value).endswith(" only; leave this checkpoint out")
    assert only_left_out == ((field, value) in NOT_COMPUTED)


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
    checkpoint = find(str(write(tmp_path / "c", {**PUBLISHED, **changes})))
    assert llama_settings(checkpoint.config) == llama_settings(PUBLISHED)


def test_fields_that_change_no_logits_of_a_variant_reach_the_model():
    changed = {"pad_token_id": 3, "hidden_ratio": 8, "intermediate_size": None}
    settings = llama_settings({**PUBLISHED, **changed})
    assert (settings["pad_token_id"], settings["intermediate_size"]) == (3, 512)


VARIANTS = {
    "plain": {},
    "grouped": {"num_kv_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "scaled": {"attn_impl": "parallel_scaled_attn"},
    "scaled softpick": {"attn_impl": "naive_scaled_softpick_attn", "num_kv_heads": 1},
    "naive": {"attn_impl": "naive_rectified_attn", "num_kv_heads": 1},
}


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x, theta):
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * theta ** (-torch.arange(half) / half)
    first, second = x.chunk(2, -1)
    sin, cos = angles.sin(), angles.cos()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def logits(ids, config, tensors, normalizer):
    """[T, vocabulary] of one sequence, float32, by the names of flash-linear-attention."""
    heads, eps = config["num_heads"], config["norm_eps"]
    shared, time = config["num_kv_heads"] or heads, len(ids)
    x = tensors["model.embeddings.weight"][ids]
    layer = {k.removeprefix("model.layers.0."): v for k, v in tensors.items()}
    h = rms(x, layer["attn_norm.weight"], eps)

    def projected(name, count):
        out = functional.linear(h, layer[f"attn.{name}_proj.weight"])
        out = out.view(time, count, -1).transpose(0, 1)
        return rotated(out, config["rope_theta"]) if name != "v" else out

    q, k, v = projected("q", heads), projected("k", shared), projected("v", shared)
    k, v = (each.repeat_interleave(heads // shared, 0) for each in (k, v))
    allowed = torch.ones(time, time, dtype=torch.bool).tril()
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    if "attn.s" in layer:  # their table begins at log 2
        scores = scores * layer["attn.s"][:, :, None] * torch.arange(2, time + 2).log()[:, None]
    base = "softpick" if "softpick" in normalizer else normalizer.removeprefix("scalable-")
    weights = NORMALIZERS[base.removesuffix("-next")].weights(
        scores, allowed=allowed, parameters={}
    )
    x = x + (weights @ v).transpose(0, 1).reshape(time, -1) @ layer["attn.o_proj.weight"].T
    h = rms(x, layer["mlp_norm.weight"], eps)
    inner = functional.silu(h @ layer["mlp.gate_proj.weight"].T) * (
        h @ layer["mlp.up_proj.weight"].T
    )
    x = rms(x + inner @ layer["mlp.down_proj.weight"].T, tensors["model.norm.weight"], eps)
    return x @ tensors.get("lm_head.weight", tensors["model.embeddings.weight"]).T


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_gives_the_logits_of_its_definition(tmp_path, name):
    config = {**CONFIG, **VARIANTS[name]}
    tensors = random_tensors(config)
    if "scaled" in name:
        tensors["model.layers.0.attn.s"] = torch.tensor([[0.3], [1.5]])
        tensors["model.layers.0.attn.logn"] = torch.arange(2, 514).log()[:, None, None]
    folder = write(tmp_path / "c", config, tensors)
    checkpoint = find(str(folder))
    model = load_model(checkpoint, dtype=torch.float32, device="cpu")
    assert type(model).__name__ == "LlamaForCausalLM"
    ids = torch.randint(0, 32, (23,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = model(ids[None], use_cache=False).logits[0]
    expected = logits(ids, config, tensors, checkpoint.normalizer)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
