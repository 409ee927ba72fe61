"""Every class that docs/models.md lists: measured when it is loaded, scored as lm-eval scores it.

What a class's own attention has and ours lacks is measured, and so is what a pack of texts changes:
no table of classes decides it.
"""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
import transformers
from checkpoints.folders import CONFIG, random_tensors, write
from loading import load_model
from packaging.version import Version
from scoring_models import ask, choices, scorer, settings
from tiny import CONFIGS, KINDS, MOE, tiny_model, write_tiny
from transformers import AutoModelForCausalLM

from qbench.attention.transformers import set_attention
from qbench.checkpoints import find
from qbench.checkpoints.find import (
    class_names,
    end_shapes,
    has_other_matrices,
    linear_shapes,
    tried_classes,
)
from qbench.checkpoints.load import probe_logits, require_causal, require_ours
from qbench.errors import CheckpointError, RecipeError, UnavailableError
from qbench.evaluation.scoring.forward import fit_settings
from qbench.evaluation.settings import Mode, Tolerance
from qbench.plan import _count
from qbench.quantizers import config_of
from qbench.quantizers.linear import linearize, linears, matrices

# Of GPT-BigCode in transformers 5.17.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
LOOSE = Tolerance(mean=1e-3, largest=1e-3, changed=0.0)
LLAMA4 = {  # whose get_decoder() returns the whole model
    **MOE, "num_hidden_layers": 2, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 1,
    "attention_chunk_size": 64, "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
}  # fmt: skip
ROWS = {row.model_type: row for row in tried_classes()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Writes each tiny checkpoint once."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def folder(kind):
        if kind not in made:
            made[kind] = write_tiny(root / kind, kind)
        return made[kind]

    return folder


def answers(model, mode, **changes):
    scored = ask(scorer(model, mode, tolerance=LOOSE, **changes), choices(3))
    return [value for value, _ in scored]


def require_scored_alike(ours, theirs):
    """In every mode of ``ours``; returns settings of the fastest, and why none is faster."""
    expected = answers(theirs.eval(), "lm-eval")
    fitted, why = fit_settings(ours, settings("fast"))
    modes = get_args(Mode)  # the fastest first
    for mode in modes[modes.index(fitted.mode) :]:
        packed = {"packed": fitted.packed} if mode == "fast" else {}
        assert answers(ours, mode, **packed) == pytest.approx(expected, abs=2e-4), mode
    return fitted, why


def test_every_class_of_the_table_is_tried():
    assert set(CONFIGS) == set(ROWS)
    assert ROWS.keys() <= class_names().keys()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_files_say_which_models_take_no_more_tokens_than_their_context(kind, folders):
    model, ids = tiny_model(kind), torch.ones(1, 257, dtype=torch.long)
    try:
        model(ids, use_cache=False)
        most = None
    except (IndexError, RuntimeError):
        most = 256
    assert find(str(folders(kind))).positions == most


def installed(listed):
    """Return what the table says of the installed transformers."""
    now, _, earlier = listed.partition("; before transformers 5.24 ")
    return earlier if earlier and Version(transformers.__version__) < Version("5.24") else now


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_scored_as_lm_eval_scores_it_in_the_modes_that_are_measured(kind, folders):
    checkpoint = find(str(folders(kind)))
    ours = load_model(checkpoint, dtype=torch.float32, device="cpu")
    chosen = ours.chosen_attention
    # ours; ours: NORMALIZER; native (IMPLEMENTATION): REASON
    listed = installed(ROWS[kind].attention)
    name = f"native ({chosen.implementation})" if chosen.why else "ours"
    assert listed.partition(":")[0] == name
    assert chosen.normalizer in ("native", "softmax", listed.partition(": ")[2])
    # On its default of transformers 5.17, sdpa, Gemma 2 forgets its cap in silence.
    own = "eager" if kind == "gemma2" or chosen.implementation == "eager" else None
    theirs = AutoModelForCausalLM.from_pretrained(
        checkpoint.folder, dtype=torch.float32, attn_implementation=own
    )
    fitted, why = require_scored_alike(ours, theirs)
    listed = installed(ROWS[kind].scoring)  # fast; fast in rows (REASON); lm-eval (REASON)
    assert fitted.mode == listed.split(" ")[0]
    assert fitted.packed == ("in rows" not in listed)
    assert bool(why) == ("(" in listed)


@pytest.mark.parametrize(
    ("kind", "stated", "fastest"),
    [
        ("opt", {"word_embed_proj_dim": 32}, "fast"),
        ("falcon_h1", {"lm_head_multiplier": 0.5}, "lm-eval"),
        ("llama4_text", LLAMA4, "fast"),
    ],
)
def test_heads_of_another_width_or_scale_are_scored_as_measured(kind, stated, fastest, tmp_path):
    """As OPT-350M's, and Falcon-H1's."""
    checkpoint = find(str(write_tiny(tmp_path, kind, **stated)))
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32)
    ours = load_model(checkpoint, dtype=torch.float32, device="cpu")
    assert require_scored_alike(ours, theirs)[0].mode == fastest


