"""lm-eval's tasks from local files: none is named in qbench's code."""

import json
import subprocess
import sys

import pytest

from qbench.errors import DataError, RecipeError
from qbench.evaluation.tasks import definition_file, expand, load_task, read_lines
from qbench.recipe import Task

COPA = [
    {"premise": "The man lost his balance.", "choice1": "He fell.", "choice2": "He ran.",
     "question": "effect", "idx": 0, "label": 0},
    {"premise": "The lamp went out.", "choice1": "It was day.", "choice2": "The bulb burnt out.",
     "question": "cause", "idx": 1, "label": 1},
]  # fmt: skip
BOOLQ = [
    {"question": "is water wet", "passage": "Water is wet.", "idx": 0, "label": 1},
    {"question": "is fire cold", "passage": "Fire is hot.", "idx": 1, "label": 0},
]
SCIQ = {
    "question": "What falls?", "distractor1": "a", "distractor2": "b", "distractor3": "c",
    "correct_answer": "rain", "support": "Rain falls.",
}  # fmt: skip


def write(folder, task, split, rows):
    path = folder / task / f"{split}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("task", "rows"), [("copa", COPA), ("boolq", BOOLQ)])
def test_a_task_that_nobody_prepared_works_from_its_files_alone(tmp_path, task, rows):
    write(tmp_path, task, "validation", rows)
    loaded = load_task(Task(name=task), data=tmp_path, definitions=None)
    assert loaded.documents == 2
    assert loaded.label == task
    assert loaded.task.doc_to_text(loaded.task.eval_docs[0])


def test_few_shot_examples_come_from_the_tasks_own_split_file(tmp_path):
    write(tmp_path, "boolq", "validation", BOOLQ)
    settings = Task(name="boolq", num_fewshot=1)
    with pytest.raises(DataError, match=r"for its examples no train\.jsonl"):
        load_task(settings, data=tmp_path, definitions=None)
    write(tmp_path, "boolq", "train", BOOLQ * 3)
    loaded = load_task(settings, data=tmp_path, definitions=None)
    assert loaded.label == "boolq (1-shot)"
    assert loaded.task.config.num_fewshot == 1


def test_a_missing_split_says_what_to_put_where_and_what_is_there(tmp_path):
    write(tmp_path, "sciq", "validation", [SCIQ])
    with pytest.raises(DataError) as error:
        load_task(Task(name="sciq"), data=tmp_path, definitions=None)
    for word in ["sciq", "no test.jsonl", "validation.jsonl", "files: [validation]"]:
        assert word in str(error.value)


def test_another_file_than_the_splits_own_must_be_named_and_is_shown(tmp_path):
    write(tmp_path, "sciq", "validation", [SCIQ])
    settings = Task(name="sciq", files=("test", "validation"))
    assert load_task(settings, data=tmp_path, definitions=None).label == "sciq [validation]"
    write(tmp_path, "sciq", "test", [SCIQ])
    assert load_task(settings, data=tmp_path, definitions=None).label == "sciq"


def test_the_digest_changes_with_a_document_and_with_nothing_else(tmp_path):
    write(tmp_path, "copa", "validation", COPA)
    first = load_task(Task(name="copa"), data=tmp_path, definitions=None).digest
    assert load_task(Task(name="copa"), data=tmp_path, definitions=None).digest == first
    write(tmp_path, "copa", "validation", [COPA[0], {**COPA[1], "label": 0}])
    assert load_task(Task(name="copa"), data=tmp_path, definitions=None).digest != first


def test_the_digest_is_the_same_in_another_process(tmp_path):
    write(tmp_path, "wikitext", "test", [{"page": " = A = \n"}])  # its definition has functions
    here = load_task(Task(name="wikitext"), data=tmp_path, definitions=None).digest
    code = (
        "from pathlib import Path; from qbench.evaluation.tasks import load_task; "
        "from qbench.recipe import Task; x = [object() for _ in range(999)]; "
        f"print(load_task(Task(name='wikitext'), data=Path({str(tmp_path)!r}), "
        "definitions=None).digest)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == here


def test_wrong_fields_are_reported_with_the_data_set_they_should_follow(tmp_path):
    write(tmp_path, "sciq", "test", [{"query": "What falls?"}])
    with pytest.raises(DataError, match="are the fields those of allenai/sciq"):
        load_task(Task(name="sciq"), data=tmp_path, definitions=None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}\n{oops\n", ":2: not JSON"),
        ("[1]\n", ":1: a JSON object is needed"),
        ("", "no documents"),
    ],
)
def test_a_malformed_file_is_reported_with_its_line(tmp_path, text, words):
    path = tmp_path / "test.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        read_lines(path)


def test_own_task_definitions_are_found_first(tmp_path):
    (tmp_path / "mine.yaml").write_text("task: sciq\ndataset_path: json\n")
    assert definition_file("sciq", tmp_path) == tmp_path / "mine.yaml"


def test_a_leaf_task_stands_for_itself():
    assert expand("arc_easy", None) == ["arc_easy"]


@pytest.mark.parametrize("name", ["mmlu_abstract_algebra", "arc_easy", "wikitext"])
def test_definitions_are_found_however_they_quote_their_name(name):
    assert definition_file(name, None).is_file()


def test_the_digest_is_also_of_the_documents_that_examples_are_drawn_from(tmp_path):
    write(tmp_path, "boolq", "validation", BOOLQ)
    digests = []
    for examples in (BOOLQ * 3, BOOLQ[:1] * 6):
        write(tmp_path, "boolq", "train", examples)
        settings = Task(name="boolq", num_fewshot=1)
        digests.append(load_task(settings, data=tmp_path, definitions=None).digest)
    assert digests[0] != digests[1]


def test_an_unknown_task_is_a_recipe_error():
    with pytest.raises(RecipeError, match="no_such_task_at_all"):
        definition_file("no_such_task_at_all", None)
