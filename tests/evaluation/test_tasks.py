"""lm-eval's tasks from local files: none is named in qbench's code."""

import json
from dataclasses import replace
from functools import partial

import pytest
from datasets import Dataset, DatasetDict
from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._index import TaskIndex
from small_recipe import DEMO, small_recipe
from tiny import write_tiny

from qbench.checkpoints import find
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import DataError, RecipeError
from qbench.evaluation import evaluate
from qbench.evaluation.evaluate import load_task
from qbench.evaluation.tasks import definition_file, plan_task, read_rows
from qbench.plan import plan
from qbench.recipe import Overrides, Recipe
from qbench.tasks.passkey import process_results

COPA = [
    {"premise": "The man lost his balance.", "choice1": "He fell.", "choice2": "He ran.",
     "question": "effect", "idx": 0, "label": 0},
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


def test_a_missing_split_says_what_to_put_where_and_what_is_there(tmp_path):
    write(tmp_path, "sciq", "validation", [SCIQ])
    with pytest.raises(DataError) as error:
        plan_task("sciq", data=tmp_path, definitions=None)
    for word in ["sciq", "no test.jsonl", "validation.jsonl", "files: [validation]"]:
        assert word in str(error.value)


def test_another_file_than_the_splits_own_must_be_named_and_is_shown(tmp_path):
    write(tmp_path, "sciq", "validation", [SCIQ])
    files = ("test", "validation")
    planned = plan_task("sciq", files=files, data=tmp_path, definitions=None)
    assert load_task(planned).label == "sciq [validation]"
    write(tmp_path, "sciq", "test", [SCIQ])
    assert plan_task("sciq", files=files, data=tmp_path, definitions=None).label == "sciq"


def test_few_shot_examples_may_come_from_another_file_which_is_shown(tmp_path):
    write(tmp_path, "boolq", "dev", BOOLQ)
    write(tmp_path, "boolq", "examples", BOOLQ * 3)
    with pytest.raises(DataError, match=r"for its examples no train.*files: \{fewshot: \[dev\]\}"):
        plan_task("boolq", num_fewshot=1, data=tmp_path, definitions=None, files=["dev"])
    planned = plan_task("boolq", num_fewshot=1, data=tmp_path, definitions=None, files=["dev"],
                        fewshot_files=["nosuch", "examples"])  # fmt: skip
    loaded = load_task(planned)
    assert loaded.label == "boolq (1-shot) [dev, examples: examples]"
    assert [(file.split, file.path.stem) for file in planned.files] == [
        ("validation", "dev"), ("train", "examples"),
    ]  # fmt: skip
    assert len(list(loaded.task.fewshot_docs())) == 6


def test_files_of_examples_that_nobody_asks_for_are_refused(tmp_path):
    write(tmp_path, "boolq", "validation", BOOLQ)
    with pytest.raises(RecipeError, match="boolq: files: fewshot names a file, but it draws no"):
        plan_task("boolq", data=tmp_path, definitions=None, fewshot_files=["validation"])


def test_the_digest_holds_no_address_of_a_function(tmp_path):
    write(tmp_path, "wikitext", "test", [{"page": " = A = \n"}])  # its definition has functions
    planned = plan_task("wikitext", data=tmp_path, definitions=None)
    first = load_task(planned)
    load_task.cache_clear()
    second = load_task(planned)
    assert first.task is not second.task
    assert first.digest == second.digest


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}\n{oops\n", ":2: not JSON"),
        ("[1]\n", ":1: not a JSON object"),
        ("", "no documents"),
    ],
)
def test_a_malformed_file_is_reported_with_its_line(tmp_path, text, words):
    path = tmp_path / "test.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        read_rows(path)


def test_the_digest_is_also_of_the_documents_that_examples_are_drawn_from(tmp_path):
    write(tmp_path, "boolq", "validation", BOOLQ)
    digests = []
    for examples in (BOOLQ * 3, BOOLQ[:1] * 6):
        write(tmp_path, "boolq", "train", examples)
        planned = plan_task("boolq", num_fewshot=1, data=tmp_path, definitions=None)
        digests.append((planned.digest, load_task(planned).digest))
    assert digests[0][0] != digests[1][0]
    assert digests[0][1] != digests[1][1]


@pytest.mark.parametrize("edit", ["data", "definition", "code"])
def test_what_was_edited_after_planning_is_refused(tmp_path, edit):
    definitions, data = tmp_path / "tasks", tmp_path / "data"
    write(data, "mine", "test", [{"question": "a", "answer": "b"}])
    definitions.mkdir()
    (definitions / "mine.yaml").write_text(MINE)
    (definitions / "code.py").write_text("def target(doc):\n    return doc['answer']\n")
    one = plan_task("mine", data=data, definitions=definitions)
    assert len(load_task(one).task.eval_docs) == 1
    load_task.cache_clear()
    if edit == "data":
        write(data, "mine", "test", [{"question": "a", "answer": "c"}])
    elif edit == "definition":
        (definitions / "mine.yaml").write_text(MINE.replace("Q:", "Question:"))
    else:
        (definitions / "code.py").write_text("def target(doc):\n    return 'x'\n")
    with pytest.raises(DataError, match=r"mine.* changed after this run began; run again"):
        load_task(one)
    assert plan_task("mine", data=data, definitions=definitions).digest != one.digest


