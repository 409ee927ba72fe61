"""A plan: what changes a cell's key, what is refused before work, what a model's class decides."""

import gzip
import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small_recipe import DEMO, SOFTPICK, keys, qbench, run_small, small_recipe
from tiny import write_tiny

from qbench import machine
from qbench import plan as planning
from qbench.checkpoints.find import tried_classes
from qbench.cli.lookup import model_table
from qbench.cli.run import notes
from qbench.errors import CheckpointError, DataError, RecipeError
from qbench.evaluation.scoring import forward
from qbench.plan import cell_names, plan, select
from qbench.recipe import Recipe


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Copies of what the bundled recipes read, which a test may edit."""
    folder = tmp_path_factory.mktemp("demo")
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    return folder


def appended(file, text="\n"):
    return lambda copies: (copies / file).write_text((copies / file).read_text() + text)


def put(file, content):
    return lambda copies: (copies / file).write_text(json.dumps(content))


BOTH, QUANTIZED, NONE = {"fp32", "gptq-4bit"}, {"gptq-4bit"}, set()


@pytest.mark.parametrize(
    ("edit", "changed"),
    [
        (appended("data/demo_choice/test.jsonl"), BOTH),
        (appended("tasks/demo_choice.yaml", "\ndescription: x\n"), BOTH),
        (appended("softmax/config.json", " "), BOTH),
        (put("softmax/generation_config.json", {"do_sample": False}), BOTH),
        (appended("calibration.jsonl"), QUANTIZED),
        (appended("data/demo_pages/test.jsonl"), NONE),
        (appended("tasks/demo_choice.yaml", "\n# a comment\n"), NONE),
        (put("softmax/notes.json", {}), NONE),
    ],
    ids=["data", "definition", "config", "generation config", "calibration text",
         "another task's data", "a comment in a definition", "a file that is not read"],
)  # fmt: skip
def test_an_edited_file_changes_the_keys_of_what_reads_it(tmp_path, copies, edit, changed):
    before = keys(tmp_path, copies)
    edit(copies)
    after = keys(tmp_path, copies)
    assert {label for label in before if before[label] != after[label]} == changed


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({"evaluation": {"limit": 4}}, BOTH),
        ({"evaluation": {"limit": 3, "batch_size": 3}}, BOTH),
        ({"evaluation": {"limit": 3, "fewshot_seed": 7}}, BOTH),
        ({"evaluation": {"limit": 3, "scoring": "fast"}}, BOTH),
        ({"evaluation": {"limit": 3, "seed": 7}}, BOTH),
        ({"evaluation": {"limit": 3, "max_length": 64}}, BOTH),
        ({"evaluation": {"limit": 3, "softmax_dtype": "model"}}, BOTH),
        ({"tasks": [{"name": "demo_choice", "num_fewshot": 1}]}, BOTH),
        ({"evaluation": {"limit": 3, "scoring": "exact"}}, NONE),
        ({"evaluation": {"limit": 3, "tolerance": {"mean": 0.001}}}, NONE),
        ({"name": "another"}, NONE),
        ({"quantizers": ["fp32", {"name": "gptq-4bit", "group_size": 32}]}, QUANTIZED),
        ({"quantizers": ["fp32", {"name": "gptq-4bit", "group_size": 64, "damp": 0.05}]}, NONE),
    ],
)
def test_a_setting_changes_keys_when_it_can_change_a_score(tmp_path, copies, changes, changed):
    """Not when it only states what was the default: nothing "auto" is in a key."""
    before = keys(tmp_path, copies, evaluation={"limit": 3})
    after = keys(tmp_path, copies, **{"evaluation": {"limit": 3}, **changes})
    assert {label for label in before if before[label] != after[label]} == changed


@pytest.mark.parametrize(
    ("module", "name", "changed"),
    [
        (planning, "code_digest", lambda: "0" * 64),
        (machine, "version", lambda name: "0"),
        (machine, "kernel_packages", lambda: ["causal-conv1d"]),
    ],
    ids=["our own code", "libraries", "one that transformers takes kernels from"],
)
def test_another_version_of_what_computes_changes_every_key(
    tmp_path, copies, monkeypatch, module, name, changed
):
    before = keys(tmp_path, copies)
    monkeypatch.setattr(module, name, changed)
    assert not set(keys(tmp_path, copies).values()) & set(before.values())


def test_keys_are_the_same_in_another_process_and_folder_which_imports_no_torch(tmp_path, copies):
    here = keys(tmp_path, copies)
    moved = tmp_path / "moved"
    shutil.copytree(copies, moved)
    code = (
        "from pathlib import Path; from small_recipe import keys; "
        f"print(keys(Path({str(tmp_path)!r}), Path({str(moved)!r}))); import sys; "
        "print({'torch', 'transformers', 'lm_eval', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=moved, env={"PYTHONPATH": ":".join(sys.path)})  # fmt: skip
    assert done.stdout.splitlines() == [str(here), "set()"]
    planned = plan(Recipe.load(tmp_path / "small.yaml"), device="cpu")
    assert pickle.loads(pickle.dumps(planned)) == planned  # as worker processes get it


def test_a_gpu_of_another_kind_is_another_key(tmp_path, copies, monkeypatch):
    """The driver is asked; here there is none, so that its answer is put in."""
    monkeypatch.setattr(sys.modules["qbench.checkpoints.find"], "choose", lambda *_: "reference")
    found = []
    for name in ("NVIDIA H200", "NVIDIA L4", "NVIDIA L4"):
        monkeypatch.setattr(planning, "hardware", lambda _, name=name: name)
        recipe = Recipe.load(small_recipe(tmp_path, quantizers=["fp32"], tasks=["demo_choice"]))
        planned = plan(recipe, device="cuda")
        assert planned.hardware == name
        assert "triton" in planned.cells[0].key_parts["versions"]
        found.append(planned.cells[0].key)
    assert found[0] != found[1] == found[2]


def test_cells_are_named_before_anything_is_planned(tmp_path):
    recipe = Recipe.load(small_recipe(tmp_path))
    assert sorted(cell_names(recipe)) == sorted(c.name for c in plan(recipe, device="cpu").cells)
    assert select(cell_names(recipe), "softpick/*") == ["softpick/fp32", "softpick/rtn-4bit"]
    assert select(cell_names(recipe), "*/fp32,softpick/*") == [
        "softmax/fp32", "softpick/fp32", "softpick/rtn-4bit",
    ]  # fmt: skip


def bases(tmp_path, *quantizers):
    path = small_recipe(tmp_path, quantizers=list(quantizers))
    cells = plan(Recipe.load(path), device="cpu").cells
    found = {cell.label: cell for cell in cells if cell.checkpoint_name == "softpick"}
    return found, {label: cell.base and cell.base.quantizer for label, cell in found.items()}


def test_a_quantized_cell_is_measured_against_the_unquantized_one_of_its_dtype(tmp_path):
    others = [("rtn-4bit", "bfloat16"), ("rtn-8bit", "float32"), ("rtn-2bit", "float16")]
    quantizers = [{"name": name, "compute_dtype": dtype} for name, dtype in others]
    cells, found = bases(tmp_path, "fp32", "bf16", *quantizers)
    assert found == {"fp32": None, "bf16": None, "rtn-4bit": "bf16", "rtn-8bit": "fp32",
                     "rtn-2bit": "fp32"}  # fmt: skip
    assert cells["rtn-2bit"].notes == (
        "damage is measured against fp32: no unquantized column computes in float16",
    )
    assert cells["rtn-4bit"].notes == ()


def test_an_unquantized_cell_has_the_same_key_whatever_stands_before_it(tmp_path):
    both, _ = bases(tmp_path, "bf16", "fp32", "rtn-4bit")
    alone, _ = bases(tmp_path, "fp32", "rtn-4bit")
    assert both["fp32"].key == alone["fp32"].key


GENERATE = """
task: {name}
dataset_path: json
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: {tokens}}}
metric_list: [{{metric: exact_match}}]
"""


def planned(folder, **changes):
    alone = {"checkpoints": SOFTPICK, "quantizers": ["fp32"], "tasks": ["demo_choice"]}
    path = small_recipe(folder, **{**alone, **changes})
    return plan(Recipe.load(path), device="cpu")


def calibrated(folder, content, **changes):
    name = "text.jsonl.gz" if content[:2] == b"\x1f\x8b" else "text.jsonl"
    (folder / name).write_bytes(content)
    source = {"path": str(folder / name), "samples": 2, "length": 32}
    return planned(folder, quantizers=["fp32", "gptq-4bit"], calibration=source, **changes)


GOOD = b'{"text": "a b c"}\n'
LONG = b'{"text": "' + b"a b c " * 20 + b'"}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (GOOD + b"{}\n", "line 2: not a JSON object with a text field"),
        (b'{"text": 3}', "line 1: not a JSON object"),
        (b"\xff\xfe", "line 1: not a JSON object"),
        (gzip.compress(GOOD * 9, mtime=0)[:-9], r"text\.jsonl\.gz: not a complete gzip file"),
    ],
)
def test_a_malformed_calibration_text_is_refused_with_its_line(tmp_path, content, words):
    with pytest.raises(DataError, match=words):
        calibrated(tmp_path, content)


@pytest.mark.parametrize("long", [LONG, LONG.replace(b"a b c ", b"a b c " * 100)])
def test_too_little_calibration_text_is_refused_before_anything_is_loaded(tmp_path, long):
    words = "text.jsonl: gives 1 windows of 32 tokens, 2 are needed; lower calibration samples"
    with pytest.raises(DataError, match=words):
        calibrated(tmp_path, long + GOOD)


def test_a_bos_that_no_tokenizer_adds_is_refused_and_names_the_checkpoint(tmp_path):
    with pytest.raises(RecipeError, match=r"checkpoints\.softpick: evaluation\.add_bos: true"):
        planned(tmp_path, evaluation={"add_bos": True})


@pytest.mark.parametrize("primary", ["demo_choice/f1", "piqa/acc", "foo"])
def test_a_primary_score_that_no_task_gives_is_refused(tmp_path, primary):
    assert planned(tmp_path, primary="demo_choice/acc").manifest().primary == "demo_choice/acc"
    with pytest.raises(RecipeError, match=f"primary: no task has {primary}; possible: demo_") as e:
        planned(tmp_path, primary=primary)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("quantizers", [["rtn-4bit"], ["fp32", "rtn-4bit"]])
def test_that_no_damage_can_be_measured_is_said(tmp_path, quantizers):
    found = planned(tmp_path, quantizers=quantizers)
    said = any(line.startswith("no damage is measured: add") for line in notes(found, found.cells))
    assert said == ("fp32" not in quantizers)


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path):
    bare = shutil.copytree(
        DEMO / "softpick", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*")
    )
    (bare / "chat_template.jinja").write_text("{}")
    with pytest.raises(CheckpointError, match=r"bare: no tokenizer; put its tokenizer\.json into"):
        planned(tmp_path, checkpoints={"bare": str(bare)})


@pytest.mark.parametrize("room", [1, 0])
def test_a_task_that_generates_more_than_fits_is_refused(tmp_path, room):
    longest = json.loads((DEMO / "softpick" / "config.json").read_text())
    longest = longest["max_position_embeddings"]
    (tmp_path / "say.yaml").write_text(GENERATE.format(name="say", tokens=longest - room))
    (tmp_path / "data" / "say").mkdir(parents=True)
    (tmp_path / "data" / "say" / "test.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    changes = {"tasks": ["say"], "definitions": str(tmp_path), "data": str(tmp_path / "data")}
    if room:
        assert planned(tmp_path, **changes).tasks[0].name == "say"
        return
    with pytest.raises(RecipeError, match=f"say generates up to {longest} tokens, .* no room"):
        planned(tmp_path, **changes)


def test_a_folder_of_definitions_that_holds_a_disk_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("qbench.evaluation.tasks.MOST_FILES", 50)
    (tmp_path / "many").mkdir()
    for number in range(60):
        (tmp_path / "many" / f"{number}.txt").touch()
    with pytest.raises(RecipeError, match="many holds more than 50 files; name the folder of"):
        planned(tmp_path, definitions=str(tmp_path / "many"))


def test_a_run_of_some_cells_shows_these_and_those_that_are_there(tmp_path):
    pair = {name: str(DEMO / name) for name in ("softmax", "softpick")}
    plan_ = planned(tmp_path, checkpoints=pair, quantizers=["fp32", "rtn-4bit"])
    shown = plan_.manifest({"softpick/rtn-4bit", "softpick/fp32"})
    assert (shown.checkpoints, shown.quantizers) == (("softpick",), ("fp32", "rtn-4bit"))
    assert [cell.cell for cell in shown.cells] == ["softpick/fp32", "softpick/rtn-4bit"]


KINDS = ("bloom", "gpt2", "gpt_oss", "granite", "llama")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {kind: str(write_tiny(root / kind, kind)) for kind in KINDS}


def changes(checkpoints, quantizers=("fp32",), calibration=None, **evaluation):
    """Of one task of three documents that the tiny models' own tokenizer reads."""
    return {
        "checkpoints": checkpoints, "quantizers": [*quantizers], "tasks": ["demo_choice"],
        "evaluation": {"limit": 3, "max_length": 64, **evaluation}, "calibration": calibration,
    }  # fmt: skip