# What a model does that no configuration says


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("mamba", "ignores the attention that qbench sets"),
        ("bloom", "AttentionInterface, so qbench cannot set"),
        ("mimo_v2_flash", "attention has no place for s_aux"),
    ],
)
def test_an_attention_that_lacks_something_is_native_or_refused(folders, kind, words):
    checkpoint = find(str(folders(kind)))
    chosen = load_model(checkpoint, dtype=torch.float32, device="cpu").chosen_attention
    assert (chosen.normalizer, chosen.implementation) == ("native", "eager")
    assert words in chosen.why
    assert "set evaluation.attention" not in chosen.why
    with pytest.raises(UnavailableError, match=rf"{words}((?!native).)*attention: native[^;]*$"):
        load_model(checkpoint, dtype=torch.float32, device="cpu", attention="reference")


def test_a_model_that_fails_on_our_attention_is_refused(monkeypatch):
    model = tiny_model("llama")
    logits = probe_logits(model)
    set_attention(model, normalizer="softmax", implementation="reference")

    def reads_the_mask(*_, **__):
        raise AttributeError("'Mask' object has no attribute 'dtype'")

    monkeypatch.setattr(model.model.layers[0].self_attn, "forward", reads_the_mask)
    with pytest.raises(UnavailableError, match=r"fails on qbench's attention \('Mask' object"):
        require_ours(model, logits)


def test_a_kernel_that_needs_a_gpu_is_named_on_a_cpu(monkeypatch):
    """As Qwen 3.5 has it beside flash-linear-attention."""
    model = tiny_model("llama")

    def on_gpus_only(*_, **__):
        raise RuntimeError("0 active drivers ([]). There should only be one.")

    monkeypatch.setattr(model.model.layers[0].self_attn, "forward", on_gpus_only)
    monkeypatch.setattr("qbench.checkpoints.load.kernel_packages", lambda: ["fla-core"])
    with pytest.raises(UnavailableError, match=r"need a GPU \(fla-core\); uninstall"):
        probe_logits(model)


def test_other_logits_than_its_own_are_refused():
    model = tiny_model("llama")
    set_attention(model, normalizer="softmax")
    logits = probe_logits(model)
    require_ours(model, logits)
    with pytest.raises(UnavailableError, match="changes the logits of LlamaForCausalLM by 0"):
        require_ours(model, logits + 0.1)


def test_logits_that_depend_on_how_many_tokens_follow_are_refused(monkeypatch):
    """As of sparse attention whose choice of keys changes as a text grows."""
    model = tiny_model("llama")
    logits = probe_logits(model)
    require_causal(model, logits, "why")
    forward = model.forward

    def by_length(input_ids, **options):
        output = forward(input_ids, **options)
        output.logits = output.logits * (1 + 0.01 * input_ids.shape[1])
        return output

    monkeypatch.setattr(model, "forward", by_length)
    with pytest.raises(CheckpointError, match="adding 8 tokens at the end changes the logits"):
        require_causal(model, probe_logits(model), "why")


