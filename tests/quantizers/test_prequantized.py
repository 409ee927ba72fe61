"""Checkpoints that somebody quantized: found, loaded, held against their originals, counted."""

import atexit
import json
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path

import published_copies
import pytest
import torch
import transformers
import yaml
from lm_eval.models.huggingface import HFLM
from packaging.version import Version
from published_copies import (
    awq,
    changed,
    copy_of,
    experts,
    first_blocks,
    nearly_ternary,
    original,
    with_biases,
)
from quantizer_models import needs_vnni
from small_recipe import DEMO, qbench, small_recipe
from torchao import quantization as torchao
from transformers import TorchAoConfig

from qbench.cell import load
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import CheckpointError, QbenchError, RecipeError, UnavailableError
from qbench.evaluation.evaluate import load_task
from qbench.evaluation.scoring import language_model
from qbench.plan import plan
from qbench.quantizers import published
from qbench.quantizers.audit.compare import audit, probe_of
from qbench.quantizers.published import PublishedCopy, loadable_methods
from qbench.recipe import Overrides, Recipe
from qbench.store import Store

pytestmark = pytest.mark.usefixtures("own_cache")
ROUNDS_CACHES = Version(transformers.__version__).release < (5, 24)
# Earlier releases refuse one code per byte, say less of scales that do not fit, and read GPTQ's
# groups off the file: the audit finds those right.
OLDER = Version(transformers.__version__).release < (5, 23)
MORE_FORMATS = (
    "bnb-int8", "torchao-int8", "ct-fp8", "ct-w4a16", "ct-w4a16-asym", "ct-fp8-block", "ct-nvfp4",
    "fp8", "mxfp8", "metal", "gemma",
)  # fmt: skip
WITH_ACTIVATIONS = ("bnb-int8", "torchao-w8a8", "ct-w8a8", "ct-fp8", "ct-fp8-block", "ct-nvfp4")


FOLDER = Path(tempfile.mkdtemp(prefix="qbench-copies-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


@cache
def whole():
    """Return the folder of the bundled model's first two blocks as transformers' Llama."""
    return first_blocks(original(FOLDER / "llama"), FOLDER / "whole")


@cache
def copies(name):
    """Return the folder of its copy in the format ``name``."""
    return copy_of(whole(), name, FOLDER / name)


def quantization_config(copy):
    return json.loads((copy / "config.json").read_text())["quantization_config"]


def planned(tmp_path, path, *, checkpoint=None, quantizers=None, show=False):
    """The plan of a checkpoint and its quantized copy at ``path``."""
    column = {"name": "checkpoint", "path": str(path), "label": "copy"}
    recipe = small_recipe(
        tmp_path, checkpoints={"base": str(checkpoint or whole())}, compute_dtype="bfloat16",
        quantizers=quantizers or ["bf16", column], tasks=["demo_choice"],
    )  # fmt: skip
    return plan(Recipe.load(recipe), device="cpu", show=show)


def audited(run_plan, name="base/copy"):
    """The audit of a cell, and its model."""
    cell, base = run_plan.cell(name), run_plan.cell("base/bf16")
    model = load(cell, run_plan)
    probe = probe_of(model.config.vocab_size)
    return audit(load(base, run_plan), model, cell.quantization, probe), model


@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(name, marks=needs_vnni if name == "torchao-w8a8" else ())
            for name in ("bnb-nf4", "torchao-w8a8", "ct-w8a8", "gptq")
        ),
        *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_FORMATS),
    ],
)
def test_each_librarys_checkpoint_loads_and_passes_its_audit(name, tmp_path):
    run_plan = planned(tmp_path, copies(name))
    result, model = audited(run_plan)
    assert result.problems == ()
    assert result.coverage == 1
    few = {"nf4": (4, 0.12), "w4a16": (4, 0.15), "nvfp4": (4, 0.12), "fp8": (8, 0.04),
           "mxfp8": (8, 0.04), "metal": (4, 0.12), "gemma": (4, 0.2)}  # fmt: skip
    few["gptq"] = few["w4a16"]
    bits, error = few.get(name.split("-")[name.startswith(("bnb", "ct", "torchao"))], (8, 0.012))
    assert result.bits == bits
    assert bits < result.bits_per_weight < bits + 0.8
    assert result.bits_per_weight == pytest.approx(result.size.bits_per_weight)
    assert 0 < result.weight_error < error
    activations = run_plan.cell("base/copy").quantization.precision.activations
    assert (activations is not None) == (name in WITH_ACTIVATIONS)
    assert model.config._attn_implementation.startswith("qbench")