@pytest.mark.parametrize("named", ["data_files", "data_dir", "dataset_path"])
def test_local_data_that_the_definition_names_are_part_of_its_digest(tmp_path, named, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(tmp_path, "data", "test", [{"question": "a", "answer": "b"}])
    home = f"~/{path.parent.relative_to(tmp_path)}"
    kwargs = {"data_files": {"test": [str(path)]}, "data_dir": home}.get(named)
    text = MINE.replace("!function code.target", "answer")
    if kwargs is None:
        text = text.replace("dataset_path: json", f"dataset_path: {path.parent}")
    else:
        text += f"dataset_kwargs: {json.dumps({named: kwargs})}\n"
    (tmp_path / "mine.yaml").write_text(text)
    one = plan_task("mine", data=None, definitions=tmp_path)
    assert len(load_task(one).task.eval_docs) == 1
    load_task.cache_clear()
    write(tmp_path, "data", "test", [{"question": "a", "answer": "c"}])
    assert plan_task("mine", data=None, definitions=tmp_path).digest != one.digest
    with pytest.raises(DataError, match=r"mine.* changed after this run began; run again"):
        load_task(one)


MINE = """
task: mine
dataset_path: json
test_split: test
output_type: loglikelihood
doc_to_text: "Q: {{question}}"
doc_to_target: !function code.target
metric_list: [{metric: acc}]
"""


EXAMPLES = """
task: shots
dataset_path: json
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: ["yes", "no"]
doc_to_target: right
"""


@pytest.mark.parametrize(
    ("splits", "shots", "rows", "shown", "fails"),
    [
        ("test_split: test", 2, 3, True, False),  # lm-eval may draw the document itself
        ("test_split: test\nfewshot_split: test", 2, 3, False, False),
        ("test_split: test\nfewshot_split: test", 3, 3, None, True),  # one is left out
        ("validation_split: val\nfewshot_split: val", 2, 3, True, False),
        ("validation_split: val", 2, 3, False, False),
        ("test_split: test", 1000, 3, None, True),
    ],
)
def test_examples_are_enough_and_those_that_may_be_the_document_itself_are_named(
    tmp_path, splits, shots, rows, shown, fails
):
    """What lm-eval's prompts show is what the label says."""
    split = "test" if "test" in splits else "val"
    (tmp_path / "shots.yaml").write_text(f"{EXAMPLES}{splits}\n")
    write(tmp_path, "shots", split, [{"text": f"Nr {i}", "right": i % 2} for i in range(rows)])
    ask = partial(plan_task, "shots", data=tmp_path, definitions=tmp_path, num_fewshot=shots)
    if fails:
        with pytest.raises(DataError, match=f"shots: num_fewshot {shots}: there are 3 documents"):
            load_task(ask())
        return
    spec = ask()
    assert ("examples may be the document itself" in spec.label) is shown
    task = load_task(spec).task
    task.set_fewshot_seed(seed=1)
    own = 0
    for _ in range(5):
        for doc in task.eval_docs:
            own += task.fewshot_context(doc, num_fewshot=shots).count(doc["text"]) > 1
    assert (own > 0) is shown


@pytest.mark.parametrize(
    ("stated", "tokens"),
    [("{max_new_tokens: 8}", 8), ("{max_gen_toks: 4, max_new_tokens: 8}", 4), ("{}", 256)],
)
def test_limits_of_answers_are_read_as_by_hflm(tmp_path, stated, tokens):
    kind = EXAMPLES.replace("multiple_choice", "generate_until")
    (tmp_path / "shots.yaml").write_text(f"{kind}test_split: test\ngeneration_kwargs: {stated}\n")
    write(tmp_path, "shots", "test", [{"text": "a", "right": 0}])
    ask = partial(plan_task, "shots", data=tmp_path, definitions=tmp_path)
    assert ask().max_gen_toks == tokens
    (tmp_path / "shots.yaml").write_text(
        f"{kind}test_split: test\ngeneration_kwargs: {{max_new_tokens: many}}\n"
    )
    with pytest.raises(
        DataError, match="max_new_tokens: must be a whole number of tokens, not 'many'"
    ):
        ask()


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text('{"text": "a\u2028b"}\n\n{"text": "c"}\n', encoding="utf-8")
    rows, _ = read_rows(path)
    assert [(row.line, row.fields["text"]) for row in rows] == [(1, "a\u2028b"), (3, "c")]


def test_what_a_tasks_code_lacks_is_named(tmp_path):
    (tmp_path / "code.py").write_text(
        "import no_such_package_at_all.part\n\ndef target(doc):\n    return ''\n"
    )
    (tmp_path / "mine.yaml").write_text(MINE)
    write(tmp_path, "mine", "test", [{"question": "a", "answer": "b"}])
    with pytest.raises(DataError, match="imports no_such_package_at_all, which is not installed: "
                       "try pip install no_such_package_at_all, or leave"):  # fmt: skip
        load_task(plan_task("mine", data=tmp_path, definitions=tmp_path))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("loglikelihood", "mine", "mine.yaml: ValueError: Got invalid o.*; correct its data or "),
        ("acc}", "mine_own}", "metric_list: mine_own: lm-eval .* own function state its agg"),
        ("acc}", "acuracy, aggregation: mean}", "mine.yaml: metric_list: acuracy: lm-eval does no"),
        ("acc}", "acc, aggregation: meen}", "metric_list: acc: lm-eval does not know .* aggregati"),
    ],
)
def test_a_definition_that_lm_eval_cannot_use_is_named(tmp_path, old, new, words):
    (tmp_path / "code.py").write_text("def target(doc):\n    return doc['answer']\n")
    (tmp_path / "mine.yaml").write_text(MINE.replace(old, new))
    write(tmp_path, "mine", "test", [{"question": "a", "answer": "b"}])
    task = plan_task("mine", data=tmp_path, definitions=tmp_path)
    with pytest.raises(DataError, match=words):
        load_task(task)
    if "correct its data or " in words:  # the hub's cannot be corrected
        with pytest.raises(DataError, match="; correct its definition, or leave the task out"):
            load_task(replace(task, files=()))


