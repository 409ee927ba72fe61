"""Columns that another runtime scores through its class in lm-eval."""

import pytest
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from loading import load_model
from small_recipe import DEMO, qbench, small_recipe

from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.comparison.compare import compare
from qbench.errors import EvaluationError, RecipeError
from qbench.evaluation.llamacpp import ExternalScorer
from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.store import Store

pytestmark = pytest.mark.usefixtures("own_cache")


@register_model("qbench-test-runtime")
class Runtime(HFLM):
    """Another program that serves the bundled softmax model."""

    def __init__(self, folder, broken=False):
        import torch

        if broken:
            raise ConnectionError("no server at 127.0.0.1:9")
        checkpoint = find(folder)
        model = load_model(checkpoint, dtype=torch.float32, device="cpu")
        super().__init__(
            pretrained=model, tokenizer=load_tokenizer(checkpoint), max_length=256, batch_size=8
        )


def recipe(folder, answers=None, **changes):
    column = {"name": "lm-eval", "model": "qbench-test-runtime", "label": "served", "bits": 8,
              "args": {"folder": str(DEMO / "softmax")}} | changes  # fmt: skip
    return small_recipe(
        folder,
        checkpoints={"base": str(DEMO / "softmax")},
        quantizers=["fp32", column],
        evaluation={"limit": 4, "scoring": "exact"},
        answers=answers,
    )


def test_a_runtimes_scores_are_paired_with_the_models_and_not_audited(tmp_path, capfd):
    assert qbench("run", recipe(tmp_path), "--out", tmp_path / "out", "--device", "cpu") == 0
    whole, served = Store(tmp_path / "out").records()
    assert served.audit is None
    assert served.precision.name == "W8A16"
    assert served.scoring.mode == "lm-eval"
    assert served.scoring.batching == "by Runtime"
    for ours, theirs in zip(whole.scores, served.scores, strict=True):
        assert theirs.value == pytest.approx(ours.value, rel=1e-4)
    damage = served.damage.tasks
    assert all(one.distributions is None for one in damage.values())
    comparison = compare(Store(tmp_path / "out"))
    flips = comparison.flips[served.cell]
    assert flips["demo_choice"]["acc"].documents == 4
    shown = capfd.readouterr().out
    assert "base/served: not audited" in shown


def test_a_runtime_gives_no_tokens_of_answers(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n')
    path = recipe(tmp_path, answers={"prompts": str(prompts), "max_new_tokens": 4})
    options = ("--tasks", "demo_lastword", "--only", "base/served", "--device", "cpu")
    assert qbench("run", path, "--out", tmp_path / "out", *options) == 1
    (served,) = (one for one in Store(tmp_path / "out").records() if one.quantizer == "served")
    assert served.failed_tasks == {
        "answers": "answers: only exact and fast scoring give the tokens of answers; set "
        "evaluation.scoring to one of these"
    }
    assert {score.task for score in served.scores} == {"demo_lastword"}


def test_a_runtime_that_does_not_answer_is_a_failed_cell_in_one_line(tmp_path, capfd):
    broken = recipe(tmp_path, args={"folder": "x", "broken": True})
    assert qbench("run", broken, "--out", tmp_path / "out", "--device", "cpu") == 1
    served = next(one for one in Store(tmp_path / "out").records() if one.quantizer == "served")
    words = "lm-eval's qbench-test-runtime cannot be started: no server at 127.0.0.1:9; correct its"
    assert served.error.startswith(words)


@pytest.mark.parametrize("name", ["gpt-oracle", "hf", ""])
def test_a_class_that_lm_eval_does_not_have_is_refused_before_work_begins(tmp_path, name):
    with pytest.raises(RecipeError, match=f"lm-eval: model '{name}' is unknown; known: .*vllm"):
        plan(Recipe.load(recipe(tmp_path, model=name)), device="cpu")


def test_log_likelihoods_that_leave_out_the_last_token_are_refused(tmp_path):
    """As lm-eval's local-completions reads the answers of llama-cpp-python's server."""

    class WithoutLast(LM):
        def loglikelihood(self, requests, disable_tqdm=False):
            return [(-2.5 * (len(one.args[1]) - 2), False) for one in requests]

        generate_until = loglikelihood_rolling = None

    scorer = ExternalScorer(WithoutLast(), settings=None)
    with pytest.raises(
        EvaluationError, match=r"26 continuations that exclude each other sum to 26"
    ):
        scorer.loglikelihood([])