@pytest.mark.slow  # transformers compiles BitNet's layers
def test_a_copy_of_bitnet_is_two_bits_and_rounds_inputs_to_eight(tmp_path):
    trained = changed(whole(), tmp_path / "trained", nearly_ternary)
    run_plan = planned(tmp_path, copy_of(trained, "bitnet", tmp_path / "copy"), checkpoint=trained)
    result, _ = audited(run_plan)
    assert result.problems == ()
    assert result.bits == 2
    precision = run_plan.cell("base/copy").quantization.precision
    assert (precision.weights.bits, precision.activations.bits) == (2, 8)


@pytest.mark.parametrize("largest", [pytest.param(1.0, marks=pytest.mark.slow), 0.2])
def test_inputs_beyond_a_copy_s_static_scale_are_not_held_against_it(
    largest, tmp_path, monkeypatch
):
    """Inputs of o_proj may be so small that a calibrated scale clips there."""
    monkeypatch.setattr(published_copies, "LARGEST_INPUT", largest)
    copy = copy_of(whole(), "ct-nvfp4", tmp_path / "copy")
    assert audited(planned(tmp_path, copy))[0].problems == ()


def test_int8_products_are_refused_before_work_where_the_processor_s_sums_saturate(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("qbench.machine.cpu_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(QbenchError, match=r"copy: torchao: int8 sums saturate .* run it on a GPU"):
        planned(tmp_path, copies("torchao-w8a8"))
    assert planned(tmp_path, copies("torchao-int8")).cells


@pytest.mark.skipif(not ROUNDS_CACHES, reason="transformers 5.24 leaves such caches unquantized")
def test_a_cache_that_the_copys_library_quantizes_is_part_of_its_precision(tmp_path):
    def add_scales(tensors):
        for name in [n for n in tensors if n.endswith(("k_proj.weight", "v_proj.weight"))]:
            scale = name.replace("_proj.weight", "_scale")
            tensors[scale] = torch.full((1,), 0.03, dtype=torch.bfloat16)

    copy = with_cache(
        copies("fp8-rows"), tmp_path / "copy", add_scales, strategy="tensor", dynamic=False
    )
    run_plan = planned(tmp_path, copy)
    quantization = run_plan.cell("base/copy").quantization
    assert quantization.precision.name == "W8A16KV8"
    assert quantization.precision.kv_cache.scheme == "float8, static"
    assert quantization.batch_invariant
    assert audited(run_plan)[0].problems == ()


def with_cache(copy, folder, change=lambda tensors: None, **cache):
    """``copy`` that states a KV cache of 8-bit floats."""
    scheme = {"num_bits": 8, "type": "float", **cache}
    config = {**quantization_config(copy), "kv_cache_scheme": scheme}
    return changed(copy, folder, change, quantization_config=config)


def test_a_cache_with_one_scale_for_a_whole_sequence_is_refused_with_the_measurement(
    tmp_path, monkeypatch
):
    copy = with_cache(copies("fp8-rows"), tmp_path / "copy", strategy="token", dynamic=True)
    if ROUNDS_CACHES:
        run_plan = planned(tmp_path, copy)
        with pytest.raises(CheckpointError, match="change the logits of"):
            load(run_plan.cell("base/copy"), run_plan)
    monkeypatch.setattr("qbench.machine.version_of", lambda name: "5.24.0")  # which ignores it
    with pytest.raises(RecipeError, match=r"5\.24\.0 would leave its KV cache unquantized.*<5\.24"):
        planned(tmp_path, copy)


@pytest.mark.parametrize("name", ["ct-w8a8", pytest.param("bnb-nf4", marks=pytest.mark.slow)])
def test_biases_and_norms_of_a_copy_are_held_against_the_original_s(name, tmp_path):
    source = with_biases(whole(), tmp_path / "biased")
    copy = copy_of(source, name, tmp_path / "copy")
    assert audited(planned(tmp_path, copy, checkpoint=source))[0].problems == ()

    def other(tensors):
        tensors["model.layers.0.self_attn.o_proj.bias"] *= -1
        tensors["model.layers.1.post_attention_layernorm.weight"] *= 2

    run_plan = planned(tmp_path, changed(copy, tmp_path / "other", other), checkpoint=source)
    assert audited(run_plan)[0].problems == (
        "model.layers.0.self_attn.o_proj.bias: 2 off the original's, as if it were another model's",
        "model.layers.1.post_attention_layernorm.weight: 1 off the original's, as if it were "
        "another model's",
    )


def test_embeddings_that_are_the_lm_head_count_in_no_copy_s_bits_per_weight(tmp_path):
    """Their matrix is in the files as ``model.embed_tokens`` alone."""

    def tie(tensors):
        del tensors["lm_head.weight"]

    source = changed(whole(), tmp_path / "tied", tie, tie_word_embeddings=True)
    copy = copy_of(source, "fp8-rows", tmp_path / "copy")
    result, _ = audited(planned(tmp_path, copy, checkpoint=source))
    assert result.problems == ()
    assert 8 < result.size.bits_per_weight < 8.5
    assert result.size.head_bits_per_weight is None


@pytest.mark.skipif(OLDER, reason="transformers before 5.23 expects packed codes")
def test_a_copy_s_lm_head_may_be_quantized_as_its_layers_are(tmp_path):
    """In whole bytes: compressed-tensors itself expects weights alone to be packed."""
    copy = copies("int8-rows")
    result, _ = audited(planned(tmp_path, copy))
    assert result.problems == ()
    assert 8 < result.bits_per_weight < 8.2
    assert 8 < result.size.head_bits_per_weight < 8.2

    def other(tensors):
        tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0)

    (problem,) = audited(planned(tmp_path, changed(copy, tmp_path / "other", other)))[0].problems
    assert problem.startswith("its LM head: 1.5 off the original's")


@pytest.mark.parametrize(
    ("kind", "copied", "bits", "coverage"),
    [
        ("gpt_oss", "mxfp4", 4.25, 0.79),  # all experts in one tensor; its attention stays
        ("qwen3_moe", "fp8", 8.002, 0.99),  # the halves of an expert's matrix apart
        pytest.param("qwen3_moe", "fp8-rows", 8.125, 0.99, marks=pytest.mark.slow),
        ("mixtral", "fp8-rows", 8.125, 0.99),  # its files have older names of experts
    ],
)
def test_copies_of_experts_are_held_against_their_originals(kind, copied, bits, coverage, tmp_path):
    source = experts(kind, tmp_path / "original")
    run_plan = planned(tmp_path, copy_of(source, copied, tmp_path / "copy"), checkpoint=source)
    result, _ = audited(run_plan)
    assert result.problems == ()
    assert result.bits_per_weight == pytest.approx(bits, abs=0.01)
    assert result.coverage > coverage
    assert result.size.bits_per_weight < bits / coverage + 16 * (1 - coverage)
    other = planned(tmp_path, tmp_path / "copy", checkpoint=_harmed(source, tmp_path / "other"))
    assert any("experts" in line for line in audited(other)[0].problems)


def _harmed(source, folder):
    """With one expert of other weights."""

    def harm(tensors):
        name = next(
            n
            for n in tensors
            if "layers.1" in n and re.search("down_proj|w2", n) and "bias" not in n
        )
        whole = tensors[name]
        tensors[name] = whole.flip(0) if whole.dim() == 2 else torch.cat([whole[1:2], whole[1:]])

    return changed(source, folder, harm)


def test_experts_that_transformers_loads_not_are_refused_in_a_line(tmp_path):
    source = experts("qwen3_moe", tmp_path / "original")
    run_plan = planned(tmp_path, awq(source, tmp_path / "copy"), checkpoint=source)
    with pytest.raises(UnavailableError, match="experts as one tensor and loads none from awq"):
        load(run_plan.cell("base/copy"), run_plan)


@pytest.mark.parametrize("kind", [pytest.param("qwen3_moe", marks=pytest.mark.slow), "granitemoe"])
def test_experts_that_a_library_left_alone_are_counted_as_they_are(kind, tmp_path):
    source = experts(kind, tmp_path / "original")
    copy = copy_of(source, "bnb-nf4", tmp_path / "copy")
    result, _ = audited(planned(tmp_path, copy, checkpoint=source))
    assert result.problems == ()
    assert result.coverage < 0.3
    assert result.size.bits_per_weight > 12


@pytest.mark.parametrize(
    ("name", "mean"),  # bfloat16, and another attention kernel
    [("bnb-nf4", 0.1), pytest.param("ct-w8a8", 0.3, marks=pytest.mark.slow)],
)
def test_scores_are_those_of_the_librarys_own_model_under_lm_eval(name, mean, tmp_path):
    run_plan = planned(tmp_path, copies(name))
    cell = run_plan.cell("base/copy")
    model, tokenizer = load(cell, run_plan), load_tokenizer(cell.checkpoint)
    ours = language_model(model, tokenizer, cell.scoring)
    library = transformers.AutoModelForCausalLM
    theirs = HFLM(
        pretrained=library.from_pretrained(copies(name), **published_copies.BF16),
        tokenizer=tokenizer, batch_size=8, max_length=256, softmax_dtype="float32",
        add_bos_token=False,
    )  # fmt: skip
    task = load_task(run_plan.tasks[0])
    task.task.build_all_requests(limit=8, rank=0, world_size=1)
    answers = [model.loglikelihood(task.task.instances) for model in (ours, theirs)]
    off = [abs(a - b) for (a, _), (b, _) in zip(*answers, strict=True)]
    assert sum(off) / len(off) < mean


def test_another_models_copy_fails_its_audit(tmp_path):
    """Of the softpick model's weights, said to be of a softmax model: the shapes are the same."""
    other = first_blocks(DEMO / "softpick", tmp_path / "other", attn_impl="parallel_attn")
    result, _ = audited(planned(tmp_path, copies("bnb-nf4"), checkpoint=other))
    assert not result.passed
    assert any("its embeddings: 1.2 off the original's, as" in line for line in result.problems)
    assert any("weight error 1.4" in line for line in result.problems)


def swapped_words(tokenizer):
    words = tokenizer["model"]["vocab"]
    words["a"], words["e"] = words["e"], words["a"]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (swapped_words, "its tokenizer has other words or merges than"),
        (
            lambda tokenizer: tokenizer["model"]["merges"].pop(),
            "its tokenizer has other words or merges than",
        ),
        (lambda tokenizer: tokenizer.update(pre_tokenizer=None), r"its tokenizer makes \["),
    ],
)
def test_a_copy_whose_tokenizer_may_cut_texts_otherwise_is_refused(tmp_path, harm, words):
    copy = changed(copies("bnb-nf4"), tmp_path / "copy", lambda tensors: None)
    file = copy / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    merges = tokenizer["model"].get("merges")
    if merges and isinstance(merges[0], list):  # as earlier versions write them
        tokenizer["model"]["merges"] = [" ".join(pair) for pair in merges]
    file.write_text(json.dumps(tokenizer))  # the same in other bytes
    assert planned(tmp_path, copy).cells
    harm(tokenizer)
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(RecipeError, match=rf"copy: {words}.* remove its tokenizer files"):
        planned(tmp_path, copy)
    file.unlink()
    assert planned(tmp_path, copy).cells


