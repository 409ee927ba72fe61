"""The bench of scoring on the bundled pair: what it compares, and that it compares."""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lm_eval.tasks import TaskManager
from loading import load_model
from scoring_models import settings
from small_recipe import blocks, qbench, run_small, small_recipe
from tiny import write_tiny

from qbench.bench import attention_speed, cells, command_speed
from qbench.bench import evaluation_speed as evaluation
from qbench.bench.attention_speed import Shape, bench_attention
from qbench.bench.evaluation_speed import MODES, compare, table
from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import EvaluationError, UnavailableError
from qbench.evaluation.evaluate import load_task
from qbench.evaluation.scoring import Scorer, batching
from qbench.evaluation.tasks import plan_task
from qbench.plan import plan
from qbench.recipe import Recipe

DEMO = Path(__file__).parents[2] / "recipes" / "demo"


@pytest.fixture(scope="module")
def model():
    return load_model(find(blocks("softpick")["softpick"]), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(find(str(DEMO / "softpick")))


def tasks(*names):
    return [
        load_task(plan_task(name, data=DEMO / "data", definitions=DEMO / "tasks")) for name in names
    ]


RUNS = ("lm-eval", "exact", "fast", "fast, rows kept", "fast, damage measured")


def test_every_mode_scores_every_task_exact_as_lm_eval_and_fast_but_for_rounding(
    model, tokenizer, monkeypatch
):
    """The warm-up scores fewer documents, and no mode takes over what one before has encoded."""
    monkeypatch.setattr(evaluation, "WARM_UP", 1)
    encoded, encode = set(), batching._encode
    monkeypatch.setattr(
        batching, "_encode", lambda *args: encoded.add(len(evaluated)) or encode(*args)
    )
    evaluated, forget = [], evaluation.forget_requests
    monkeypatch.setattr(evaluation, "forget_requests", lambda: evaluated.append(0) or forget())
    names = ("demo_choice", "demo_pages")
    chosen = {mode: settings(mode, max_length=128, limit=2) for mode in MODES}
    actual = compare(model, tokenizer, tasks(*names), chosen, log=print)
    rows = {(row["task"], row["mode"]): row for row in actual["rows"]}
    assert rows.keys() == {(task, run) for task in (*names, "all") for run in RUNS}
    for row in rows.values():
        assert row["documents"] == (4 if row["task"] == "all" else 2)
        assert row["seconds"] >= row["scoring_seconds"] > 0
        assert ("speed" not in row) == (row["mode"] == "lm-eval")
    assert {2, 3, 4, 5} <= encoded  # HFLM's is the first
    assert rows["all", "exact"]["largest_difference"] == 0
    assert rows["demo_choice", "fast"]["largest_difference"] < 1e-4
    assert rows["demo_pages", "fast"]["largest_difference"] < 1e-2
    assert rows["all", "fast"]["changed_answers"] == 0
    # who watches changes nothing
    assert len({rows["all", run]["largest_difference"] for run in RUNS[2:]}) == 1


def test_a_tasks_seconds_end_with_its_scores(model, tokenizer, monkeypatch):
    """Not when its work is queued."""
    start = Scorer.start

    def slow(self, kind, requests):
        answers = start(self, kind, requests)
        names = {request.task_name for request in requests}
        return lambda: time.sleep(1.0 if names == {"demo_choice"} else 0.0) or answers()

    monkeypatch.setattr(Scorer, "start", slow)
    scorer = Scorer(model, tokenizer, chosen := settings("exact", max_length=128, limit=2))
    first, second = evaluation._timed(scorer, tasks("demo_choice", "demo_pages"), chosen)
    assert first.seconds >= first.inside >= 1.0 > second.seconds


def test_generated_answers_are_compared_as_they_are(model, tokenizer, tmp_path, monkeypatch):
    """They have no log-likelihood, and each of the task's filters has its row."""
    monkeypatch.setattr(evaluation, "WARM_UP", 1)
    rows = [{"text": f"Fog covered the valley {n}"} for n in range(2)]
    data = tmp_path / "lambada_word" / "test.jsonl"
    data.parent.mkdir()
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task(
        plan_task("lambada_word", data=tmp_path, definitions=DEMO.parent / "generation")
    )
    task.task.config.generation_kwargs["max_gen_toks"] = 6
    real = Scorer.generate_until
    monkeypatch.setattr(
        Scorer, "generate_until", lambda self, requests: [*real(self, requests)[:-1], "another"]
    )
    chosen = {mode: settings(mode, max_length=128) for mode in ("lm-eval", "exact")}
    actual = compare(model, tokenizer, [task], chosen, log=print)
    row = next(row for row in actual["rows"] if row["mode"] == "exact")
    assert (row["documents"], row["requests"], row["changed_answers"]) == (2, 2, 1)
    assert row["scoring_seconds"] > 0
    assert (row["largest_difference"], row["mean_difference"]) == (None, None)
    assert "nan" not in table(actual)


def test_without_a_gpu_nothing_is_measured(tmp_path):
    with pytest.raises(UnavailableError, match=r"CUDA GPU, and none is here; run it"):
        bench_attention(tmp_path / "attention.json", True, (), log=print)
    assert list(tmp_path.iterdir()) == []


def test_flop_count_the_pairs_that_are_seen():
    shape = Shape(2, 2000, 4, 4, 64)
    seen = torch.ones(2000, 2000, dtype=torch.bool).tril()
    assert shape.flop("causal") == 4 * 2 * 4 * 64 * int(seen.sum())
    assert shape.flop("window") == 4 * 2 * 4 * 64 * int(seen.triu(-1023).sum())


def test_every_timed_shape_has_a_length_that_is_checked():
    shapes = (*attention_speed.SHAPES, attention_speed.DECODE)
    assert {shape.head_dim for shape in shapes} == set(attention_speed.CHECKED)


# `qbench bench cells`: tokens per second of finished cells.


@pytest.mark.usefixtures("own_cache")
def test_each_finished_cell_of_this_machine_has_a_speed(tmp_path, capsys):
    store = run_small(tmp_path, "--only", "softmax/*", quantizers=["fp32", "rtn-4bit"],
                      tasks=["demo_pages"], evaluation={"limit": 1, "damage": False})  # fmt: skip
    file = tmp_path / "cells.json"
    command = ("bench", "cells", store.directory, "--tokens", 2, "--device", "cpu", "--out", file)
    assert qbench(*command) == 0
    measured = json.loads(file.read_text())
    assert [row["cell"] for row in measured["rows"]] == ["softmax/fp32", "softmax/rtn-4bit"]
    for row in measured["rows"]:
        low, high = row["quartiles"]
        assert 0 < low <= row["tokens_per_second"] <= high
    assert "torch" in measured["environment"]["versions"]


def bench_cells(monkeypatch, names, out=None, waits=(), stops=None):
    """Rows of a bench of 16 tokens per cell; a token in ``waits`` takes 0.3 s, as of a compiler."""

    def generate(ids, *, streamer=None, max_new_tokens, **_):
        for token in range(max_new_tokens + 1):
            time.sleep(0.3 if token in waits else 0.001)
            if streamer is not None:
                streamer.put(ids)

    def load(store, record, *_):
        if record.cell == stops:
            raise KeyboardInterrupt
        model = SimpleNamespace(generate=generate, config=SimpleNamespace(vocab_size=9))
        return SimpleNamespace(model=model)

    monkeypatch.setattr(cells, "load_measured", load)
    records = [SimpleNamespace(cell=name) for name in names]
    options = {"device": "cpu", "tokens": 16, "log": lambda _: None, "out": out}
    return cells.bench_cells(None, records, None, **options)["rows"]


def test_a_token_that_waits_for_a_compiler_does_not_slow_a_cell(monkeypatch):
    (row,) = bench_cells(monkeypatch, ["a/bf16"], waits=(1, 5))
    assert row["tokens_per_second"] > 100


def test_a_stopped_bench_of_cells_leaves_the_rows_it_has(monkeypatch, tmp_path):
    names, out = ["a/bf16", "a/rtn-4bit"], tmp_path / "cells.json"
    with pytest.raises(KeyboardInterrupt):
        bench_cells(monkeypatch, names, out, stops="a/rtn-4bit")
    assert [row["cell"] for row in json.loads(out.read_text())["rows"]] == names[:1]


# The bench of generated answers, on a tiny shape.


def test_it_times_what_it_checked_and_prints_no_more(tmp_path, capfd):
    """Answers that are not those of HFLM in float32 would be an error."""
    out = tmp_path / "bench.json"
    sizes = ("--prompts", 6, "--prompt", 20, "--tokens", 9, "--batch-size", 4)
    options = ("--shape", "tiny", "--device", "cpu", *sizes, "--out", out)
    assert qbench("bench", "generation", *options) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["normalizer"] for row in rows] == ["softmax"] * 4 + ["softpick"] * 4
    assert all(row["seconds"] > 0 for row in rows)
    printed = capfd.readouterr()
    assert printed.out == out.with_suffix(".md").read_text()
    *progress, last = printed.err.splitlines()  # no library's notes
    assert [line.partition(":")[0] for line in progress] == [
        f"{row['normalizer']}, {row['what']}".partition(":")[0] for row in rows
    ]
    assert last == f"written: {out}, {out.with_suffix('.md')}"


