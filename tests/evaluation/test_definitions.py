"""lm-eval's definitions are found, opened and read as lm-eval reads them."""

import random

import pytest
from lm_eval.tasks._yaml_loader import load_yaml

from qbench.errors import RecipeError
from qbench.evaluation.tasks import Function, definition_file, expand, read_definition, task_names


def test_own_task_definitions_are_found_first(tmp_path):
    (tmp_path / "mine.yaml").write_text("task: sciq\ndataset_path: json\n")
    assert definition_file("sciq", tmp_path) == tmp_path / "mine.yaml"


def test_an_unknown_task_says_where_definitions_of_ones_own_are_named():
    with pytest.raises(RecipeError, match=r"no task 'mine'.* or --definitions DIR$"):
        expand("mine", None)


@pytest.mark.parametrize(
    ("name", "members"),
    [pytest.param("mmlu", 57, marks=pytest.mark.slow), ("mmlu_stem_tasks", 19)],
)
def test_groups_and_tags_are_opened(name, members):
    assert len(set(expand(name, None)[0])) == members


def test_definitions_read_as_lm_eval_reads_them():
    """Includes, local keys before included ones, and functions as they are written."""

    def plain(value):
        if isinstance(value, Function):
            return str(value.folder / value.name)
        if isinstance(value, dict | list):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            read = {key: plain(inner) for key, inner in pairs}
            return read if isinstance(value, dict) else list(read.values())
        return value

    names = random.Random(0).sample(task_names(), 30)
    for name in ["arc_easy", "wikitext", "coqa", *names]:
        path = definition_file(name, None)
        assert plain(read_definition(path)) == load_yaml(path, resolve_func=False), name


def test_an_include_that_comes_back_to_itself_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("task: a\ninclude: b.yaml\n")
    (tmp_path / "b.yaml").write_text("include: a.yaml\n")
    with pytest.raises(RecipeError, match="includes itself"):
        read_definition(tmp_path / "a.yaml")


def test_definitions_that_are_added_or_edited_while_a_process_runs_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("qbench.evaluation.tasks.INSTALLED", ())  # thousands
    with pytest.raises(RecipeError, match="no task 'mine'"):
        expand("mine", tmp_path)
    (tmp_path / "mine.yaml").write_text("task: mine\ntag: ours\n")
    assert expand("mine", tmp_path) == (["mine"], [])
    assert expand("ours", tmp_path) == (["mine"], [])
    (tmp_path / "mine.yaml").write_text("task: renamed\ntag: ours\n")
    assert expand("ours", tmp_path) == (["renamed"], [])