def test_answers_are_generated_as_the_original_s(tmp_path):
    copy = changed(copies("bnb-nf4"), tmp_path / "copy", lambda tensors: None)
    other = {"repetition_penalty": 2.0, "eos_token_id": 5}
    (copy / "generation_config.json").write_text(json.dumps(other))
    run_plan = planned(tmp_path, copy)
    original, copied = (
        load(run_plan.cell(f"base/{name}"), run_plan).generation_config for name in ("bf16", "copy")
    )
    assert copied.eos_token_id == original.eos_token_id == 2
    assert copied.repetition_penalty == original.repetition_penalty


def test_a_copy_that_computes_otherwise_with_the_same_weights_fails_its_audit(tmp_path):
    rope = {"rope_theta": 500000.0, "rope_type": "default"}
    other = changed(
        copies("bnb-nf4"), tmp_path / "x", lambda t: None, rope_parameters=rope, rms_norm_eps=1e-5
    )
    problems = audited(planned(tmp_path, other))[0].problems
    assert [line.split("{")[0] for line in problems] == [
        "config.json has rope_parameters ",
        "config.json has rms_norm_eps 1e-05, and the original's 1e-06",
    ]


def test_a_damaged_layer_fails_its_audit(tmp_path):
    def harm(tensors):
        tensors["model.layers.1.mlp.up_proj.weight.absmax"] *= 3

    result, _ = audited(planned(tmp_path, changed(copies("bnb-nf4"), tmp_path / "harmed", harm)))
    assert {line.split(":")[0] for line in result.problems} == {"model.layers.1.mlp.up_proj"}