# What a plan takes from headers is what quantizers will meet.


def met(model):
    """Sorted shapes of the linear layers, each expert's aside."""
    linearize(model)
    return sorted(
        (layer.out_features, layer.in_features)
        for name, layer in linears(model).items()
        if ".experts." not in name
    )


@pytest.mark.parametrize("kind", KINDS)
def test_headers_give_the_shapes_of_the_models_linear_layers(kind, tmp_path):
    found = linear_shapes(find(str(write_tiny(tmp_path, kind, intermediate_size=96))))
    model = tiny_model(kind, intermediate_size=96)
    dense = sorted(shape for name, shape in found.items() if ".experts." not in name)
    expected = met(model)
    if kind == "afmoe":  # whose routers are linear layers
        expected = [shape for shape in expected if shape[0] != 4]
    assert dense == expected


def test_an_lm_head_may_be_called_head(tmp_path):
    checkpoint = find(str(write_tiny(tmp_path, "rwkv", num_hidden_layers=2)))
    assert set(end_shapes(checkpoint)) == {"head", "rwkv.embeddings"}
    names = linears(tiny_model("rwkv", num_hidden_layers=2))
    shapes = linear_shapes(checkpoint)
    assert shapes.keys() == names.keys()
    four_bits = {
        name: replace(header, dtype="U8", shape=(math.prod(header.shape) // 2,))
        if name.removesuffix(".weight") in shapes else header
        for name, header in checkpoint.headers.items()
    }  # fmt: skip
    size = _count(replace(checkpoint, headers=four_bits), checkpoint, shapes)["size"]
    assert size.bits_per_weight == 4
    assert size.head_bits_per_weight == 32
    mix = config_of({"name": "mixed", "layers": {"head": "gptq-4bit", "*": "rtn-4bit"}})
    with pytest.raises(RecipeError, match="head: gptq-4bit cannot quantize LM head"):
        mix.weights.check({}, "cpu")


def test_a_copys_fused_experts_that_stay_floats_are_not_counted_as_quantized(tmp_path):
    checkpoint = find(str(write_tiny(tmp_path, "gpt_oss")))
    eight_bits = {
        name: replace(header, dtype="I8") if name.endswith("_proj.weight") else header
        for name, header in checkpoint.headers.items()
    }
    copy = replace(checkpoint, headers=eight_bits)
    counted = _count(copy, checkpoint, linear_shapes(checkpoint))
    assert counted["stored_bits"] == 8
    assert "experts" in counted["ignore"]


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_matrices_end_in_words_of_the_files(kind, tmp_path):
    """So that a plan refuses no ``ignore`` that the model knows."""
    checkpoint = find(str(write_tiny(tmp_path, kind)))
    if not has_other_matrices(checkpoint):
        found = linear_shapes(checkpoint)
        words = {word for name in found for word in name.split(".")}
        assert {name.rpartition(".")[2] for name in matrices(tiny_model(kind))} <= words


def test_fused_experts_are_read_as_they_multiply(tmp_path):
    found = linear_shapes(find(str(write_tiny(tmp_path, "gpt_oss", intermediate_size=96))))
    experts = {name.rpartition(".")[2]: shape for name, shape in found.items() if "experts" in name}
    assert experts == {"gate_up_proj": (192, 64), "down_proj": (64, 96)}


def test_the_format_of_flash_linear_attention_is_read_too(tmp_path):
    config = {**CONFIG, "num_kv_heads": 1}
    found = linear_shapes(find(str(write(tmp_path / "c", config, random_tensors(config)))))
    assert {name.rpartition(".")[2]: shape for name, shape in found.items()} == {
        "q_proj": (64, 64), "k_proj": (32, 64), "v_proj": (32, 64), "o_proj": (64, 64),
        "gate_proj": (96, 64), "up_proj": (96, 64), "down_proj": (64, 96),
    }  # fmt: skip
