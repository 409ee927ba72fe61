"""Generated answers: batched greedy decoding says what lm-eval's HFLM says, text by text."""

import json
import random

import pytest
import torch
from loading import load_model
from scoring_models import ask, instance, llama, prompt, scorer, text, tokenizer
from small_recipe import blocks

from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import EvaluationError
from qbench.evaluation.evaluate import build_requests, load_task
from qbench.evaluation.scoring import generate as generation
from qbench.evaluation.scoring import language_model
from qbench.evaluation.scoring.batching import Counts
from qbench.evaluation.settings import ScoringSettings
from qbench.evaluation.tasks import plan_task
from qbench.quantizers.quantize import apply
from qbench.quantizers.registry import config_of

TASKS = {  # in the manner of gsm8k, of triviaqa, and one that only its limit ends
    "sums": 'generation_kwargs: {until: ["\\n\\n", "Q:"], do_sample: false, max_gen_toks: 24}\n'
    "fewshot_split: test\nnum_fewshot: 2",
    "trivia": 'generation_kwargs: {until: [".", ",", "the"], max_gen_toks: 20}',
    "story": "generation_kwargs: {until: [], do_sample: false, temperature: 0.0, max_gen_toks: 24}",
}
WORDS = ["The cat", "In the morning the", "A red house stands by", "Once there was a king who had"]


def written_task(folder, name):
    """One of TASKS over questions of different lengths."""
    (folder / "tasks").mkdir(exist_ok=True)
    (folder / "tasks" / f"{name}.yaml").write_text(
        f"task: {name}\ndataset_path: json\noutput_type: generate_until\ntest_split: test\n"
        'doc_to_text: "Q: {{question}}\\nA:"\ndoc_to_target: "{{answer}}"\n'
        f"metric_list: [{{metric: exact_match}}]\n{TASKS[name]}\n"
    )
    (folder / "data" / name).mkdir(parents=True, exist_ok=True)
    draw = random.Random(name)
    rows = [{"question": " ".join(draw.sample(WORDS, draw.randint(1, 4))), "answer": "7"}
            for _ in range(7)]  # fmt: skip
    lines = "\n".join(json.dumps(row) for row in rows)
    (folder / "data" / name / "test.jsonl").write_text(lines + "\n")
    return load_task(plan_task(name, data=folder / "data", definitions=folder / "tasks"))


def answers_of(lm, requests):
    """Its answers, which are HFLM's."""
    answers = lm.generate_until(requests)
    assert answers == lm.hflm.generate_until(requests, disable_tqdm=True)
    return answers


CACHES = (
    {"name": "int4-token", "group_size": 8, "sink_tokens": 2},
    {"name": "int4-tensor"},
)


@pytest.mark.parametrize(
    ("normalizer", "name", "looks", "chunk", "cache"),
    [
        ("softmax", "sums", 8, 8192, None),
        ("softpick", "trivia", 1, 50, None),
        pytest.param("softpick", "story", 1, 8192, None, marks=pytest.mark.slow),
        *(("softpick", "trivia", 1, 11, cache) for cache in CACHES),
    ],
)  # fmt: skip
def test_answers_to_a_task_are_hflms_text_by_text(
    normalizer, name, looks, chunk, cache, tmp_path, monkeypatch
):
    """Four slots for seven prompts: slots are filled again, and move to the left. What was said is
    looked at after each token, or as on a GPU after several. Of a quantized cache, what stays
    unquantized depends on where in its sequence a token stands, not on its column. One scale for
    all is left to lm-eval: what finished answers leave in the slots would change it."""
    monkeypatch.setitem(generation.LOOK_EVERY, "cpu", looks)
    monkeypatch.setattr(generation, "CHUNK", chunk)
    monkeypatch.setattr(generation, "at_once", lambda model, length: 4)
    monkeypatch.setattr(generation, "SPARE_COLUMNS", 0)
    checkpoint = find(blocks(normalizer)[normalizer])
    model = load_model(checkpoint, dtype=torch.float32, device="cpu")
    if cache is not None:
        model = apply(model, config_of({"kv": cache}, compute_dtype="float32"), {})
    settings = ScoringSettings(mode="exact", max_length=256, batch_size=3, window_batch_size=1)
    task = written_task(tmp_path, name)
    build_requests(task.task, settings)
    lm = language_model(model, load_tokenizer(checkpoint), settings)
    answers = answers_of(lm, task.task.instances)
    assert len(set(map(len, answers))) > 2
    why = str(lm.report().transformers_generation)
    assert ("one scale for all" in why) if cache == CACHES[-1] else why == "{}"


