"""GGUF files in llama.cpp against the same weights in transformers."""

import json
import os
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loading import load_model
from published_copies import first_blocks, gguf, interleaved, original, write_gguf
from scoring_models import prompt
from small_recipe import DEMO, blocks, qbench, small_recipe
from tiny import tiny_model
from transformers import modeling_gguf_pytorch_utils as legacy
from transformers import modeling_utils

from qbench.api import load_answers
from qbench.cell import load
from qbench.checkpoints import find, from_gguf
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import CheckpointError, QbenchError, UnavailableError
from qbench.evaluation.evaluate import load_task
from qbench.evaluation.llamacpp import LlamaCpp
from qbench.evaluation.scoring import language_model
from qbench.plan import plan
from qbench.quantizers import gguf_file, stored_bits
from qbench.quantizers.audit.compare import audit, probe_of
from qbench.quantizers.linear import linearize
from qbench.recipe import Recipe
from qbench.store import Store

pytest.importorskip("xllamacpp", reason="pip install -e '.[llamacpp]'")
library = pytest.importorskip("gguf", reason="pip install -e '.[llamacpp]'")
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two blocks of the bundled softmax model as GGUF, by type."""
    folder = tmp_path_factory.mktemp("gguf")
    whole = first_blocks(original(folder / "llama"), folder / "two")
    return {kind: gguf(whole, folder / "m.gguf", kind) for kind in ("F32", "Q8_0", "Q4_0")}


def planned(folder, path, **changes):
    column = {"name": "checkpoint", "path": str(path), "label": "copy"}
    recipe = small_recipe(folder, checkpoints={"base": blocks("softmax")["softmax"]},
                          quantizers=["fp32", column], **changes)  # fmt: skip
    return plan(Recipe.load(recipe), device="cpu")


@pytest.fixture(scope="module")
def both(files, tmp_path_factory):
    """Language models of the same float32 weights: transformers', and llama.cpp's."""
    changes = {"evaluation": {"limit": 4, "max_length": 64}}
    found = planned(tmp_path_factory.mktemp("both"), files["F32"], **changes)
    cells = [found.cell(f"base/{label}") for label in ("fp32", "copy")]
    return found, [
        language_model(load(cell, found), load_tokenizer(cell.checkpoint), cell.scoring)
        for cell in cells
    ]


@pytest.mark.parametrize("task", ["demo_choice", "demo_lastword", "demo_pages"])
def test_float32_scores_are_those_of_transformers(both, task):
    """Pages are longer than the 64 tokens of a window."""
    found, models = both
    loaded = load_task(next(spec for spec in found.tasks if spec.name == task)).task
    loaded.build_all_requests(limit=4, rank=0, world_size=1)
    kind = loaded.instances[0].request_type
    theirs, ours = (getattr(model, kind)(loaded.instances) for model in models)
    for a, b in zip(theirs, ours, strict=True):
        (a, greedy), (b, also) = (one if isinstance(one, tuple) else (one, None) for one in (a, b))
        assert b == pytest.approx(a, abs=1e-3)
        assert greedy == also


def test_float32_answers_are_those_of_transformers(both):
    _, (theirs, ours) = both
    texts = ["the cat sat on", "one two three", "once upon a time there was"]
    kwargs = {"until": ["\n", "."], "max_gen_toks": 12, "do_sample": False}
    asked = [prompt(text, i, **kwargs) for i, text in enumerate(texts)]
    assert ours.generate_until(asked) == theirs.generate_until(asked)


def test_a_file_is_a_column_like_any_other(files, tmp_path):
    columns = [
        {"name": "checkpoint", "path": str(path), "label": kind} for kind, path in files.items()
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "In the old town of"}\n{"prompt": "The baker of"}\n')
    answers = {"prompts": str(prompts), "max_new_tokens": 12, "samples": 2}
    recipe = small_recipe(tmp_path, checkpoints={"base": blocks("softmax")["softmax"]},
                          quantizers=["fp32", *columns], answers=answers,
                          tasks=["demo_pages"])  # fmt: skip
    assert qbench("run", recipe, "--out", tmp_path / "out", "--device", "cpu") == 0
    records = {record.quantizer: record for record in Store(tmp_path / "out").records()}
    tokens = load_answers(tmp_path / "out").groupby("quantizer")
    along = tokens["kl"].mean()
    assert along["F32"] < 1e-5 < along["Q8_0"] < along["Q4_0"]
    assert tokens["text"].agg("".join).nunique() == 1  # all read the same answers
    outcomes = Store(tmp_path / "out").outcomes(records["F32"])
    own = outcomes.query("task == 'answers'").set_index(["metric", "document"])["value"]
    assert (own["agreed_tokens"] == own["length"]).all()  # drawn, and the same to the end
    divergence = {
        kind: records[kind].damage.tasks["demo_pages"].distributions.kl.mean for kind in files
    }
    assert divergence["F32"] < 1e-5 < divergence["Q8_0"] < divergence["Q4_0"]
    bits = {kind: records[kind].audit.size.bits_per_weight for kind in files}
    assert bits == {"F32": 32.0, "Q8_0": 8.5, "Q4_0": 4.5}
    assert records["Q4_0"].precision.weights.bits == 4
    assert records["Q4_0"].audit.bits_per_weight == 4.5
    assert all(record.audit.passed for record in records.values())
    assert records["Q8_0"].scoring.batching == "llama.cpp, one after another"


def test_another_models_file_and_one_in_another_order_fail_their_audit(files, tmp_path):
    found = planned(tmp_path, files["Q8_0"])
    cell = found.cell("base/copy")
    base = found.cell("base/fp32")
    runtime = load(cell, found)
    probe = probe_of(1024)[:, :32]
    other, whole = load(base, found), load(base, found)
    for parameter in whole.parameters():
        parameter.data = parameter.data.roll(1, 0)
    stored_bits.write_gguf_into(other, str(files["Q8_0"]))
    assert runtime.disagreement(other, probe) == []
    assert any("weight error" in line for line in audit(whole, other, cell.quantization,
                                                        probe).problems)  # fmt: skip
    for name, parameter in other.named_parameters():
        if "q_proj" in name:  # as if the file's order of rows were misunderstood
            parameter.data = parameter.data.reshape(4, -1, 2, 128).swapaxes(1, 2).reshape(128, 128)
    assert "computes another model" in runtime.disagreement(other, probe)[0]


@pytest.mark.parametrize(
    ("checkpoint", "path", "words"),
    [
        ("softmax", "none.gguf", "no such file"),
        ("softmax", "text.gguf", "not a complete GGUF file"),
        ("softpick", "F32", "llama.cpp computes softmax attention"),
    ],
)
def test_what_cannot_run_is_refused_before_work_begins(files, tmp_path, checkpoint, path, words):
    (tmp_path / "text.gguf").write_text(json.dumps("no"))
    column = {"name": "checkpoint", "path": str(files.get(path, path)), "label": "copy"}
    recipe = small_recipe(tmp_path, checkpoints={"base": str(DEMO / checkpoint)},
                          quantizers=["fp32", column])  # fmt: skip
    with pytest.raises(QbenchError) as error:
        plan(Recipe.load(recipe), device="cpu")
    assert words in str(error.value)


def centred(name, values):
    return values + 1 if name.endswith("norm.weight") else values


def turned(name, values):
    return values.T if name.rpartition(".")[0].endswith(("c_attn", "c_proj", "c_fc")) else values


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((kind, "interleaved") for kind in ("granite", "smollm3", "arcee", "olmo", "mixtral")),
        ("nemotron", centred),
        ("gpt2", turned),
        *((k, lambda name, values: values) for k in ("qwen2", "qwen2_moe", "qwen3_moe", "olmoe")),
    ],
)
def test_what_the_converter_changes_is_undone(kind, change, tmp_path):
    stored, found = tiny_model(kind), tiny_model(kind)
    architecture = "llama" if kind == "mixtral" else kind.replace("_", "")
    change = interleaved(stored.config) if change == "interleaved" else change
    path = str(write_gguf(tmp_path / "m.gguf", stored, architecture, change))
    for model in (stored, found):
        linearize(model)
    for parameter in found.parameters():
        parameter.data.zero_()
    stored_bits.write_gguf_into(found, path)
    for name, parameter in found.named_parameters():
        torch.testing.assert_close(parameter, stored.get_parameter(name), msg=name)


@pytest.mark.parametrize(
    ("kind", "architecture", "fields", "words"),
    [
        ("mixtral", "gpt-oss", {}, "experts of gpt-oss in GGUF files are not"),
        ("llama", "llama", {"split_count": 3}, "one of 3 parts of a file; join them: llama-gguf-"),
    ],
)
def test_files_that_are_not_read_whole_are_refused(kind, architecture, fields, words, tmp_path):
    path = str(write_gguf(tmp_path / "m.gguf", tiny_model(kind), architecture, **fields))
    with pytest.raises(CheckpointError, match=words):
        gguf_file.describe(path)


FIELD = struct.pack("<Q", 1) + b"a" + struct.pack("<IB", 0, 1)  # a field of one byte


@pytest.mark.parametrize("fields", [struct.pack("<Q", 2**63), 2 * FIELD], ids=["size", "twice"])
def test_a_damaged_file_is_refused_in_a_line(tmp_path, fields):
    """Its first field's name has 2⁶³ bytes; a field comes twice."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + fields)
    with pytest.raises(CheckpointError, match="is not a complete GGUF file"):
        gguf_file.describe(str(path))