def recipe(tmp_path, *arguments, **evaluation):
    return small_recipe(tmp_path, **changes(*arguments, **evaluation))


def cell(path, device="cpu"):
    (only,) = plan(Recipe.load(path), device=device).cells
    return only


@pytest.mark.parametrize(
    ("kind", "asked", "normalizer", "attention"),
    [
        ("llama", "auto", "softmax", "reference"),
        ("llama", "native", "native", "sdpa"),
        ("gpt_oss", "auto", "softmax-sink", "reference"),
        ("gpt_oss", "native", "native", "sdpa"),
    ],
)
def test_the_attention_is_chosen_for_the_class(
    tmp_path, models, kind, asked, normalizer, attention
):
    found = cell(recipe(tmp_path, {"a": models[kind]}, attention=asked))
    assert (found.checkpoint.normalizer, found.attention) == (normalizer, attention)
    assert found.key_parts["normalizer"] == normalizer
    assert found.key_parts["attention"] == attention
    assert any("native/" in note for note in found.notes) == (normalizer == "native")


@pytest.mark.parametrize(
    ("source", "attention", "words"),
    [
        ({}, "native", "trained with softpick, which LlamaForCausalLM of transformers"),
        ({"normalizer": "native"}, "auto", "says softpick, but the recipe says normalizer"),
    ],
)
def test_an_attention_that_cannot_be_had_is_refused(tmp_path, source, attention, words):
    source = {"path": str(DEMO / "softpick"), **source}
    with pytest.raises((RecipeError, CheckpointError), match=words):
        cell(recipe(tmp_path, {"a": source}, attention=attention))


