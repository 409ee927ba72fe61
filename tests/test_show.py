"""`qbench show`: a folder with its runs and cells, or one cell."""

import re
from pathlib import Path

import pytest
from synthetic import make_store

from qbench.cli.app import app
from qbench.cli.show import cell_text
from qbench.comparison.rows import find_cell, flat
from qbench.errors import ResultsError

REAL = Path(__file__).parents[1] / "results" / "pair-27m"
CELL = f"{REAL}/softpick/gptq-3bit"


def show(capsys, *arguments):
    assert not app(["show", *map(str, arguments)], standalone_mode=False)
    return capsys.readouterr().out


def test_a_cell_is_shown_with_its_key_and_environment():
    _, record = find_cell(CELL)
    text = cell_text(record, {})
    titles = ["Scores", "Damage", "mean", "Stages", "Audit", "Environment", "Key"]  # mean KL by …
    assert re.findall(r"^(\w+)", text, re.MULTILINE) == titles
    for name, value in flat(record.key_parts):
        line = rf"^  {re.escape(name)} +{re.escape(value[:40])}"
        assert re.search(line, text, re.MULTILINE), name
    assert all(f"{stage.name} " in text for stage in record.stages)
    assert re.search(r"lambada_openai +Acc +\d+\.\d\d +0\.4\d +5153", text)
    assert all(version in text for version in record.environment.versions.values())


def test_a_cell_of_the_folder_that_one_is_in_is_named_without_it(capsys, monkeypatch):
    whole = show(capsys, CELL)
    monkeypatch.chdir(REAL)
    assert show(capsys, "softpick/gptq-3bit") == whole


def test_what_a_cell_took_is_one_word_and_one_number_in_the_list_and_on_its_own_page(capsys):
    (own,) = re.findall(r"^  took +(\S+ s)$", show(capsys, CELL), re.MULTILINE)
    text = show(capsys, REAL)
    assert re.search(r"^  cell +status +precision +key +took$", text, re.MULTILINE)
    (listed,) = re.findall(r"^  softpick/gptq-3bit +ok .* (\S+ s)$", text, re.MULTILINE)
    assert listed == own


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["results"], "results: no grid.json here; name a folder that `qbench run` wrote, DIR/CH"),
    ],
)
def test_what_is_not_there_is_said(arguments, words):
    with pytest.raises(ResultsError, match=words):
        app(["show", *arguments], standalone_mode=False)


def test_a_folder_shows_its_runs_and_cells_with_what_is_missing_or_failed(tmp_path, capsys):
    folder = tmp_path / "grid"
    about = {"sizes": {"arc_easy": 9}, "quantizers": ("bf16", "hqq-2bit")}
    make_store(folder, **about)
    make_store(folder, failed=("softmax/hqq-2bit",), missing=("softpick/hqq-2bit",), **about)
    make_store(folder, **{**about, "quantizers": ("bf16",)})
    text = show(capsys, folder)
    runs = re.findall(r"^  (\*?) +([0-9a-f]{8}) ", text, re.MULTILINE)
    assert len(runs) == 2
    (last,) = [name for mark, name in runs if mark]
    (other,) = [name for mark, name in runs if not mark]
    assert text.count("softmax/") == 1
    earlier = show(capsys, folder, "--run", other)
    assert re.search(r"softmax/hqq-2bit +failed .* out of memory", earlier)
    assert last in earlier


def test_a_task_that_could_not_be_scored_is_shown_with_why(tmp_path, capsys):
    store = make_store(tmp_path / "grid", sizes={"arc_easy": 9}, quantizers=("bf16",))
    record = store.get(store.manifest().cells[0])
    failed = record.model_copy(update={"failed_tasks": {"wikitext": "it gives NaN"}})
    store.put(failed, store.outcomes(record))
    assert re.search(r"softmax/bf16 +ok .* wikitext failed$", show(capsys, store.directory), re.M)
    assert re.search(r"^  wikitext  it gives NaN$", cell_text(store.get(record), {}), re.M)