def test_documents_from_elsewhere_have_the_digest_of_the_same_documents(tmp_path):
    """As from the hub: there the other splits are present, and the data come by another way."""
    write(tmp_path / "one", "copa", "validation", COPA)
    write(tmp_path / "two", "copa", "validation", COPA)
    write(tmp_path / "two", "copa", "train", COPA * 2)
    one, two = (
        load_task(plan_task("copa", data=tmp_path / name, definitions=None))
        for name in ("one", "two")
    )
    splits = {"train": COPA * 2, "validation": COPA}
    data = DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()})
    hub = TaskFactory().build(
        TaskIndex.entry_from_path(definition_file("copa", None)),
        overrides={"custom_dataset": lambda **_: data},
        registry={},
    )
    assert one.digest == two.digest == evaluate._digest(hub)


# Passkey retrieval, an lm-eval task that comes with the package.


def task_of(length):
    return plan_task(f"passkey_{length}", data=None, definitions=None)


@pytest.mark.parametrize("length", [256, 890])
def test_prompts_have_their_tokens_and_hide_their_key_at_its_depth(length):
    checkpoint = find(str(DEMO / "softpick"))
    tokenizer = load_tokenizer(checkpoint)
    task = load_task(task_of(length), checkpoint.folder).task
    places = []
    for document in list(task.eval_docs)[:8]:
        text, key = task.doc_to_text(document), document["key"]
        assert len(tokenizer.encode(text, add_special_tokens=False)) == length
        line = f"\nThe pass key is {key}. Remember it. {key} is the pass key.\n"
        assert text.count(line) == 1
        assert text.startswith("There is an important info hidden")
        assert text.endswith("\nWhat is the pass key? The pass key is")
        places.append(text.index(line) / len(text))
    depths = [0, 1 / 2, 1 / 4, 3 / 4, 1 / 8, 5 / 8, 3 / 8, 7 / 8]
    assert sorted(range(8), key=places.__getitem__) == sorted(range(8), key=depths.__getitem__)
    assert len({document["key"] for document in task.eval_docs}) > 190


@pytest.mark.parametrize(
    ("answer", "exact", "digits"),
    [(" 12345", 1, 1), ("12346", 0, 0.8), ("1234", 0, 0.8), (" 54321", 0, 0.2), ("", 0, 0)],
)
def test_answers_must_begin_with_the_key(answer, exact, digits):
    found = process_results({"key": "12345"}, [answer])
    assert found == {"exact_match": exact, "acc_digits": pytest.approx(digits)}


def test_prompts_need_a_tokenizer():
    with pytest.raises(DataError, match=r"passkey_256: .* needs a tokenizer"):
        load_task(task_of(256))


def test_prompts_longer_than_a_models_positions_are_refused_when_planned(tmp_path):
    gpt2 = str(write_tiny(tmp_path / "gpt2", "gpt2", n_positions=600, max_position_embeddings=600))
    for name, fits in (("passkey_512", True), ("passkey_890", False)):
        path = small_recipe(tmp_path, tasks=[name], checkpoints={"base": gpt2}, data=None)
        recipe = Recipe.load(path, Overrides())
        if fits:
            assert [task.name for task in plan(recipe, device="cpu").tasks] == [name]
        else:
            with pytest.raises(RecipeError, match=r"passkey_890: .* take 899 tokens, .* has 600"):
                plan(recipe, device="cpu")
