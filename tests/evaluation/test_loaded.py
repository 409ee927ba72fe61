"""Documents without a usable answer are refused, where lm-eval counts them as wrong."""

import json
import shutil

import pytest
from small_recipe import DEMO

from qbench.errors import DataError
from qbench.evaluation.evaluate import check_documents, load_task
from qbench.evaluation.tasks import plan_task

COPA = {
    "premise": "The man lost his balance.", "choice1": "He fell.", "choice2": "He ran.",
    "question": "effect", "idx": 0, "label": 0,
}  # fmt: skip
QUIZ = {"text": "The sky is", "options": ["blue", "green"], "right": 0}
QUIZ_TASK = """
task: quiz
dataset_path: json
output_type: multiple_choice
test_split: test
doc_to_text: "{{text}}"
doc_to_choice: options
doc_to_target: "{{right | string}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ARC = {
    "id": "1", "question": "What falls?", "answerKey": "B",
    "choices": {"text": ["sand", "rain", "wind"], "label": ["A", "B", "C"]},
}  # fmt: skip
WINOGRANDE = {
    "sentence": "The trophy does not fit the case because the _ is big.",
    "option1": "trophy", "option2": "case", "answer": "1",
}  # fmt: skip
HELLASWAG = {
    "ind": 1, "activity_label": "a", "ctx_a": "He", "ctx_b": "she", "ctx": "He she", "split": "val",
    "endings": ["runs.", "sits.", "eats.", "is."], "source_id": "1", "label": "2",
}  # fmt: skip
WIKITEXT = {"page": " = A = \n\n Some words . "}


def loaded(folder, task, split, rows):
    path = folder / task / f"{split}.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    definitions = folder / "definitions"
    definitions.mkdir()
    (definitions / "quiz.yaml").write_text(QUIZ_TASK)
    shutil.copy(DEMO / "tasks" / "demo_pages.yaml", definitions)
    return load_task(plan_task(task, data=folder, definitions=definitions)), path


GOOD = [
    ("copa", "validation", COPA), ("quiz", "test", QUIZ), ("arc_easy", "test", ARC),
    ("winogrande", "validation", WINOGRANDE), ("hellaswag", "validation", HELLASWAG),
    ("wikitext", "test", WIKITEXT), ("lambada_openai", "test", {"text": "The sky is blue"}),
    ("demo_pages", "test", WIKITEXT),
]  # fmt: skip


@pytest.mark.parametrize(("task", "split", "row"), GOOD, ids=[good[0] for good in GOOD])
def test_good_answers_pass(tmp_path, task, split, row):
    check_documents(loaded(tmp_path, task, split, [row] * 3)[0])


@pytest.mark.parametrize("label", [None, -1, 2, -100, "red", ""])
def test_a_label_that_names_no_choice_is_refused_with_file_and_line(tmp_path, label):
    good = {**QUIZ, "right": "blue"} if isinstance(label, str) else QUIZ
    bad = {**QUIZ, "right": label}
    task, path = loaded(tmp_path, "quiz", "test", [good, good, bad, good, bad, good])
    with pytest.raises(DataError) as error:
        check_documents(task)
    line = str(error.value)
    assert line.startswith(f"quiz: {path}:3: label ")
    assert "names none of its 2 choices" in line
    assert "(2 of 6 documents have such a problem)" in line
    assert line.count("\n") == 0


@pytest.mark.parametrize("label", [None, -1, 1.5])
def test_a_hidden_label_of_which_a_function_makes_an_answer_is_refused(tmp_path, label):
    """copa's takes the second choice wherever the label is not 0."""
    task, path = loaded(tmp_path, "copa", "validation", [COPA, {**COPA, "label": label}])
    with pytest.raises(DataError, match=rf"{path}:2: label {label} is not an answer"):
        check_documents(task)


@pytest.mark.parametrize("text", [5, ["The sky", "is"]])
def test_a_field_with_values_of_two_kinds_is_refused_with_its_file(tmp_path, text):
    with pytest.raises(DataError, match=r"quiz: .*test\.jsonl: a field holds values of several"):
        loaded(tmp_path, "quiz", "test", [QUIZ, {**QUIZ, "text": text}])


def test_documents_beyond_the_limit_are_not_asked(tmp_path):
    task, _ = loaded(tmp_path, "quiz", "test", [QUIZ, {**QUIZ, "right": -1}])
    check_documents(task, 1)
    with pytest.raises(DataError):
        check_documents(task, 2)


@pytest.mark.parametrize(
    ("task", "split", "row", "words"),
    [
        ("arc_easy", "test", {**ARC, "answerKey": "E"}, ":2: its prompt or answer cannot be comp"),
        ("hellaswag", "validation", {**HELLASWAG, "label": "-1"}, "label '-1' is not an answer"),
        ("quiz", "test", {**QUIZ, "options": []}, r"its choices are \[\], not texts"),
        ("quiz", "test", {**QUIZ, "options": [1, 2]}, "a field holds values of several kinds"),
        ("quiz", "test", {**QUIZ, "text": None}, "text is null, so there is nothing to ask"),
        ("wikitext", "test", {"page": None}, ":2: "),
        ("demo_pages", "test", {"page": " \n"}, ":2: page is .*, but must be a text to score"),
        ("lambada_openai", "test", {"text": ""}, ":2: there is no target text"),
    ],
)
def test_documents_that_cannot_be_scored_are_refused(tmp_path, task, split, row, words):
    good = dict(next(good[2] for good in GOOD if good[0] == task))
    with pytest.raises(DataError, match=words):
        check_documents(loaded(tmp_path, task, split, [good, row])[0])
