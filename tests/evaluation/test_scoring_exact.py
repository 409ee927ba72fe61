"""Exact scoring against lm-eval's own HFLM, to the last bit."""

from copy import deepcopy

import pytest
import torch
from scoring_models import KINDS, ask, choices, instance, llama, pages, scorer, text
from tiny import SPARSE_KEYS, tiny_model
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedTokenizerFast
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qbench.attention.transformers import set_attention
from qbench.errors import EvaluationError, UnavailableError
from qbench.evaluation.scoring import batching, forward
from qbench.evaluation.scoring.forward import (
    JoinedForward,
    MatmulRounding,
    least_rows,
    probe_matmul,
)
from qbench.quantizers.fake_quant import install
from qbench.quantizers.methods.kv_formats import KVCache


def both(model, **changes):
    return [scorer(model, mode, **changes) for mode in ("lm-eval", "exact")]


LONG = "context longer than max_length"


@pytest.mark.parametrize(
    ("kind", "bos"),
    [(kind, False) for kind in KINDS]
    + [(kind, bos) for kind in ("multiple choice", "empty context", LONG) for bos in (True, None)],
)
def test_log_likelihoods_equal_those_of_hflm(kind, bos):
    """To the bit where HFLM has the same batches. Its cache of logits reads a shorter continuation
    at the wrong place if another request splits the same input elsewhere."""
    theirs, ours = both(llama(), bos=bos)
    answers = ask(ours, KINDS[kind])
    if kind != "one input split in two places":
        assert answers == ask(theirs, KINDS[kind])
    theirs.hflm.logits_cache = False
    for one, answer in zip(KINDS[kind], answers, strict=True):
        ((value, greedy),) = ask(theirs, [one])
        assert answer == (pytest.approx(value, rel=1e-6, abs=1e-5), greedy)


@pytest.mark.parametrize("bos", [False, True, None], ids=["no bos", "bos", "as the tokenizer"])
def test_texts_are_encoded_once_for_all_tokenizers_that_do_the_same(bos, monkeypatch):
    ours, other = (scorer(llama(), "exact", bos=bos) for _ in range(2))
    tokenizer = other.hflm.tokenizer = deepcopy(ours.hflm.tokenizer)
    asked, texts = choices(5), pages((3, 75))
    monkeypatch.setattr(batching, "_kept", {})
    expected = ask(ours, asked), ask(ours, texts)
    with monkeypatch.context() as patched:
        patched.delattr(batching, "encode")
        assert (ask(other, asked), ask(other, texts)) == expected
        with pytest.raises(NameError):
            ask(ours, asked[1:])
    tokenizer.backend_tokenizer.add_tokens(["others"])
    vars(tokenizer).pop(batching.DIGEST)
    monkeypatch.setattr(batching, "KEPT_CHARACTERS", 10)
    assert ask(other, asked) == expected[0]
    assert len(batching._kept) == 1  # the last, however long


def test_a_backend_is_called_by_itself_only_where_it_gives_the_tokenizers_ids():
    class Own(PreTrainedTokenizerFast):
        def _encode_plus(self, text, **_):
            return {"input_ids": [[7]] * len(text)}

    usual, texts = deepcopy(scorer(llama(), "exact").hflm.tokenizer), ["a b", "", "c"]
    expected = usual(texts, add_special_tokens=False)["input_ids"]
    for enable in (lambda: None, lambda: usual.backend_tokenizer.enable_truncation(1)):
        enable()
        assert batching.encode(usual, texts, special_tokens=False) == expected
    own = Own(tokenizer_object=usual.backend_tokenizer)
    assert batching.encode(own, texts, special_tokens=False) == [[7]] * 3