@pytest.mark.parametrize(("asked", "said"), [(4096, True), (200, False)])
def test_a_max_length_beyond_the_context_is_not_shortened_without_a_word(
    tmp_path, models, asked, said
):
    found = cell(recipe(tmp_path, {"a": models["llama"]}, max_length=asked), "cpu")
    assert found.scoring.max_length == min(asked, 256)
    words = "scored in windows of 256 tokens, its context, instead of evaluation.max_length 4,096"
    assert (words in found.notes) == said


@pytest.mark.parametrize(("template", "said"), [("{{ messages }}", True), (None, False)])
def test_a_chat_model_that_is_asked_without_its_template_is_told(tmp_path, models, template, said):
    folder = tmp_path / "chat"
    shutil.copytree(models["llama"], folder)
    if template:
        (folder / "chat_template.jinja").write_text(template)
    notes = cell(recipe(tmp_path, {"a": str(folder)}), "cpu").notes
    assert any("do not use its chat template" in note for note in notes) == said


def without_decoder(monkeypatch, kind):
    """Have models of one class give no decoder."""
    right = forward.decoder_of
    monkeypatch.setattr(forward, "decoder_of", lambda model: (
        None if model.config.model_type == kind else right(model)))  # fmt: skip


def test_what_was_measured_at_loading_runs_and_stands_in_the_record(tmp_path, models, monkeypatch):
    """Of BLOOM its own attention, of a model without a decoder of its own lm-eval's scoring,
    whatever a plan expected."""
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    without_decoder(monkeypatch, "granite")
    chosen = {kind: models[kind] for kind in ("bloom", "granite", "llama")}
    records = {each.checkpoint: each for each in run_small(tmp_path, **changes(chosen)).records()}
    assert {name: (one.attention, one.scoring.mode) for name, one in records.items()} == {
        "bloom": ("native/eager", "exact"),
        "granite": ("softmax/reference", "lm-eval"),
        "llama": ("softmax/reference", "exact"),
    }
    details = {name: one.stages[0].detail for name, one in records.items()}
    assert "AttentionInterface, so qbench cannot set" in details["bloom"]
    assert "GraniteForCausalLM has no decoder and LM head" in details["granite"]
    assert not details["llama"]