@pytest.mark.parametrize(
    "span", [pytest.param(0.6, marks=pytest.mark.slow), 0.2]
)  # with factors errors exceed the bound, or not
def test_an_awq_checkpoint_passes_and_one_whose_factors_do_not_cancel_fails(span, tmp_path):
    # logits of two blocks alone would move too little
    source = whole() if span < 0.5 else original(FOLDER / "llama")
    copy = awq(source, tmp_path / "awq", span=span)
    result, _ = audited(planned(tmp_path, copy, checkpoint=source))
    assert result.problems == ()
    assert result.rescaled == (10 if span < 0.5 else 20)  # of 14 or 28: those that a norm feeds
    assert result.weight_error < 0.16
    assert result.bits_per_weight == 4.625  # a float16 scale and a zero in 4 bits a group of 32
    if span < 0.5:
        return
    broken = awq(source, tmp_path / "broken", cancel=False, span=span)
    result, _ = audited(planned(tmp_path, broken, checkpoint=source))
    assert result.weight_error < 0.16
    assert [line.split(":")[0] for line in result.problems] == [
        "its layers are the original's up to factors of rows and columns, and these do not cancel"
    ]


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("bnb-nf4", {"quantization_config": None}, "it is not quantized: its config.json has no"),
        ("bnb-nf4", {"quantization_config": {"quant_method": "abc"}}, "'abc' cannot be loaded"),
        ("bnb-nf4", {"num_attention_heads": 2}, "num_attention_heads is 2, and"),
        ("bnb-nf4", {"qbench_normalizer": "softpick"}, "this copy was trained with softpick, and"),
        (None, {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
         "its files hold unquantized weights"),
    ],
)  # fmt: skip
def test_what_is_no_quantized_copy_is_refused_before_work_begins(tmp_path, name, config, words):
    copy = copies(name) if name else whole()
    with pytest.raises(QbenchError) as error:
        planned(tmp_path, changed(copy, tmp_path / "x", lambda tensors: None, **config))
    assert words in str(error.value)