@pytest.mark.parametrize(("max_length", "chunk"), [(16, 8192), (128, 8192), (128, 3)])
def test_prompts_of_all_lengths_are_answered_as_by_hflm(max_length, chunk, monkeypatch):
    """Some are longer than the context has room for, and lose their oldest tokens."""
    monkeypatch.setattr(generation, "CHUNK", chunk)
    model = llama()
    requests = [prompt(text(i, 1 + 3 * i), i, max_gen_toks=1 + i) for i in range(7)]
    lm = scorer(model, "exact", max_length=max_length)
    lm.hflm.batch_size_per_gpu = 1
    answers_of(lm, requests)
    assert not model._forward_hooks


def test_rotary_angles_that_depend_on_the_batch_are_left_to_lm_eval():
    """Beside a longer prompt, or in chunks, a short one would get other angles."""
    model = llama()
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model.config.max_position_embeddings, model.config.rope_parameters = 16, rope
    model = type(model)(model.config).eval()
    requests = [prompt(text(i, 1 + 6 * i), i, max_gen_toks=8) for i in range(6)]
    lm = scorer(model, "exact", max_length=256)
    found = lm.generate_until(requests)
    fresh = type(model)(model.config).eval()  # its angles are as of a model that said nothing yet
    fresh.load_state_dict(model.state_dict())
    hflm = scorer(fresh, "exact", max_length=256).hflm
    assert found == hflm.generate_until(requests, disable_tqdm=True)
    assert "dynamic rotary angles" in lm.report().transformers_generation["generation"]


@pytest.mark.parametrize("looks", [1, 8])
def test_a_token_that_generation_config_names_ends_answers(looks, monkeypatch):
    monkeypatch.setitem(generation.LOOK_EVERY, "cpu", looks)
    model = llama()
    lm = scorer(model, "exact")
    prompts = [prompt(text(i, 5), i, until=[], max_gen_toks=12) for i in range(4)]
    whole = lm.generate_until(prompts)
    ids = tokenizer().encode(text(0, 5), add_special_tokens=False)
    (said,) = generation.decode(model, [generation.Prompt(ids=ids, limit=12)])
    model.generation_config.eos_token_id = [1, said[3]]
    lm.hflm.batch_size_per_gpu = 1
    ended = answers_of(lm, prompts)
    assert len(ended[0]) < len(whole[0])


@pytest.mark.parametrize(
    ("said", "stops", "settled"),
    [
        ("one two", ["x"], False),
        ("one two", ["two"], True),
        ("one \n", ["\n", "e \nQ"], False),  # the second may be there with the next token
        ("one \nA", ["\n", "e \nQ"], True),
        ("ab", ["b", "abc"], False),
    ],
)
def test_an_answer_is_over_when_no_stop_string_can_cut_it_earlier(said, stops, settled):
    assert generation._settled(said, stops) == settled


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"do_sample": True, "temperature": 0.7}, "the task samples"),
        ({"temperature": 0.7}, "the task samples"),
        ({"num_beams": 2}, "it sets num_beams"),
        ({"max_length": 20}, "it sets max_length"),
    ],
)
def test_what_is_not_greedy_is_left_to_lm_eval_and_the_record_says_so(kwargs, reason):
    lm = scorer(llama(), "exact")
    lm.generate_until([prompt("the cat", **kwargs)])
    assert lm.report().transformers_generation == {"generation": reason}