@pytest.mark.parametrize("bos", [False, True, None], ids=["no bos", "bos", "as the tokenizer"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_rolling_log_likelihoods_equal_those_of_hflm_to_the_bit(batch_size, bos, capfd):
    theirs, ours = both(llama(), bos=bos, batch_size=batch_size)
    requests = pages((3, 0, 75, 40, 1, 120))
    expected = ask(theirs, requests)
    assert ask(ours, requests) == expected


@pytest.mark.parametrize(("bos", "doubled"), [(False, ()), (True, ("pages",)), (None, ("pages",))])
def test_the_report_says_whether_texts_began_with_bos_and_where_with_two(bos, doubled):
    for lm in both(llama(), bos=bos):
        ask(lm, pages((3, 75)))
        report = lm.report(["pages"])
        assert (report.bos, report.doubled_bos) == (bos is not False, doubled)


def test_a_report_is_of_the_calls_that_were_waited_for():
    lm, calls = scorer(llama(), "exact"), (choices(3), choices(5))
    begun = [lm.start("loglikelihood", requests) for requests in calls]
    for wait, requests in zip(begun, calls, strict=True):
        wait()
        assert lm.report().requests == len(requests)


def test_softmax_in_the_models_dtype_is_hflms_default():
    theirs, ours = both(llama(dtype=torch.bfloat16), softmax_dtype="model")
    expected = ask(theirs, choices(9))
    assert ask(ours, choices(9)) == expected


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (instance(text(1, 3), " " + text(2, 80)), "continuation of .* tokens does not fit"),
        (instance("the unbeliev", "able"), "no token in the continuation"),
        (instance("", ""), "no token in the continuation"),
        (instance("  ", "the cat"), "no token in the context"),
    ],
)
def test_what_hflm_stops_at_with_a_bare_error_is_named(request_, words):
    theirs, ours = both(llama())
    with pytest.raises((AssertionError, IndexError)):
        ask(theirs.hflm, [request_])
    with pytest.raises(EvaluationError, match="HFLM stopped at the log-likelihoods"):
        ask(theirs, [request_])
    with pytest.raises(EvaluationError, match=words):
        ask(ours, [request_])


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        (None, 128),
        ({"rope_type": "longrope", "original_max_position_embeddings": 16, "factor": 4.0,
          "short_factor": [1.0] * 16, "long_factor": [4.0 + i for i in range(16)]}, 128),
        ({"rope_type": "dynamic", "factor": 4.0}, 16),
    ],
    ids=["top-k", "longrope", "dynamic"],
)  # fmt: skip
def test_angles_and_chosen_keys_are_those_of_each_request_alone(rope, positions):
    if rope is None:
        model = tiny_model("deepseek_v32", **SPARSE_KEYS)
    else:
        model = llama()
        model.config.rope_parameters = {"rope_theta": 10000.0, **rope}
    model.config.max_position_embeddings = positions
    weights = model.state_dict()
    requests = [instance(text(i, 2 + 3 * i), " the cat", i) for i in range(8)]

    def answer(mode, asked):
        fresh = type(model)(model.config).eval()
        fresh.load_state_dict(weights)
        return ask(scorer(fresh, mode, max_length=128, batch_size=8), asked)

    alone = [answer("lm-eval", [one])[0][0] for one in requests]
    assert [value for value, _ in answer("exact", requests)] == pytest.approx(alone, abs=1e-4)
    together = [value for value, _ in answer("lm-eval", requests)]
    assert together != pytest.approx(alone, abs=1e-2)


def test_a_model_that_changes_its_logits_after_the_lm_head_is_refused():
    """Here by those of other positions; a cap or a scale of each is applied as the class does."""

    class Centered(type(llama())):
        def forward(self, *args, **settings):
            out = super().forward(*args, **settings)
            out.logits = out.logits - out.logits.mean(-2, keepdim=True)
            return out

    model = llama()
    model.__class__ = Centered
    with pytest.raises(UnavailableError, match="logits of Centered do not follow"):
        scorer(model, "exact")


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_logits_that_are_no_numbers_are_not_blamed_on_the_scoring_mode(mode):
    model = llama()
    model.model.norm.weight.data[3] = float("nan")
    with pytest.raises(EvaluationError, match=r"NaN or infinite .* no scoring mode can fix"):
        scorer(model, mode)


@pytest.mark.parametrize("stable", [True, False])
def test_a_head_that_rounds_by_place_takes_whole_batches(stable, monkeypatch):
    """Both ways give HFLM's bits; only the number of rows that the head takes differs."""
    theirs, ours = both(llama(), batch_size=8, max_length=200)
    ours._product = MatmulRounding(rows=64, multiple=16, stable=stable)
    rows = []
    ours.head.linear.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    requests = [instance(text(i, 60), " the cat", i) for i in range(8)]
    answers = ask(ours, requests)
    assert sum(rows) == (16 if stable else ours.report().tokens)
    assert answers == ask(theirs, requests)


