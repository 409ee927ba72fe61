"""A reason that several share is said once."""

from __future__ import annotations

import io

from synthetic import make_store

from qbench.comparison.compare import compare
from qbench.runner.progress import Display
from qbench.tables.scores import parts
from qbench.tables.write import render
from qbench.text import together


def test_lines_of_one_reason_become_one():
    lines = ["a/x: failed: no room", "b/x: missing", "c/x: failed: no room", "d/x"]
    assert together(lines) == ["a/x, c/x: failed: no room", "b/x: missing", "d/x"]


def test_many_names_are_counted():
    (line,) = together(f"c{number}: no" for number in range(32))
    assert line == "c0, c1, c2, c3, c4, c5, c6, c7 and 24 more: no"


def test_progress_says_a_failure_once():
    stream = io.StringIO()
    with Display(stream, 3) as display:
        for cell in ("a/x", "b/x", "c/x"):
            display.log(f"{cell}: FAILED: no room", "bold red")
    assert stream.getvalue().splitlines() == [
        "a/x: FAILED: no room", "b/x: FAILED, as a/x", "c/x: FAILED, as a/x"
    ]  # fmt: skip


def test_the_file_with_the_traceback_makes_no_other_reason():
    lines = [
        f"{cell}: failed: E: no (the traceback is in {cell[0]}.log)" for cell in ("a/x", "b/x")
    ]
    assert together(lines) == ["a/x, b/x: failed: E: no (the traceback is in a.log)"]
    stream = io.StringIO()
    with Display(stream, 2) as display:
        for line in lines:
            display.log(line.replace("failed", "FAILED"), "bold red")
    assert stream.getvalue().splitlines()[1] == "b/x: FAILED, as a/x"


def test_a_document_of_tables_says_it_once(tmp_path):
    cells = [f"{c}/{q}" for c in ("softmax", "softpick") for q in ("bf16", "gptq-4bit", "hqq-4bit")]
    quantizers = ("bf16", "gptq-4bit", "hqq-4bit")
    store = make_store(tmp_path, quantizers=quantizers, sizes={"sciq": 20}, failed=cells)
    notes = [[n for n in part.problems if "out of memory" in n] for part in parts(compare(store))]
    reason = "failed: out of memory | while quantizing layer 3"
    assert notes == [
        [f"softmax/bf16, softmax/gptq-4bit, softpick/bf16, softpick/gptq-4bit: {reason}"],
        [f"softmax/hqq-4bit, softpick/hqq-4bit: {reason}"],
    ]


def test_of_many_checkpoints_the_tables_say_it_once_too(tmp_path):
    """A table for each pair: 32 checkpoints gave 96 KB of the same words."""
    names = tuple(f"model{number}" for number in range(32))
    quantizers = ("bf16", "gptq-4bit", "hqq-4bit")
    cells = [f"{name}/{quantizer}" for name in names for quantizer in quantizers]
    store = make_store(
        tmp_path, checkpoints=names, quantizers=quantizers, sizes={"sciq": 20}, failed=cells
    )
    text = render(compare(store))
    assert text.count("out of memory") == 2  # of the unquantized and GPTQ, and of HQQ
    assert text.count("and 56 more") == 1
    assert len(text.encode()) < 32_000
