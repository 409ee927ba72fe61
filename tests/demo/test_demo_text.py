"""The demo's text: the same from the same seed, held out as it claims, and well formed."""

import json
import subprocess
import sys
from collections import Counter

import pytest

TASKS = ("demo_choice", "demo_lastword", "demo_pages")
SIZES = {"demo_choice": 200, "demo_lastword": 200, "demo_pages": 16}


@pytest.fixture(scope="module")
def training(made):
    from corpus import held_out_triples, make_training

    world, evaluation, _ = made
    return make_training(world, 0, held_out_triples(evaluation), 3_000)


@pytest.mark.parametrize("task", TASKS)
def test_the_committed_task_data_are_what_the_generator_makes(demo, made, task):
    from corpus import encode_rows

    _, evaluation, _ = made
    assert (demo / "data" / task / "test.jsonl").read_bytes() == encode_rows(evaluation[task])
    assert len(evaluation[task]) == SIZES[task]


def test_the_committed_calibration_text_is_what_the_generator_makes(demo, made):
    from corpus import encode_rows

    assert (demo / "calibration.jsonl").read_bytes() == encode_rows(made[2])


def test_the_command_writes_the_committed_bytes_in_a_process_of_its_own(demo, tmp_path):
    command = [sys.executable, demo / "make.py", "--seed", "0", "--out", tmp_path]
    subprocess.run(command, check=True, env={"PYTHONHASHSEED": "77"})
    written = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*.jsonl"))
    assert len(written) == 4
    for name in written:
        assert (tmp_path / name).read_bytes() == (demo / name).read_bytes(), name


def test_the_command_writes_the_training_text(demo, made, tmp_path):
    from corpus import held_out_triples, make_training

    path = tmp_path / "new" / "text.jsonl"
    command = [sys.executable, demo / "make.py", "--documents", "50", "--text", path]
    subprocess.run(command, check=True, env={"PYTHONHASHSEED": "77"})
    world, evaluation, _ = made
    expected = make_training(world, 0, held_out_triples(evaluation), 50)
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == expected
    assert [file.name for file in path.parent.iterdir()] == ["text.jsonl"]


def test_another_seed_makes_another_world(made):
    from world import make_world

    assert make_world(1).people != made[0].people


def test_no_three_sentences_of_an_evaluation_document_stand_in_other_text(made, training):
    from corpus import held_out_triples, sentence_triples

    _, evaluation, calibration = made
    held_out = held_out_triples(evaluation)
    assert len(held_out) > 1_000
    for text in [*training, *(row["text"] for row in calibration)]:
        assert held_out.isdisjoint(sentence_triples(text))


def test_the_draw_refuses_a_document_that_holds_an_evaluated_passage(made):
    from corpus import make_training, sentence_triples

    world = made[0]
    first = make_training(world, 5, frozenset(), 50)
    kept_out = first[7]
    again = make_training(world, 5, frozenset(sentence_triples(kept_out)), 50)
    assert kept_out in first
    assert kept_out not in again


def test_a_fact_asked_from_memory_is_told_in_training_but_never_asked_there(made, training):
    _, evaluation, calibration = made
    questions = {
        row["query"].removesuffix("\nAnswer:")
        for row in evaluation["demo_choice"]
        if row["kind"] == "recall"
    }
    asked = {
        line
        for text in [*training, *(row["text"] for row in calibration)]
        for line in text.split("\n")
        if line.startswith("Question: ")
    }
    assert len(questions) == 120
    assert len(asked) > 500
    assert not questions & asked


def test_the_right_choice_of_a_recall_question_is_the_fact_of_the_world(made):
    from facts import RELATIONS

    world, evaluation, _ = made
    answers = {
        f"Question: {question.format(n=entity.name)}\nAnswer:": entity.facts[relation.name]
        for entity in (*world.people, *world.places)
        for relation in RELATIONS[entity.kind]
        for question in relation.questions
    }
    rows = [r for r in evaluation["demo_choice"] if r["kind"] == "recall"]
    assert [r["choices"][r["answer"]] for r in rows] == [answers[r["query"]] for r in rows]


def test_choices_are_four_different_texts_and_the_right_place_is_no_clue(made):
    rows = made[1]["demo_choice"]
    assert all(len(set(row["choices"])) == 4 for row in rows)
    answers = Counter(row["answer"] for row in rows)
    assert set(answers) == {0, 1, 2, 3}
    assert max(answers.values()) < 70
    assert sum(len({len(c) for c in row["choices"]}) > 1 for row in rows) > 150


def test_the_first_choice_rows_hold_both_kinds(made):
    kinds = Counter(row["kind"] for row in made[1]["demo_choice"][:40])
    assert min(kinds["recall"], kinds["reading"]) >= 8


def test_the_answer_to_a_reading_question_stands_in_its_passage(made):
    rows = [r for r in made[1]["demo_choice"] if r["kind"] == "reading"]
    for row in rows:
        assert row["choices"][row["answer"]] in row["query"].split("\nQuestion:")[0]


def test_a_last_word_is_a_bare_word_after_a_context(made):
    for row in made[1]["demo_lastword"]:
        context, _, last = row["text"].rpartition(" ")
        assert last.isalpha()
        assert context.count(".") >= 2


@pytest.mark.parametrize("task", TASKS)
def test_a_task_definition_names_no_path_and_reads_only_fields_that_its_rows_have(demo, made, task):
    import yaml
    from jinja2 import Environment, StrictUndefined

    definition = yaml.safe_load((demo / "tasks" / f"{task}.yaml").read_text())
    assert definition["task"] == task
    assert (definition["dataset_path"], definition["test_split"]) == ("json", "test")
    environment = Environment(undefined=StrictUndefined)
    for field in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        for row in made[1][task][:5]:
            environment.from_string(definition.get(field, "")).render(**json.loads(json.dumps(row)))