@pytest.mark.parametrize(
    ("key", "value", "by_transformers"),
    [
        ("max_new_tokens", 3, False),
        ("max_new_tokens", 11, False),  # more than the task allows
        ("max_length", 7, False),
        ("min_new_tokens", 6, True),
        ("repetition_penalty", 1.5, True),
        ("do_sample", True, False),
        ("cache_implementation", "static", False),
        ("stop_strings", ["a"], True),
        ("prompt_lookup_num_tokens", 2, True),
    ],
)
def test_keys_of_generation_config_are_obeyed_as_by_hflm(key, value, by_transformers, monkeypatch):
    """Whether answers are decoded in slots or by transformers."""
    model = llama()
    requests = [prompt(text(i, 8), i, until=[], max_gen_toks=8) for i in range(3)]
    plain = scorer(llama(), "exact").generate_until(requests)
    setattr(model.generation_config, key, value)
    lm = scorer(model, "exact")
    if key in ("stop_strings", "prompt_lookup_num_tokens"):  # need a tokenizer, and batches of one
        with pytest.raises(EvaluationError, match="transformers cannot generate with what gen"):
            lm.generate_until(requests)
        return
    lm.hflm.batch_size_per_gpu = 1
    slots = lm.generate_until(requests)
    assert bool(lm.report().transformers_generation) is by_transformers
    assert slots == lm.hflm.generate_until(requests, disable_tqdm=True)
    assert (slots != plain) is (key in ("max_new_tokens", "repetition_penalty"))


def test_a_task_in_which_every_prompt_is_cut_fails_and_shares_are_counted():
    lm = scorer(llama(), "exact", max_length=20)
    prompts = [prompt("the cat", 0), prompt(text(0, 30), 1)]
    lm.generate_until(prompts)
    assert lm.report().truncated_shares == {"generation": 0.5}
    with pytest.raises(EvaluationError, match=r"all 1 requests are longer than eval"):
        lm.generate_until(prompts[1:])
    long = [instance(text(i, 40), " cat", i) for i in range(2)]
    with pytest.raises(EvaluationError, match="all 2 requests are"):
        lm.loglikelihood(long)


def test_samples_are_drawn_with_the_seed_of_the_key(tmp_path):
    """So that a task that samples is scored alike whenever its key is the same."""
    TASKS["sampled"] = "generation_kwargs: {do_sample: true, temperature: 1.0, max_gen_toks: 8}"
    task = written_task(tmp_path, "sampled")
    del TASKS["sampled"]
    model, answers = llama(), []
    for seed in (0, 0, 1):
        settings = ScoringSettings(
            mode="exact", max_length=128, batch_size=4, window_batch_size=1, seed=seed
        )
        build_requests(task.task, settings)
        answers.append(language_model(model, tokenizer(), settings).generate_until(
            task.task.instances
        ))  # fmt: skip
    assert answers[0] == answers[1] != answers[2]
    assert settings.key_parts()["seed"] == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", ["lm-eval", "exact"])
def test_logits_that_are_no_numbers_fail_where_the_probe_met_none(mode, value):
    """Embedding rows of a few tokens are broken, as of a checkpoint that was written badly."""
    model = llama()
    lm = scorer(model, mode)
    word = tokenizer().encode(" photosynthesis")[-1]
    assert word > 8  # the probe's tokens
    model.model.embed_tokens.weight.data[word] = value
    good, bad = "the cat sat on", "the cat sat on photosynthesis"
    lm.generate_until([prompt(good)])
    with pytest.raises(EvaluationError, match="NaN or infinite, which no scoring mode can fix"):
        lm.generate_until([prompt(good), prompt(bad, 1)])
    assert not model._forward_hooks


def test_tokens_that_the_model_does_not_embed_are_the_tokenizers_fault():
    """On a GPU an index out of range would end the process, and all cells after it."""
    model = llama()
    model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data[:40].clone()
    lm = scorer(model, "exact")
    with pytest.raises(EvaluationError, match=r"gives token id \d+, but the model embeds only 40"):
        ask(lm, [instance(text(0, 5), text(1, 3))])
    with pytest.raises(EvaluationError, match="embeds only 40"):
        generation.decode(model, [generation.Prompt(ids=[1, 2, 41], limit=1)])


def test_a_batch_that_does_not_fit_is_decoded_in_halves(monkeypatch):
    model = llama()
    prompts = [generation.Prompt(ids=[3 + i, 5, 7], limit=4) for i in range(6)]
    expected = generation.decode(model, prompts)
    fill = generation._Decoding._fill

    def small(self, free):
        if len(free) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        fill(self, free)

    monkeypatch.setattr(generation._Decoding, "_fill", small)
    counts = Counts()
    assert generation.decode(model, prompts, counts=counts) == expected
    assert counts.halvings == 2