def test_keys_hold_the_files_and_not_where_they_lie(tmp_path):
    def key(folder, copy):
        folder.mkdir()
        return planned(folder, copy).cell("base/copy").key

    here = key(tmp_path / "a", copies("bnb-nf4"))
    assert here == key(tmp_path / "b", shutil.copytree(copies("bnb-nf4"), tmp_path / "moved"))
    touched = changed(copies("bnb-nf4"), tmp_path / "touched", lambda t: t["lm_head.weight"].neg_())
    assert here != key(tmp_path / "c", touched)


def per(strategy, bits=8, **more):
    return {"num_bits": bits, "type": "int", "strategy": strategy, **more}


def ct(inputs=None, **more):
    group = {"weights": per("channel"), "input_activations": inputs, "targets": ["Linear"]}
    return {"config_groups": {"a": group}, **more}


@pytest.mark.parametrize(
    ("method", "config", "bits", "activations", "invariant"),
    [
        ("gptq", {"bits": 3, "group_size": 64}, 3, None, True),
        ("exl3", {"bits": 4.0}, 4, None, True),
        ("paroquant", {"bits": 4, "krot": 8}, 4, None, True),
        ("bitsandbytes", {"load_in_4bit": True}, 4, None, True),
        ("bitsandbytes", {"load_in_8bit": True}, 8, 8, False),
        ("compressed-tensors", ct(), 8, None, True),
        ("compressed-tensors", ct(per("token", 4, dynamic=True)), 4, 4, True),
        ("compressed-tensors", ct(per("tensor", dynamic=True)), 8, 8, False),
        ("fp8", {"activation_scheme": "dynamic"}, 8, 8, True),
        ("mxfp4", {}, 4, None, True),
        ("torchao", TorchAoConfig(torchao.Int8WeightOnlyConfig()), 8, None, True),
        ("torchao", TorchAoConfig(torchao.Float8DynamicActivationFloat8WeightConfig()), 8, 8,
         False),
        ("torchao", TorchAoConfig(torchao.Float8DynamicActivationFloat8WeightConfig(
            granularity=torchao.PerRow())), 8, 8, True),
        ("torchao", TorchAoConfig(torchao.Int8DynamicActivationInt8WeightConfig()), 8, 8, True),
    ],
    ids=str,
)  # fmt: skip
def test_a_configuration_says_what_is_rounded_beside_weights(
    method, config, bits, activations, invariant, monkeypatch
):
    monkeypatch.setattr(published, "find_spec", lambda name: "there")
    if isinstance(config, TorchAoConfig):
        config = json.loads(config.to_json_string(use_diff=False))
    copy = PublishedCopy(
        format=method, config=config, digest="", folder="", device="cuda", path="x"
    )
    assert copy.num_bits == bits
    assert (copy.precision.activations and copy.precision.activations.bits) == activations
    assert copy.batch_invariant == invariant
    assert method in loadable_methods()


