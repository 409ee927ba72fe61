"""A changed byte in a results folder is never another number, and never a traceback."""

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pytest
from synthetic import make_store

from qbench import records
from qbench import store as store_module
from qbench.errors import DamagedError, NewerSchemaError
from qbench.files import temporary
from qbench.gate import baseline
from qbench.records import RESPONSE_COLUMNS, write_record
from qbench.store import Store

KINDS = {
    "record": "grid/records/softpick/gptq-4bit/*.json",
    "outcomes": "grid/records/softpick/gptq-4bit/*.outcomes.parquet",
    "responses": "grid/records/softpick/gptq-4bit/*.responses.parquet",
    "grid": "grid/grid.json",
    "baseline": "base.parquet",
}
RESPONSES = pd.DataFrame(
    [("arc_easy", n, 0, -1.5 - n, n % 2 == 0, None, None, 0) for n in range(40)],
    columns=list(RESPONSE_COLUMNS),
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A results folder as ``run`` leaves it, with a baseline of it."""
    folder = tmp_path_factory.mktemp("results")
    sizes = {"arc_easy": 40, "wikitext": 12}
    store = make_store(folder / "grid", quantizers=("bf16", "gptq-4bit"), sizes=sizes)
    for record in store.records():
        store.put(record, store.outcomes(record), RESPONSES)
    baseline.make(store, folder / "base.parquet")
    return folder


@pytest.fixture
def results(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def the_file(results: Path, kind: str) -> Path:
    (path,) = results.glob(KINDS[kind])
    return path


COMMANDS = {
    "tables": ["tables", "{grid}"],
    "check": ["check", "{grid}", "--baseline", "{baseline}"],
    "explain": ["explain", "{grid}/softpick/gptq-4bit", "{good}/softmax/bf16"],
    "export": ["export", "{grid}", "--to", "lm-eval", "--out", "{out}"],
}
READ_BY = {
    "record": ["tables", "explain"], "outcomes": ["tables", "check"], "grid": ["tables", "check"],
    "responses": ["export"], "baseline": ["check"],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "reader"), [(k, c) for k, cs in READ_BY.items() for c in cs])
def test_a_command_that_reads_a_damaged_file_says_so_in_one_line(
    results, whole, command, capsys, kind, reader, tmp_path
):
    path = the_file(results, kind)
    damaged = bytearray(path.read_bytes())
    index = len(damaged) // 2
    if path.suffix == ".json":  # a digit of a score is another, or a name
        index = damaged.index(b'"value":0.' if kind == "record" else b'"key"') + 10
    damaged[index] ^= 1
    path.write_bytes(damaged)
    paths = {"grid": results / "grid", "good": whole / "grid", "out": tmp_path / "exported",
             "baseline": results / "base.parquet"}  # fmt: skip
    assert command(*(part.format(**paths) for part in COMMANDS[reader])) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert path.name in line
    assert "damaged" in line
    assert said.out == ""


@pytest.mark.parametrize("kind", ["record", "outcomes", "responses"])
def test_a_run_takes_a_damaged_cell_as_one_to_make_and_the_others_as_they_are(results, kind):
    path, store = the_file(results, kind), Store(results / "grid")
    path.write_bytes(path.read_bytes()[:-20])
    said: list[str] = []
    found = {cell.cell: store.get_valid(cell, said.append) for cell in store.manifest().cells}
    assert [cell for cell, record in found.items() if record is None] == ["softpick/gptq-4bit"]
    (line,) = said
    assert line.startswith("softpick/gptq-4bit: made again: ")
    assert path.name in line


def rewrite(path: Path, **changes: object) -> None:
    """Change a record or grid and give it the right checksum, as another program could."""
    values = json.loads(path.read_bytes())
    del values["checksum"]
    write_record(path, {**values, **changes})


def test_a_record_of_a_newer_qbench_is_neither_read_nor_replaced(results):
    path, store = the_file(results, "record"), Store(results / "grid")
    rewrite(path, schema_version=3)
    for act in (store.records, lambda: [store.get_valid(cell) for cell in store.manifest().cells]):
        with pytest.raises(NewerSchemaError, match=r"schema 3, this one reads 2\): update qbench"):
            act()


def test_a_record_of_an_older_qbench_is_made_again(results):
    path, store = the_file(results, "record"), Store(results / "grid")
    rewrite(path, schema_version=1)
    with pytest.raises(DamagedError, match=r"schema 1, this one reads 2\): run the recipe again"):
        store.records()
    assert store.get_valid(store.manifest().cells[-1]) is None


def test_a_grid_of_a_newer_qbench_is_not_replaced_and_a_damaged_one_is(results):
    path, store = the_file(results, "grid"), Store(results / "grid")
    grid = store.manifest()
    rewrite(path, schema_version=9)
    with pytest.raises(NewerSchemaError):
        store.put_manifest(grid)
    path.write_bytes(b"{")
    with pytest.raises(DamagedError):
        store.manifest()
    store.put_manifest(grid)
    assert store.manifest() == grid


OUTSIDE = [
    ("checkpoint", "../../elsewhere"), ("checkpoint", "/etc"), ("checkpoint", "a\x00b"),
    ("checkpoint", "a\n\\input{x}"), ("checkpoint", ""), ("quantizer", ".."), ("quantizer", "a/b"),
    ("key", "../../../secret"), ("key", "ABC"), ("key", 3), ("title", "GPTQ\nx"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), OUTSIDE)
def test_names_of_a_foreign_grid_lead_nowhere_else(results, field, value):
    path = the_file(results, "grid")
    cells = json.loads(path.read_bytes())["cells"]
    cells[0][field] = value
    rewrite(path, cells=cells)
    with pytest.raises(DamagedError, match=rf"grid\.json: damaged: cells\.0\.{field}"):
        Store(results / "grid").manifest()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cells": []}, "cells: "), ({"checkpoints": []}, "checkpoints: "),
        ({"quantizers": []}, "quantizers: "), ({"tasks": []}, "tasks: "),
        ({"tasks": ["../x"]}, r"tasks\.0: "), ({"tasks": ["a\nb"]}, r"tasks\.0: "),
        ({"checkpoints": ["other"]}, "cell softmax/bf16: the grid lacks"),
        ({"name": "a\nb"}, "name: "),
    ],
)  # fmt: skip
def test_a_foreign_grid_that_is_of_nothing_is_refused(results, changes, words):
    rewrite(the_file(results, "grid"), **changes)
    with pytest.raises(DamagedError, match=rf"grid\.json: damaged: {words}"):
        Store(results / "grid").manifest()


@pytest.mark.parametrize("last", range(4))
def test_a_run_killed_at_any_write_of_a_forced_cell_leaves_the_old_or_the_new_one(
    results, monkeypatch, last
):
    """Two tables, then the record."""
    store, written = Store(results / "grid"), []
    record, cell = store.records()[-1], store.manifest().cells[-1]
    old, write = store.outcomes(record), store_module.write_atomically

    def counted(path, payload):
        if len(written) == last:
            half = temporary(path)
            gone = half.name.replace(f".{os.getpid()}.", ".4194305.")  # more than Linux has
            half.with_name(gone).write_bytes(payload[:10])
            raise KeyboardInterrupt
        written.append(path)
        write(path, payload)

    for module in (store_module, records):
        monkeypatch.setattr(module, "write_atomically", counted)
    with suppress(KeyboardInterrupt):
        store.put(record, old.assign(value=old["value"] + 1.0), RESPONSES)
    monkeypatch.undo()
    assert len(written) == last
    found = store.outcomes(store.get_valid(cell))
    shift = 1.0 if last == 3 else 0.0
    pd.testing.assert_frame_equal(found, old.assign(value=old["value"] + shift))
    store.put(store.get(cell), old, RESPONSES)
    left = store.path(store.get(cell)).parent.glob("*.parquet")
    assert sorted(path.suffixes[-2] for path in left) == [".outcomes", ".responses"]
    store.put_manifest(store.manifest())
    assert not list(results.rglob(".*.tmp")), "its temporary file was left"