def test_a_head_whose_rounding_depends_on_the_place_is_found_out():
    weight = torch.randn(50, 24, generator=torch.Generator().manual_seed(0))

    def steady(x):
        return torch.stack([weight @ row for row in x])

    def moody(x):
        out = steady(x)
        out[-1] *= 1 + 1e-6
        return out

    for head in (steady, moody):
        head.weight = weight
        found = probe_matmul(head, torch.float32, torch.device("cpu"))
        assert found.stable == (head is steady)


@pytest.mark.parametrize(("other", "least"), [(0, 65), (65, 71), (150, 160), (600, None)])
def test_how_many_rows_a_product_needs_to_round_as_a_large_one_is_measured(other, least):
    class Matrix(torch.nn.Linear):
        def forward(self, x):
            """Rows of ``other`` or fewer round otherwise."""
            return x.sum(-1, keepdim=True) + (len(x) <= other)

    assert least_rows(Matrix(24, 50, bias=False), torch.float32) == least


def test_one_sequence_that_does_not_fit_is_an_error_with_the_remedy():
    _, ours = both(llama())

    def never(ids, **settings):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    ours.exact.forward.decoder = never
    with pytest.raises(EvaluationError, match=r"lower evaluation\.max_length"):
        ask(ours, choices(2))


@pytest.mark.parametrize(
    ("normalizer", "sink_tokens"),
    [("softmax", 0), ("softpick", None), ("softpick", 2)],
)
def test_batches_that_are_joined_give_hflms_bits(normalizer, sink_tokens):
    """Beginnings that texts share are computed once, whatever the length of their batches; batches
    of few tokens stay alone."""
    model = llama(attention=f"qbench-{normalizer}-reference")
    if sink_tokens is not None:
        install(model, KVCache(element="int3", scales="token", sink_tokens=sink_tokens), {})
    theirs, ours = both(model, batch_size=8)
    passes = []
    embedding = model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, given: passes.append(given[0].numel()))
    for requests, most in ((choices(40), 0.65), (pages((3, 0, 75, 40, 120)), 1)):
        expected, by_hflm = ask(theirs, requests), passes.copy()
        ask(ours, requests)  # how many tokens batches may share is known after it
        passes.clear()
        assert ask(ours, requests) == expected
        assert sum(passes) <= most * sum(by_hflm)
        assert len(passes) <= len(by_hflm) / 2
        passes.clear()


def test_beginnings_that_attention_rounds_by_length_are_not_shared_among_batches(monkeypatch):
    """It is seen while texts are scored, and their scores are HFLM's all the same."""
    softmax = ALL_ATTENTION_FUNCTIONS["qbench-softmax-reference"]

    def by_length(module, query, *others, **options):
        output, rest = softmax(module, query, *others, **options)
        output[:, 5:] *= 1 + query.shape[2] / 1000
        return output, rest

    AttentionInterface.register("qbench-by-length", by_length)
    AttentionMaskInterface.register(
        "qbench-by-length", ALL_MASK_ATTENTION_FUNCTIONS["qbench-softmax-reference"]
    )
    monkeypatch.setattr(forward, "_limits", {})
    theirs, ours = both(llama(attention="qbench-by-length"), batch_size=8)
    assert ask(ours, choices(40)) == ask(theirs, choices(40))
    assert set(forward._limits.values()) == {5}


@pytest.mark.parametrize(
    ("name", "changes", "joined"),
    [
        ("llama", {}, True),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, False),
        ("ministral", {"sliding_window": 50}, False),  # longer than the texts of the trial
        ("mixtral", {}, False),  # a matrix takes some of the tokens
    ],
)
def test_batches_are_joined_where_no_token_changes_another(name, changes, joined):
    model = tiny_model(name, **changes)
    set_attention(model, normalizer="softmax", implementation="reference")
    assert isinstance(scorer(model, "exact").exact.forward, JoinedForward) == joined
    one_scale = scorer(model, "exact", shares_scales=True)
    assert not isinstance(one_scale.exact.forward, JoinedForward)


def test_batches_of_a_matrix_that_takes_no_rows_alone_are_not_joined():
    class Grouped(torch.nn.Linear):
        def forward(self, x):
            batch, length, width = x.shape
            return super().forward(x).view(batch, length, width)

    model = llama(attention="qbench-softmax-reference")
    model.model.layers[0].self_attn.q_proj.__class__ = Grouped
    assert not isinstance(scorer(model, "exact").exact.forward, JoinedForward)