def test_a_copy_that_keeps_more_than_its_weights_is_named_by_what_it_states():
    """As beside QuIP's rotations, which one layer keeps for all."""
    copy = PublishedCopy(format="compressed-tensors", config=ct(), digest="", folder="",
                         device="cpu", path="x", stored_bits=38.1)  # fmt: skip
    assert copy.precision.weights.bits == 8
    assert "38.1 bits per weight" in copy.scheme


def test_a_path_for_each_checkpoint_and_none_beside_others():
    columns = {"name": "checkpoint", "path": {"a": "x"}}
    made = Recipe.model_validate(
        {"name": "r", "checkpoints": {"a": "p", "b": "q"}, "quantizers": ["bf16", columns],
         "tasks": ["sciq"]}
    )  # fmt: skip
    weights = made.quantizers[1].quantization.weights
    assert weights.source("a") == "x"
    with pytest.raises(RecipeError, match="path has no entry for b, only for a; add one"):
        weights.source("b")
    with pytest.raises(ValueError, match="add path: FOLDER_OR_HUB_ID"):
        Recipe.model_validate(
            {"name": "r", "checkpoints": {"a": "p"}, "quantizers": ["bf16", "checkpoint"],
             "tasks": ["sciq"]}
        )  # fmt: skip


def test_options_alone_score_a_copy_beside_its_original_and_without_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(copies("bnb-nf4"), tmp_path / "awq")
    here = ("--definitions", DEMO / "tasks", "--data", DEMO / "data", "--device", "cpu")
    what = ("--quantized", "mine=awq", "--tasks", "demo_choice", "--limit", 2, *here)
    base = ("--checkpoint", f"base={whole()}")
    assert qbench("run", *base, *what, "--save-recipe", "kept.yaml", "--out", "both") == 0
    records = Store(tmp_path / "both").records()
    assert [record.cell for record in records] == ["base/bf16", "base/mine"]
    copy = records[1]
    assert copy.audit.passed
    assert copy.damage.tasks["demo_choice"].distributions.kl.mean > 0
    assert copy.title == "Bitsandbytes, as published"
    kept = yaml.safe_load((tmp_path / "kept.yaml").read_text())
    assert kept["quantizers"][1]["path"] == str(tmp_path / "awq")
    assert qbench("run", *what, "--out", "alone") == 0
    (alone,) = Store(tmp_path / "alone").records()
    assert (alone.cell, alone.audit) == ("mine/checkpoint", None)
    assert [score.value for score in alone.scores] == [score.value for score in copy.scores]


