"""Odd and hostile input to every command: exit code 2, one line on standard error, no traceback."""

import re
import time

import pytest
from small_recipe import DEMO, small_recipe
from synthetic import make_store

from qbench.gate import baseline

LONG = "x" * 300
CHECK = ("check", "grid", "--baseline", "base.parquet")
RUN = ("run", "good.yaml", "--device", "cpu")
# what no output can be written to, and what the line says of it
NOT_A_FILE = {"folder": "not a file", "": "an empty path", "/proc/qbench.json": "cannot be written"}
NOT_A_FOLDER = {"file": "is a file", "": "an empty path", "file/x": "cannot be written to"}
NOT_RESULTS = {
    "folder": "no grid.json here", "nowhere": "no grid.json here", LONG: "name too long",
    "list-grid": "not a JSON object",
    "text-grid": "not whole JSON", "deep-grid": "not whole JSON", "open-grid": "no checksum",
    "old-grid": "written by an older qbench .schema 1, this one reads 2.: run the recipe again",
    "new-grid": "written by a newer qbench .schema 99, this one reads 2.: update qbench",
}  # fmt: skip
NOT_A_RECIPE = {"a\nb": "no such recipe", "file": "not a mapping; write the keys"}
ODD: list[tuple[tuple[str, ...], str]] = [
    *(((*CHECK, "--junit", path), words) for path, words in NOT_A_FILE.items()),
    *(((*command, "folder"), "not a file") for command in (
        (*CHECK, "--summary"), ("baseline", "grid", "--out"),
        ("bench", "evaluation", "good.yaml", "--out"), (*RUN, "--save-recipe"),
    )),
    *((("view", "grid", "--export", path), words) for path, words in NOT_A_FOLDER.items()),
    *(((*command, "--out", "file"), "is a file") for command in (RUN,)),
    *((("tables", path), words) for path, words in NOT_RESULTS.items()),
    *(((*command, "new-grid", *rest), "newer qbench") for command, rest in (
        (("tables",), ()), (("check",), CHECK[2:]), (("baseline",), ("--out", "new.parquet")),
    )),
    (("explain", "grid/softmax/bf16", "file"), "not a record"),
    (("export", "grid/softmax/bf16", "--model", "grid"), "exists already; name a new folder"),
    *((("run", path, "--device", "cpu"), words) for path, words in NOT_A_RECIPE.items()),
    *((("check", "grid", "--baseline", path), ".") for path in
      ("folder", "file", "nowhere", "cut.parquet", "grid/grid.json")),
    *(((*RUN, *more), words) for more, words in (
        (("--checkpoint", "softpick"), "^--checkpoint: write NAME=PATH_OR_HUB_ID .it is 'softp"),
        (("--tasks", ","), "^--tasks: write names with commas between them .it is ','.$"),
        (("--quantized", "a=b", "--quantized", "a=c"), "^--quantized: a is given twice; leave one"),
        (("--checkpoint", "softpick=a\0b"), "."),
        (("--checkpoint", "other=x"), "has no other"),
        (("--data", "nowhere"), "no such folder"),
        (("--limit", "9" * 30), "less than or equal"), (("--only", "["), "matches no cell"),
        (("--only", "*/fp32,softmax/none"), "'softmax/none' matches no cell"),
    )),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    store = make_store(folder / "grid", quantizers=("bf16", "gptq-4bit"), sizes={"arc_easy": 40})
    baseline.make(store, folder / "base.parquet")
    (folder / "cut.parquet").write_bytes((folder / "base.parquet").read_bytes()[:-30])
    alone = {"softpick": str(DEMO / "softpick")}
    small_recipe(folder, checkpoints=alone, tasks=["demo_lastword"]).rename(folder / "good.yaml")
    (folder / "file").write_text("content")
    (folder / "folder").mkdir()
    for name, content in {
        "list": "[]", "text": "{", "old": '{"schema_version": 1}', "new": '{"schema_version": 99}',
        "deep": "[" * 100_000,
        "open": '{"schema_version": 2, "cells": []}',
    }.items():  # fmt: skip
        (folder / f"{name}-grid").mkdir()
        (folder / f"{name}-grid" / "grid.json").write_text(content)
    return folder


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("arguments", "words"), ODD, ids=lambda value: ascii(value)[:60])
def test_odd_input_is_one_line_and_code_2(whole, command, monkeypatch, capfd, arguments, words):
    monkeypatch.chdir(whole)
    before = sorted(whole.rglob("*"))
    begun = time.monotonic()
    code = command(*arguments)
    assert time.monotonic() - begun < 30
    said = capfd.readouterr()
    assert code == 2, said
    assert len(said.err.splitlines()) == 1, said.err
    (line,) = said.err.splitlines()
    assert re.search(words, line), line
    written = {path.relative_to(whole) for path in set(whole.rglob("*")) - set(before)}
    assert written == set()
