"""Bad input that only a cell would meet is refused when the run is planned."""

import gzip
import json
import shutil

import pytest
from small_recipe import DEMO, small_recipe

from qbench.cli.run import notes
from qbench.errors import CheckpointError, DataError, RecipeError
from qbench.plan import plan
from qbench.recipe import Recipe

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
    alone = {"checkpoints": {"softpick": str(DEMO / "softpick")}, "quantizers": ["fp32"]}
    path = small_recipe(folder, **{**alone, "tasks": ["demo_choice"], **changes})
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
        (gzip.compress(GOOD * 9, mtime=0)[:-9], r"text\.jsonl\.gz: not a whole gzip file"),
    ],
)
def test_a_malformed_calibration_text_is_refused_with_its_line(tmp_path, content, words):
    with pytest.raises(DataError, match=words):
        calibrated(tmp_path, content)


@pytest.mark.parametrize("long", [LONG, LONG.replace(b"a b c ", b"a b c " * 100)])
def test_too_little_calibration_text_is_refused_before_anything_is_loaded(tmp_path, long):
    words = "text.jsonl: gives 1 windows of 32 tokens, 2 were asked for; lower calibration samples"
    with pytest.raises(DataError, match=words):
        calibrated(tmp_path, long + GOOD)


def test_a_bos_that_no_tokenizer_adds_is_refused_and_names_the_checkpoint(tmp_path):
    with pytest.raises(RecipeError, match=r"checkpoints\.softpick: evaluation\.add_bos: true"):
        planned(tmp_path, evaluation={"add_bos": True})


@pytest.mark.parametrize("primary", ["demo_choice/f1", "piqa/acc", "foo"])
def test_a_primary_score_that_no_task_gives_is_refused(tmp_path, primary):
    assert planned(tmp_path, primary="demo_choice/acc").manifest.primary == "demo_choice/acc"
    with pytest.raises(RecipeError, match=f"primary: no task gives {primary}; there is demo_") as e:
        planned(tmp_path, primary=primary)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("quantizers", [["rtn-4bit"], ["fp32", "rtn-4bit"]])
def test_that_no_damage_can_be_measured_is_said(tmp_path, quantizers):
    found = planned(tmp_path, quantizers=quantizers)
    said = any(line.startswith("no damage is measured: add") for line in notes(found, found.cells))
    assert said == ("fp32" not in quantizers)


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path):
    bare = shutil.copytree(DEMO / "softpick", tmp_path / "bare", ignore=_tokenizer)
    (bare / "chat_template.jinja").write_text("{}")
    with pytest.raises(CheckpointError, match=r"bare: no tokenizer; put its tokenizer\.json into"):
        planned(tmp_path, checkpoints={"bare": str(bare)})


def _tokenizer(folder, names):
    return [name for name in names if name.startswith("tokenizer")]


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


def test_many_tasks_without_data_are_a_few_lines(tmp_path):
    tasks = [f"demo_{name}" for name in ("choice", "lastword", "pages")]
    names = [*tasks, "arc_easy", "arc_challenge", "piqa", "sciq"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as error:
        planned(tmp_path, tasks=names, data=str(tmp_path / "empty"))
    assert len(error.value.lines) == 4
    assert error.value.lines[-1] == (
        "4 more tasks have such problems: arc_easy, arc_challenge, piqa, sciq"
    )


def test_a_run_of_some_cells_shows_these_and_those_that_are_there(tmp_path):
    pair = {name: str(DEMO / name) for name in ("softmax", "softpick")}
    plan_ = planned(tmp_path, checkpoints=pair, quantizers=["fp32", "rtn-4bit"])
    shown = plan_.manifest_of({"softpick/rtn-4bit", "softpick/fp32"})
    assert (shown.checkpoints, shown.quantizers) == (("softpick",), ("fp32", "rtn-4bit"))
    assert [cell.cell for cell in shown.cells] == ["softpick/fp32", "softpick/rtn-4bit"]
