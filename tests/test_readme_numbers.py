"""Every number of README's tables of real results stands in the files that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "results"
METHODS = {"bf16": "BNB", "bnb": "BNB", "gptq": "GPTQ", "hqq": "HQQ"}
# README's row → folder, quantizer
RATIOS = {
    "activations, int8, a range for each layer from calibration": ("activations", "a8-static"),
    "the same after SmoothQuant": ("outliers", "w8a8-static-smooth"),
    "the same after Hadamard rotation": ("outliers", "w8a8-static-rotated"),
    "activations, int8, a scale a token": ("activations", "a8"),
    "activations, int4, a scale a token": ("activations", "a4"),
    "the same after Hadamard rotation, int4": ("outliers", "a4-rotated"),
    "KV cache, 4 bits, a scale a layer": ("kv", "kv4-tensor"),
    "KV cache, 4 bits, a scale a head and token": ("kv", "kv4"),
    "KV cache, 3 bits, a scale a head and token": ("kv", "kv3"),
    "KV cache, 4 bits, keys along channels (KIVI)": ("kv", "kv4-kivi"),
}
# a cell of README's table of speeds → the file, and what must stand in one of its lines
SPEEDS = {
    "9.59": ("evaluation-h200", ["all", "fast", "9.59"]),
    "8.53": ("evaluation-h200", ["all", "fast, damage measured", "8.53"]),
    "4.17": ("evaluation-h200", ["all", "exact", "4.17"]),
    "0.99": ("attention-h200", ["4, 4096, 16, 64", "qbench softpick", "0.99", "0.90"]),
    "0.91": ("attention-h200", ["4, 4096, 16, 128", "qbench softpick", "0.91", "0.85"]),
    "113 %": ("attention-h200", ["softpick, random keys", "113%"]),
    "1.41": ("attention-sigmoid-h200", ["4, 4096, 16, 64", "1.41"]),
    "1.53": ("attention-sigmoid-h200", ["4, 4096, 16, 128", "1.53"]),
    "1.10": ("training-124m-h200", ["softmax/triton", "1.096"]),
    "1.09": ("training-124m-h200", ["softpick/triton", "1.092"]),
    "1.11": ("training-27m-h200", ["softpick/triton", "1.110"]),
    "0.74": ("products-h200", ["65536", "int8 a token", "0.74"]),
    "0.89": ("products-h200", ["65536", "fp8 a token", "0.89"]),
}


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def part(begin: str, end: str) -> str:
    start = README.index(begin)
    return README[start : README.index(end, start)]


def tables(folder: str) -> dict[tuple[str, ...], list[str]]:
    """By what the table is of, task, metric and quantizer."""
    found = {}
    text = (RESULTS / f"pair-27m{folder}" / "tables.md").read_text()
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title, task = section.splitlines()[0], ""
        kind = "damage" if "damage" in title else "delta"
        if kind == "damage" and "softpick’s − softmax’s" not in section.splitlines()[2]:
            continue
        for row in rows(section)[2:]:
            task = row[0] or task
            found.setdefault((kind, task, row[1], row[2].partition(" (")[0]), row)
    return found


def test_scores_of_the_pair_are_those_of_its_tables():
    known, task, seen = tables(""), "", 0
    for row in rows(part("| Task | Metric | Quantization | softmax", "\n‡ differs"))[2:]:
        task = row[0] or task
        delta = known["delta", task, row[1], row[2]]
        assert [*delta[3:5], delta[5].removesuffix("≈"), delta[-1]] == [*row[3:6], row[7]]
        if row[2] != "bf16":
            assert known["damage", task, row[1], row[2]][7] == row[6]
        seen += 1
    assert seen == 27


def test_significant_differences_are_counted_right():
    marked = {
        key: row[7] for key, row in tables("").items() if key[0] == "damage" and "‡" in row[7]
    }
    worse = [
        key
        for key, text in marked.items()
        if (float(text[1:].strip(" ‡")) > 1 if text.startswith("×") else text.startswith("−"))
    ]
    assert (len(marked), len(worse)) == (11, 9)
    assert "is significant after Holm's correction in 11, and in nine of" in README


def test_ratios_of_activations_and_the_kv_cache_are_those_of_their_tables():
    seen = []
    for row in rows(part("| | softmax | softpick | softpick's / softmax's |", "**In the KV"))[2:]:
        label = row[0] if row[0] not in seen else f"{row[0]}, int4"
        seen.append(label)
        folder, quantizer = RATIOS[label]
        key = "damage", "wikitext [test_document_level]", "Word Perplexity ↓", quantizer
        found = tables(f"-{folder}")[key]
        told = re.findall(r"[\d.]+", " ".join((found[3], found[5], found[7], found[8])))
        shown = re.findall(r"[\d.]+", " ".join(row[1:]))
        assert len(told) == len(shown) == 5
        for exact, rounded in zip(told, shown, strict=True):
            half = 0.5 * 10.0 ** -len(rounded.partition(".")[2])
            assert abs(float(exact) - float(rounded)) <= half + 1e-9, (label, exact, rounded)
    assert seen == list(RATIOS)


def test_table_4_is_that_of_the_analysis():
    text = (RESULTS / "pair-27m" / "analysis" / "tables.md").read_text()
    section = text[text.index("## Beside the damage") :].split("\n## ", 2)[0]
    known = {row[0].partition("/")[0]: row for row in rows(section)[2:]}
    head = rows(section)[0]
    names = ["Sink rate %, ε 0.2", "Sink rate %, ε 0.3", "Kurtosis", "Min", "Max", "Sparsity %",
             "KL bnb-4bit", "KL gptq-3bit", "KL hqq-3bit"]  # fmt: skip
    for row in rows(part("| | sink rate %, ε 0.2", "![Hidden"))[2:]:
        assert row[1:] == [known[row[0]][head.index(name)] for name in names]


@pytest.mark.parametrize("number", SPEEDS)
def test_speeds_are_those_of_the_bench(number):
    name, words = SPEEDS[number]
    assert number in part("| what | against | H200 |", "\n\\* values")
    lines = (RESULTS / "bench" / f"{name}.md").read_text().splitlines()
    assert any(all(word in line for word in words) for line in lines)


def test_short_steps_are_those_of_the_profile():
    shown = re.search(
        r"softmax is at (\S+) × cuDNN, softpick at\s(\S+) × and\ssigmoid at (\S+) ×", README
    )
    lines = (RESULTS / "bench" / "attention-h200-profile.md").read_text()
    (row,) = (row for row in rows(lines) if row[:2] == ["idle", "Triton (in use)"])
    *ours, theirs = map(float, row[2:])
    assert shown
    assert list(shown.groups()) == [f"{theirs / one:.2f}" for one in ours]