@pytest.mark.parametrize(
    ("kind", "asked", "quantizers", "words"),
    [
        ("bloom", {"attention": "reference"}, ["fp32"], "set evaluation.attention: native to"),
        ("granite", {"scoring": "exact"}, ["fp32"], "LM head[^;]*; set scoring: auto or lm-eval$"),
        ("bloom", {}, [{"kv": "int8-token", "label": "kv8"}], "quantized inside qbench's"),
    ],
)
def test_a_cell_that_asks_for_what_its_model_does_not_have_fails_with_the_measurement(
    tmp_path, models, monkeypatch, kind, asked, quantizers, words
):
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    without_decoder(monkeypatch, "granite")
    store = run_small(tmp_path, **changes({"a": models[kind]}, quantizers, **asked), code=1)
    [record] = store.records()
    assert re.search(words, record.error)


def test_the_documents_hold_that_table():
    root = Path(__file__).parent.parent
    assert (root / "docs" / "models.md").read_text().rstrip().endswith(model_table())
    assert f"[{len(tried_classes())} classes](docs/models.md)" in (root / "README.md").read_text()


REFUSED = [
    ("llama", {"name": "rtn-4bit", "group_size": 48}, "groups of 48 do not divide the in"),
    ("gpt2", {"name": "hqq-4bit", "group_size": 128}, ".*c_attn .64.*; without group_size one"),
    ("llama", {"kv": {"name": "int4-token", "group_size": 7}}, "group_size 7 does not divide"),
    ("llama", {"name": "bnb-4bit", "ignore": ["down_pro"]}, "ignore: 'down_pro' matches no weight"),
    (
        "gpt2", {"activations": {"name": "int8-token", "ignore": ["c_fc", "attn.proj"]}},
        r"int8-token: ignore: 'proj' matches no weight matrix; possible parts of names: .*c_attn",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "quantizer", "words"), REFUSED)
