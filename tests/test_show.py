"""`qbench show`: one cell."""

import re
from pathlib import Path

import pytest
import yaml
from synthetic import make_store

from qbench.cli.app import app
from qbench.cli.show import cell_text
from qbench.comparison.rows import find_cell
from qbench.errors import ResultsError

REAL = Path(__file__).parents[1] / "results" / "pair-27m"
CELL = f"{REAL}/softpick/gptq-3bit"


def show(capsys, *arguments):
    assert not app(["show", *map(str, arguments)], standalone_mode=False)
    return capsys.readouterr().out


def test_a_cell_is_shown_with_its_key_and_environment():
    _, record = find_cell(CELL)
    text = cell_text(record)
    titles = {"audit", "scores", "stages", "damage", "environment", "key_parts"}
    assert {*re.findall(r"^(\w+):$", text, re.MULTILINE)} >= titles
    last = yaml.safe_load("environment:" + text.partition("\nenvironment:")[2])
    assert last["key_parts"] == record.key_parts
    assert all(f"{stage.name} " in text for stage in record.stages)
    assert re.search(r"lambada_openai +acc +0\.\d+ +0\.004\d+ .*5153", text)
    assert all(version in text for version in record.environment.versions.values())


def test_a_cell_of_the_folder_that_one_is_in_is_named_without_it(capsys, monkeypatch):
    whole = show(capsys, CELL)
    monkeypatch.chdir(REAL)
    assert show(capsys, "softpick/gptq-3bit") == whole


def test_what_is_not_there_is_said():
    with pytest.raises(ResultsError, match="results: write DIR/CHECKPOINT/QUANTIZER"):
        app(["show", "results"], standalone_mode=False)


def test_a_task_that_could_not_be_scored_is_shown_with_why(tmp_path):
    store = make_store(tmp_path / "grid", sizes={"arc_easy": 9}, quantizers=("bf16",))
    record = store.get(store.manifest().cells[0])
    failed = record.model_copy(update={"failed_tasks": {"wikitext": "it gives NaN"}})
    store.put(failed, store.outcomes(record))
    assert "failed_tasks:\n  wikitext: it gives NaN\n" in cell_text(store.get(record))
