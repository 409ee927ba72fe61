"""Columns that another runtime scores through its class in lm-eval."""

import pytest
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from loading import load_model
from small_recipe import blocks, run_small, small_recipe

from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.comparison.compare import compare
from qbench.errors import EvaluationError, RecipeError
from qbench.evaluation.llamacpp import ExternalScorer
from qbench.plan import plan
from qbench.recipe import Recipe

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


def changes(**column):
    served = {"name": "lm-eval", "model": "qbench-test-runtime", "label": "served", "bits": 8,
              "args": {"folder": blocks("softmax")["softmax"]}} | column  # fmt: skip
    return {"checkpoints": {"base": blocks("softmax")["softmax"]}, "quantizers": ["fp32", served],
            "evaluation": {"limit": 4, "scoring": "exact"}}  # fmt: skip


def test_a_runtimes_scores_are_paired_with_the_models_not_audited_and_have_no_tokens(
    tmp_path, capfd
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n')
    answers = {"prompts": str(prompts), "max_new_tokens": 4}
    store = run_small(tmp_path, **changes(), answers=answers, code=1)
    whole, served = store.records()
    assert served.audit is None
    assert served.precision.name == "W8A16"
    assert served.scoring.mode == "lm-eval"
    assert served.scoring.batching == "by Runtime"
    ours = [score for score in whole.scores if score.task != "answers"]
    for score, theirs in zip(ours, served.scores, strict=True):
        assert theirs.value == pytest.approx(score.value, rel=1e-4)
    assert served.failed_tasks == {
        "answers": "answers: only exact and fast scoring give the tokens of answers; set "
        "evaluation.scoring to one of these"
    }
    assert all(one.distributions is None for one in served.damage.tasks.values())
    assert compare(store).flips[served.cell]["demo_choice"]["acc"].documents == 4
    assert "base/served: not audited" in capfd.readouterr().out


def test_a_runtime_that_does_not_answer_is_a_failed_cell_in_one_line(tmp_path):
    store = run_small(tmp_path, **changes(args={"folder": "x", "broken": True}), code=1)
    served = next(one for one in store.records() if one.quantizer == "served")
    words = "lm-eval's qbench-test-runtime cannot be started: no server at 127.0.0.1:9; correct its"
    assert served.error.startswith(words)


@pytest.mark.parametrize("name", ["gpt-oracle", "hf", ""])
def test_a_class_that_lm_eval_does_not_have_is_refused_before_work_begins(tmp_path, name):
    with pytest.raises(RecipeError, match=f"lm-eval: model '{name}' is unknown; known: .*vllm"):
        plan(Recipe.load(small_recipe(tmp_path, **changes(model=name))), device="cpu")


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