def test_a_cell_that_can_never_run_is_refused_before_work(
    tmp_path, models, kind, quantizer, words, capfd
):
    text = {"path": str(DEMO / "calibration.jsonl"), "samples": 2, "length": 32}
    path = recipe(tmp_path, {"a": models[kind]}, ("fp32", {"label": "x", **quantizer}), text)
    label = quantizer.get("label", "x")
    with pytest.raises(RecipeError, match=words) as refusal:
        plan(Recipe.load(path), device="cpu")
    assert str(refusal.value).startswith(f"a/{label}: ")
    others = plan(Recipe.load(path), device="cpu", only="*/fp32")
    assert [bool(cell.unsupported_reason) for cell in others.cells] == [False, True]
    with pytest.raises(RecipeError, match=words):
        qbench("plan", path, "--out", tmp_path / "out")
    assert f"refused   a/{label}" in capfd.readouterr().out
    assert qbench("plan", path, "--out", tmp_path / "out", "--only", "*/fp32") == 0


def test_calibration_text_beyond_the_positions_of_a_model_is_refused(tmp_path, models):
    text = {"path": str(DEMO / "calibration.jsonl"), "samples": 2, "length": 257}
    asked = ("fp32", {"activations": "int8-static"})
    cells = {
        kind: plan(
            Recipe.load(recipe(tmp_path, {"a": models[kind]}, asked, text)), device="cpu", show=True
        ).cells
        for kind in ("gpt2", "llama")
    }
    assert [cell.unsupported_reason for cell in cells["llama"]] == [None, None]
    assert [cell.unsupported_reason for cell in cells["gpt2"]] == [
        None,
        "calibration.length 257: GPT2LMHeadModel has 256 positions; set length: 256, or "
        "--calibration-length 256",
    ]


def test_every_checkpoint_that_cannot_be_scored_is_said_at_once(tmp_path):
    configs = {
        "t5": {"model_type": "t5", "is_encoder_decoder": True},
        "none": {"model_type": "llama"},
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    path = small_recipe(tmp_path, checkpoints={**{n: str(tmp_path / n) for n in configs},
                                               "softmax": str(DEMO / "softmax")})  # fmt: skip
    with pytest.raises(CheckpointError) as error:
        plan(Recipe.load(path), device="cpu")
    second, first = sorted(error.value.lines)
    assert "no model.safetensors there" in second
    assert "is_encoder_decoder: true" in first
