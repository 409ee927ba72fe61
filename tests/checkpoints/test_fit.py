"""Before a checkpoint is loaded its tensors are compared with its class, by their headers alone."""

import re
from concurrent.futures import BrokenExecutor, Future
from dataclasses import replace

import pytest
import torch
from checkpoints.folders import CONFIG, random_tensors, write
from safetensors.torch import load_file, save_file
from tiny import KINDS, write_tiny
from transformers import AutoModelForCausalLM

from qbench.checkpoints import find, fit
from qbench.checkpoints.load import read_model, tensors_problem
from qbench.errors import CheckpointError

# Of GPT-BigCode in transformers 5.17.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


@pytest.mark.parametrize("kind", KINDS)
def test_what_fits_and_what_does_not_is_what_transformers_finds_when_it_loads(kind, tmp_path):
    folder = write_tiny(tmp_path, kind)
    assert tensors_problem(find(str(folder))) is None
    tensors = load_file(folder / "model.safetensors")
    name = max(
        (n for n, one in tensors.items() if one.dim() == 1),
        default="model.layers.0.self_attn.o_proj.weight",
    )
    tensors["model.other.weight"] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    problem = tensors_problem(find(str(folder)))
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert re.search(f"missing: {re.escape(min(report['missing_keys']))}", problem)
    assert problem.endswith(f"left over: {min(report['unexpected_keys'])}")
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        read_model(find(str(folder)), torch.float32)


@pytest.mark.parametrize(
    ("size", "value", "words"),
    [
        ("vocab_size", 48, r"misshapen: .*\[32, 64\] instead of \[48, 64\]"),
        ("hidden_size", 80, r"misshapen: .*\[32, 64\] instead of \[32, 80\]"),
        ("num_hidden_layers", 3, r"missing: model\.layers\.1\..* and \d+ more"),
    ],
)
def test_sizes_that_the_tensors_contradict_are_named(tmp_path, size, value, words):
    checkpoint = find(str(write(tmp_path / "c", {**CONFIG, size: value})))
    assert re.search(words, tensors_problem(checkpoint))


@pytest.mark.parametrize("change", ["missing", "misshapen"])
def test_experts_that_cannot_be_joined_are_named_as_such(change, tmp_path):
    folder = write_tiny(tmp_path, "mixtral")
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if ".experts.3." in name)
    weight = tensors.pop(name)
    if change == "misshapen":
        tensors[name] = torch.zeros(weight.shape[0] + 8, weight.shape[1])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    problem = tensors_problem(find(str(folder)))
    assert "misshapen" in problem or "of its experts; is one missing" in problem
    with pytest.raises(CheckpointError, match=re.escape(problem)):
        read_model(find(str(folder)), torch.float32)


def test_a_tied_head_may_be_stored_or_not(tmp_path):
    for stored in (False, True):
        folder = write_tiny(tmp_path / str(stored), "llama", tie_word_embeddings=True)
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("lm_head.weight", None)
        if stored:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        assert tensors_problem(find(str(folder))) is None


def test_what_was_found_is_kept_for_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    checkpoint = find(str(write(tmp_path / "c")))
    for problem in (None, "missing: x"):
        monkeypatch.setattr("qbench.checkpoints.load.tensors_problem", lambda _, p=problem: p)
        assert fit.compare_tensors([checkpoint])() == []  # the second time from the cache
    other = replace(checkpoint, digest="0" * 64)
    assert fit.compare_tensors([checkpoint, other])() == [f"checkpoint {other.source}: missing: x"]


def test_a_process_of_its_own_compares_all_checkpoints_of_a_plan(tmp_path):
    tensors = random_tensors()
    tensors["model.norm.other"] = tensors.pop("model.norm.weight")
    both = [find(str(write(tmp_path / "a"))), find(str(write(tmp_path / "b", tensors=tensors)))]
    (line,) = fit.compare_tensors(both, fit._in_process)()
    assert "b: the tensors do not fit" in line
    assert line.endswith("missing: model.norm.weight; left over: model.norm.other")


def test_a_process_that_nobody_waits_for_is_ended(tmp_path, monkeypatch):
    """As when a task of the plan is refused: it stayed until Python ended."""
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    started, popen = [], fit.subprocess.Popen
    monkeypatch.setattr(
        fit.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[0]
    )
    fit.compare_tensors([find(str(write(tmp_path / "a")))], fit._in_process)
    assert started[0].returncode is not None


def test_a_killed_worker_is_no_answer(tmp_path):
    future = Future()
    future.set_exception(BrokenExecutor())
    checkpoint = find(str(write(tmp_path / "a")))
    assert fit.compare_tensors([checkpoint], lambda *_: future.result)() == []