# lm-eval's own command beside ours asks the same of the same model.


@pytest.fixture
def planned(tmp_path):
    checkpoints = {"a": str(write_tiny(tmp_path / "a", "llama"))}
    path = small_recipe(tmp_path, checkpoints=checkpoints, quantizers=["fp32"])
    return plan(Recipe.load(path), device="cpu")


def test_its_definitions_have_the_plans_documents(tmp_path, planned):
    command = command_speed.lm_eval_command(planned, tmp_path / "definitions")
    manager = TaskManager(include_path=str(tmp_path / "definitions"), include_defaults=False)
    names = command[command.index("--tasks") + 1].split(",")
    theirs = manager.load(names)["tasks"]
    for spec, name in zip(planned.tasks, names, strict=True):
        documents = [list(task.eval_docs) for task in (theirs[name], load_task(spec).task)]
        assert json.dumps(documents[0]) == json.dumps(documents[1])


def test_commands_are_shares_of_lm_evals_mean(tmp_path, planned, monkeypatch):
    ends = iter([0])

    def done(command, **_):
        code = next(ends) if "lm_eval" not in command else 0
        return type("Done", (), {"returncode": code, "stderr": "Traceback:\n  File x\nno memory\n"})

    monkeypatch.setattr(command_speed.subprocess, "run", done)
    clock = iter([0, 10, 10, 13, 13, 27])
    monkeypatch.setattr(command_speed.time, "perf_counter", lambda: next(clock))
    rows = command_speed.bench_command(planned, tmp_path / "r.yaml", ["a/fp32"], log=lambda _: None)
    assert [row["seconds"] for row in rows] == [10, 3, 14]
    assert rows[1]["speed"] == 0.25
    ends, clock = iter([1]), iter(range(4))
    monkeypatch.setattr(command_speed.tempfile, "tempdir", str(tmp_path))
    words = "^qbench run, all cells failed: no memory; see what it printed: "
    with pytest.raises(EvaluationError, match=words) as error:
        command_speed.bench_command(planned, tmp_path / "r.yaml", [], log=lambda _: None)
    assert "File x" in Path(str(error.value).partition("printed: ")[2]).read_text()


@pytest.mark.parametrize(
    ("name", "module"), [("evaluation", evaluation), ("command", command_speed)]
)
def test_a_bench_plans_its_recipe(tmp_path, monkeypatch, name, module):
    plans = []
    monkeypatch.setattr(module, f"bench_{name}", lambda plan, *_, **__: plans.append(plan) or {})
    monkeypatch.setattr(module, "table", lambda _: "")
    recipe = small_recipe(tmp_path, quantizers=["fp32"], tasks=["demo_pages"])
    assert qbench("bench", name, recipe, "--device", "cpu") == 0
    assert [cell.label for cell in plans[0].cells][:1] == ["fp32"]
