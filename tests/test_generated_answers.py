"""What a model writes is kept beside its scores, shown and exported."""

import json

import pytest
from small_recipe import DEMO, blocks, qbench, run_small

from qbench.cli.view import document_texts
from qbench.errors import DataError
from qbench.evaluation import evaluate
from qbench.records import ANSWER_CHARACTERS
from qbench.store import Sources, Store, find_sources

# as gsm8k: two filters over one answer
SUMS = """
task: sums
dataset_path: json
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n"], do_sample: false, max_gen_toks: 12}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
filter_list:
  - {name: last-word, filter: [{function: regex, regex_pattern: "(\\\\w+)\\\\W*$"},
                               {function: take_first}]}
  - {name: as-written, filter: [{function: take_first}]}
"""
QUESTIONS = ["The cat", "In the morning the", "A red house stands by"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of a task like gsm8k and of passkey retrieval."""
    folder = tmp_path_factory.mktemp("generated")
    tasks, data = folder / "tasks", folder / "data" / "sums"
    tasks.mkdir()
    data.mkdir(parents=True)
    (tasks / "sums.yaml").write_text(SUMS)
    lines = [json.dumps({"question": one, "answer": "7"}) for one in QUESTIONS]
    (data / "test.jsonl").write_text("\n".join(lines) + "\n")
    lastword = folder / "data" / "demo_lastword"
    lastword.symlink_to(DEMO / "data" / "demo_lastword")
    (tasks / "demo_lastword.yaml").symlink_to(DEMO / "tasks" / "demo_lastword.yaml")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QBENCH_CACHE", str(folder / "cache"))
        return run_small(
            folder, checkpoints=blocks("softpick"), tasks=["sums", "passkey_256", "demo_lastword"],
            definitions=str(tasks), data=str(folder / "data"),
        ).directory  # fmt: skip


def texts(store, record, task, filter_=None):
    rows = store.responses(record)
    rows = rows[(rows["task"] == task) & rows["answer"].notna()]
    kept = rows["filter"].isna() if filter_ is None else rows["filter"] == filter_
    return rows[kept]["answer"].tolist()


def test_the_export_holds_them(ran):
    assert qbench("export", ran, "--to", "lm-eval") == 0
    store = Store(ran)
    (record,) = [one for one in store.records() if not one.quantized]
    (path,) = (ran / "export" / "lm-eval" / "softpick__fp32").glob("samples_sums_*.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["filter"], line["doc_id"]) for line in lines] == [
        ("as-written", 0), ("as-written", 1), ("as-written", 2),
        ("last-word", 0), ("last-word", 1), ("last-word", 2),
    ]  # fmt: skip
    written = texts(store, record, "sums")
    assert [line["resps"] for line in lines] == [[[one]] for one in written * 2]
    taken = texts(store, record, "sums", "last-word")
    assert [line["filtered_resps"] for line in lines] == [[one] for one in [*written, *taken]]


def test_a_long_answer_is_cut_and_says_so():
    text = "ab" * ANSWER_CHARACTERS
    sample = evaluate._Sample(5, "none", [[text, "short"]], [text], {})
    table = evaluate._responses("t", [sample])
    assert table["answer"].str.len().tolist() == [ANSWER_CHARACTERS, 5]
    assert table["cut"].tolist() == [ANSWER_CHARACTERS, 0]
    assert table["request"].tolist() == [0, 1]


def test_the_texts_that_were_asked_are_those_of_the_data_that_the_run_read(ran):
    """`qbench view` finds them by itself after a run on this machine."""
    record = Store(ran).records()[1]
    sources = find_sources(ran.parent / "cache", Store(ran).manifest())
    assert document_texts(sources, record, "sums")[1].texts == ((QUESTIONS[1],),)
    row = json.loads((DEMO / "data/demo_lastword/test.jsonl").read_text().splitlines()[1])
    context, _, last = row["text"].rpartition(" ")
    assert document_texts(sources, record, "demo_lastword")[1].texts == ((context, f" {last}"),)
    assert find_sources(ran.parent / "other", Store(ran).manifest()) == Sources()


def test_data_that_ask_something_else_are_refused(ran, tmp_path):
    other = tmp_path / "data" / "demo_lastword"
    other.mkdir(parents=True)
    lines = (DEMO / "data/demo_lastword/test.jsonl").read_text().splitlines()
    (other / "test.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    sources = Sources(tmp_path / "data", ran.parent / "tasks")
    with pytest.raises(DataError, match="differ from those of softpick/rtn-4bit"):
        document_texts(sources, Store(ran).records()[1], "demo_lastword")
