import pytest
import torch
from normalizer_parameters import attach
from tiny import tiny_model
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    LlamaConfig,
    StaticCache,
)

from qbench.attention.transformers import (
    _registered,
    attention_name,
    batch_invariant,
    set_attention,
)
from qbench.errors import RecipeError, UnavailableError
from qbench.evaluation.scoring.generate import cache_argument

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
FEW = ("softpick", "sigmoid", "scalable-softmax")


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 97, (3, 17), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, ids, **inputs):
    return model(ids, **inputs).logits


def test_softmax_equals_transformers_own_attention(model, ids):
    model.set_attn_implementation("sdpa")
    expected = logits(model, ids)
    assert set_attention(model, normalizer="softmax", implementation="auto") == "softmax/reference"
    torch.testing.assert_close(logits(model, ids), expected, **TOLERANCE)


@pytest.mark.parametrize("normalizer", FEW)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model, ids, normalizer, side):
    set_attention(attach(model, normalizer), normalizer=normalizer)
    padding = torch.ones(3, 17, dtype=torch.long)
    tokens = [slice(5, 17), slice(0, 17), slice(3, 17)]
    if side == "right":
        tokens = [slice(0, 12), slice(0, 17), slice(0, 14)]
    for row, kept in enumerate(tokens):
        padding[row] = 0
        padding[row, kept] = 1
    positions = (padding.cumsum(-1) - 1).clamp(min=0)
    got = logits(model, ids, attention_mask=padding, position_ids=positions)
    assert got.isfinite().all()
    for row, kept in enumerate(tokens):
        alone = logits(model, ids[row : row + 1, kept])[0]
        torch.testing.assert_close(got[row, kept], alone, **TOLERANCE)


@pytest.mark.parametrize("normalizer", FEW)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_decoding_with_a_cache_equals_one_full_pass(ids, normalizer, padded, static):
    """With slopes, which go by distance. A static cache's offset moves on while layers are at work,
    and it has room behind the last key."""
    # In float64: scalable softpick's rows near zero make much of float32's rounding.
    model = attach(tiny_model("llama", num_hidden_layers=2), normalizer, slopes=True).double()
    config = model.config
    set_attention(model, normalizer=normalizer)
    padding = torch.ones(3, 17, dtype=torch.long)
    if padded:
        padding[0, :4] = 0
    positions = (padding.cumsum(-1) - 1).clamp(min=0)
    full = logits(model, ids, attention_mask=padding, position_ids=positions)
    cache = StaticCache(config=config, max_cache_len=32) if static else DynamicCache(config=config)
    pieces, done = [], 0
    for piece in ids.split([5, 3, 7, 1, 1], 1):
        stop = done + piece.shape[1]
        out = model(
            piece, **{cache_argument(type(model)): cache}, position_ids=positions[:, done:stop],
            attention_mask=padding[:, :stop] if padded else None,
        )  # fmt: skip
        done = stop
        pieces.append(out.logits)
    kept = padding.bool()
    torch.testing.assert_close(torch.cat(pieces, 1)[kept], full[kept], **TOLERANCE)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("layers", ["full_attention", "sliding_attention"])
def test_answers_with_a_static_cache_are_those_with_a_dynamic_one(ids, layers, padded):
    """transformers makes its masks ahead, one a kind of layer."""
    model = tiny_model(
        "qwen2", num_hidden_layers=2, layer_types=["full_attention", layers], sliding_window=6,
        use_sliding_window=True,
    )  # fmt: skip
    model.generation_config.eos_token_id = None
    set_attention(model, normalizer="softpick")
    padding = torch.ones_like(ids)
    if padded:
        padding[0, :4] = 0
    options = {"attention_mask": padding, "max_new_tokens": 9, "do_sample": False}
    options["pad_token_id"] = 0
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation="static", **options), expected)


def test_what_a_model_attends_with_is_saved_with_it(model, tmp_path):
    set_attention(model, normalizer="softpick")
    model.save_pretrained(tmp_path)
    assert LlamaConfig.from_pretrained(tmp_path).qbench_normalizer == "softpick"


@pytest.mark.parametrize("normalizer", FEW)
@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens", "mask"])
def test_packed_sequences_equal_each_alone(model, ids, normalizer, how):
    set_attention(attach(model, normalizer), normalizer=normalizer)
    packed = torch.cat([ids[0, :6], ids[1], ids[2, :1]])[None]
    positions = torch.cat([torch.arange(6), torch.arange(17), torch.arange(1)])[None]
    inputs = {"position_ids": positions, "use_cache": False}
    if how == "cu_seq_lens":
        cu_seqlens = torch.tensor([0, 6, 23, 24], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        inputs |= {"max_length_q": 17, "max_length_k": 17}
    if how == "mask":
        owner = torch.tensor([0] * 6 + [1] * 17 + [2])
        mask = (owner[:, None] == owner) & torch.ones(24, 24, dtype=torch.bool).tril()
        inputs |= {"attention_mask": mask[None, None]}
    got = logits(model, packed, **inputs)[0]
    torch.testing.assert_close(got[:6], logits(model, ids[:1, :6])[0], **TOLERANCE)
    torch.testing.assert_close(got[6:23], logits(model, ids[1:2])[0], **TOLERANCE)
    torch.testing.assert_close(got[23:], logits(model, ids[2:, :1])[0], **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("queries", [1, 7, 17, 20])
def test_cross_attention_sees_all_that_was_encoded(ids, queries):
    """It has another length than the queries, as a static cache that is not full has."""
    torch.manual_seed(0)
    config = BartConfig(
        d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, vocab_size=97,
        init_std=0.2,
    )  # fmt: skip
    model = BartForConditionalGeneration(config).eval()
    padding = torch.ones_like(ids)
    padding[1, 12:] = 0
    given = {"attention_mask": padding, "decoder_input_ids": ids.repeat(1, 2)[:, :queries]}
    expected = logits(model, ids, **given)
    set_attention(model, normalizer="softmax")
    torch.testing.assert_close(logits(model, ids, **given), expected, **TOLERANCE)


def test_additive_masks_are_refused(model, ids):
    set_attention(model, normalizer="softpick")
    mask = torch.zeros(3, 1, 17, 17)
    with pytest.raises(UnavailableError, match="bool masks"):
        logits(model, ids, attention_mask=mask)


def test_triton_on_the_cpu_is_an_error_and_no_fallback(model, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnavailableError, match="CUDA"):
        set_attention(model, normalizer="softpick", implementation="triton")


def test_unknown_implementations_are_listed():
    with pytest.raises(RecipeError, match="auto, reference, triton"):
        attention_name("softpick", "flash", "cpu")


def test_kernels_stand_back_for_the_reference_where_batches_must_not_matter(model, ids):
    set_attention(model, normalizer="softpick", implementation="reference")
    expected = logits(model, ids)
    model.set_attn_implementation(_registered("softpick", "triton"))  # needs no GPU to be named
    with batch_invariant(model):
        assert model.config._attn_implementation == "qbench-softpick-reference"
        assert torch.equal(logits(model, ids), expected)
    assert model.config._attn_implementation == "qbench-softpick-triton"
    model.set_attn_implementation("sdpa")
    with batch_invariant(model):
        assert model.config._attn_implementation == "sdpa"