def test_why_llama_cpp_cannot_load_a_file_is_said(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    with pytest.raises(UnavailableError, match=r"cannot load it \(.*context_length"):
        LlamaCpp(path, context=64, shell=None)


def test_a_file_is_a_checkpoint_too_dequantized_once(files, monkeypatch, capsys):
    """Named with --checkpoint, without an original. The next test starts the process. A line of
    progress is repeated while it works, and no entry of the vocabulary is parsed again."""
    parsed, parse = [], legacy._gguf_parse_value
    monkeypatch.setattr(legacy, "_gguf_parse_value", lambda *a: (parsed.append(a[0]), parse(*a))[1])
    for owner, name in (np, "memmap"), (library, "GGUFReader"), (modeling_utils, "unwrap_model"):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # set back after the test
    done = SimpleNamespace(returncode=0)
    monkeypatch.setattr(from_gguf, "SECONDS_OF_SILENCE", 0.001)
    monkeypatch.setattr(
        from_gguf.subprocess, "run", lambda call, **_: (from_gguf.main(*call[-2:]), done)[1]
    )
    checkpoint = find(str(files["F32"]))
    assert checkpoint.config["model_type"] == "llama"
    assert capsys.readouterr().err.count("dequantizing it into") > 1
    assert len(parsed) == len(set(map(id, parsed))) > 100
    again = find(str(files["F32"]))
    assert (again.folder, again.digest) == (checkpoint.folder, checkpoint.digest)
    ours = load_model(checkpoint, dtype=torch.float32, device="cpu")
    original = load_model(find(blocks("softmax")["softmax"]), dtype=torch.bfloat16, device="cpu")
    for name, parameter in original.named_parameters():
        torch.testing.assert_close(
            ours.get_parameter(name), parameter.float(), rtol=0, atol=0, msg=name
        )


def test_a_checkpoint_that_is_no_gguf_file_is_refused_in_a_line(tmp_path, monkeypatch):
    path = tmp_path / "text.gguf"
    path.write_text("no")
    with pytest.raises(CheckpointError, match=r"not a complete GGUF .*; fetch it again, or one"):
        find(str(path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "gguf.py").write_text("raise ImportError")
    with pytest.raises(CheckpointError, match=r"need the package gguf: pip install -e '.\[llamac"):
        find(str(path))