def test_two_checkpoints_need_to_know_whose_copy_it_is(tmp_path):
    with pytest.raises(RecipeError, match="there are several checkpoints"):
        Recipe.load(small_recipe(tmp_path), Overrides(quantized={"awq": "a/b"}))


ABSMAX = "model.layers.0.self_attn.q_proj.weight.absmax"


def three_groups(tensors):  # of 32 there are four or more
    for name in [n for n in tensors if n.endswith("_scale")]:
        tensors[name] = tensors[name].repeat(1, 3)


GROUPS = {"config_groups": {"all": {"targets": ["Linear"], "weights": per("group", group_size=32)}}}
UNUSABLE = {  # what is wrong: the copy, a change of its tensors and of its config.json, the message
    "a scale is not finite": (
        "bnb-nf4", lambda t: t[ABSMAX].fill_(torch.nan), {},
        "its logits are NaN or infinite: its weights may be damaged; fetch them again$"),
    # lm-eval ties weights anew after the audit, which would score with the embeddings as head
    "tied, and another head": (
        "bnb-nf4", lambda t: None, {"tie_word_embeddings": True},
        r"tie_word_embeddings: true, but lm_head\.weight differs from the emb"),
    "a tensor is missing": (
        "gptq", lambda t: t.pop("model.layers.1.mlp.up_proj.g_idx"), {},
        r"missing: model\.layers\.1\.mlp\.up_proj\.g_idx;"),
    "other groups than stated": (
        "gptq", lambda t: None, {"group_size": 64}, r"misshapen: .*qzeros \[16, 16\] instead of"),
    "scales of other shapes": (
        "fp8-rows", three_groups, GROUPS, "its tensors do not fit its quantization_conf"),
}  # fmt: skip


LATER = {"other groups than stated", "scales of other shapes"} if OLDER else set()


@pytest.mark.parametrize("what", [what for what in UNUSABLE if what not in LATER])
def test_a_copy_that_cannot_be_used_is_refused_when_it_is_loaded(what, tmp_path):
    name, change, config, words = UNUSABLE[what]
    if "tie_word_embeddings" not in config:
        config = {"quantization_config": quantization_config(copies(name)) | config}
    run_plan = planned(tmp_path, changed(copies(name), tmp_path / "copy", change, **config))
    with pytest.raises((CheckpointError, UnavailableError), match=words):
        load(run_plan.cell("base/copy"), run_plan)
