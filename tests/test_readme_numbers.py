"""Every number of README's tables of real results stands in the files that it names."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from qbench.store import Store

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
# README's row of the pair with sinks → the same
SINKS = {
    "weights, HQQ 2-bit": ("", "hqq-2bit"),
    "weights, GPTQ 4-bit": ("", "gptq-4bit"),
    "activations, int8, one scale for all tokens": ("-activations", "a8-tensor"),
    "activations, int8, a range for each layer from calibration": ("-activations", "a8-static"),
    "activations, int4, a scale a token": ("-activations", "a4"),
    "KV cache, 2 bits, a scale a head and token": ("-kv", "kv2"),
    "KV cache, 3 bits, a scale a head and token": ("-kv", "kv3"),
    "the same, the first four tokens unquantized": ("-kv", "kv3-first4"),
}
TASKS = {
    "WikiText": ("wikitext [test_document_level]", "Word Perplexity ↓"),
    "LAMBADA": ("lambada_openai", "Perplexity ↓"),
}
COUNTED = {  # folder → differences, in softpick's favour and against it after Holm's correction
    "sinks-27m": (72, 11, 4),
    "sinks-27m-kv": (81, 8, 1),
    "sinks-27m-activations": (126, 14, 18),
    "pair-27m": (72, 2, 9),
    "pair-27m-kv": (81, 12, 1),
    "pair-27m-activations": (126, 3, 16),
}
NEARER = {  # folder → cells in which softpick's KL divergence is the smaller one, all cells
    "sinks-27m": (7, 8),
    "sinks-27m-kv": (5, 9),
    "sinks-27m-activations": (13, 14),
    "pair-27m": (0, 8),
    "pair-27m-kv": (6, 9),
    "pair-27m-activations": (3, 14),
}
# a cell of README's table of speeds → the file, and what must stand in one of its lines
SPEEDS = {
    "9.59": ("evaluation-h200", ["all", "fast", "9.59"]),
    "8.53": ("evaluation-h200", ["all", "fast, damage measured", "8.53"]),
    "4.17": ("evaluation-h200", ["all", "exact", "4.17"]),
    "0.99": ("attention-h200", ["4, 4096, 16, 64 ", "qbench softpick ", "0.99", "0.91"]),
    "0.90": ("attention-h200", ["4, 4096, 16, 128", "qbench softpick ", "469", "0.90"]),
    "114 %": ("attention-h200", ["softpick, random keys", "114%"]),
    "1.47": ("attention-h200", ["4, 4096, 16, 64 ", "1.47"]),
    "1.74": ("attention-h200", ["4, 4096, 16, 128", "1.74"]),
    "1.10": ("training-124m-h200", ["softmax/triton", "1.096"]),
    "1.09": ("training-124m-h200", ["softpick/triton", "1.092"]),
    "1.11": ("training-27m-h200", ["softpick/triton", "1.110"]),
    "1.12": ("training-340m-h200", ["softpick/triton", "1.119"]),
    "0.74": ("products-h200", ["65536", "int8 a token", "0.74"]),
    "0.89": ("products-h200", ["65536", "fp8 a token", "0.89"]),
}


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def part(begin: str, end: str) -> str:
    start = README.index(begin)
    return README[start : README.index(end, start)]


def tables(folder: str, pair: str = "pair-27m") -> dict[tuple[str, ...], list[str]]:
    """By what the table is of, task, metric and quantizer."""
    found = {}
    text = (RESULTS / f"{pair}{folder}" / "tables.md").read_text()
    for section in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title, task = section.splitlines()[0], ""
        kind = "damage" if "damage" in title else "delta"
        if kind == "damage" and "softpick’s − softmax’s" not in section.splitlines()[2]:
            continue
        for row in rows(section)[2:]:
            task = row[0] or task
            found.setdefault((kind, task, row[1], row[2].partition(" (")[0]), row)
    return found


def require_rounded(told: list[str], shown: list[str]) -> None:
    """Each shown number is the told one, rounded to the places that it shows."""
    exact, rounded = (re.findall(r"[\d.]+", " ".join(texts)) for texts in (told, shown))
    assert len(exact) == len(rounded) == 5
    for one, other in zip(exact, rounded, strict=True):
        half = 0.5 * 10.0 ** -len(other.partition(".")[2])
        assert abs(float(one) - float(other)) <= half + 1e-9, (told, shown)


def differences(folder: str) -> pd.DataFrame:
    """Of each score and quantizer: what softpick's damage is above softmax's, in softpick's
    favour where positive, and whether it is significant; and what softmax gained."""
    every = pd.read_csv(RESULTS / folder / "tables.csv")
    every = every[every.metric.isin(["acc", "acc_norm", "perplexity", "word_perplexity"])]
    sign = every.direction.map({"up": 1, "down": -1})
    every["gain"] = sign * every.damage_log_ratio.fillna(every.damage)
    every["favour"] = sign * every.did_log_ratio.fillna(every.did)
    keys = ["task", "metric", "quantizer"]
    softmax = every[every.checkpoint == "softmax"].set_index(keys).gain.rename("softmax_gain")
    softmax = softmax[softmax.notna()].groupby(level=keys).first()
    found = every[every.did_p_holm.notna()].join(softmax, on=keys)
    return found.assign(significant=found.did_p_holm < 0.05)


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
        require_rounded([found[index] for index in (3, 5, 7, 8)], row[1:])
    assert seen == list(RATIOS)


def test_ratios_of_the_pair_with_sinks_are_those_of_its_tables():
    table = part("| | task | softmax | softpick | softpick's / softmax's |", "**With sinks")
    seen = set()
    for row in rows(table)[2:]:
        folder, quantizer = SINKS[row[0]]
        found = tables(folder, "sinks-27m")["damage", *TASKS[row[1]], quantizer]
        require_rounded([found[index] for index in (3, 5, 7, 8)], row[2:])
        seen.add(row[0])
    assert seen == set(SINKS)


@pytest.mark.parametrize("folder", COUNTED)
def test_differences_of_damage_are_counted_right(folder):
    found = differences(folder)
    marked = found[found.significant]
    favour = int((marked.favour > 0).sum())
    assert (len(found), favour, len(marked) - favour) == COUNTED[folder]


def test_differences_of_the_pair_with_sinks_are_told_as_they_were_counted():
    text = " ".join(part("**With sinks", "## Running it").split())
    for kind, of in (("", "weights"), ("-kv", "the KV cache"), ("-activations", "activations")):
        every, favour, against = COUNTED[f"sinks-27m{kind}"]
        _, first_favour, first_against = COUNTED[f"pair-27m{kind}"]
        counted = f"{every} of {of} {favour} and {against} ("
        assert counted in text
        rest = text[text.index(counted) + len(counted) :].partition(")")[0]
        assert rest.removeprefix("the first pair: ") == f"{first_favour} and {first_against}"
    marked = pd.concat(
        differences(f"sinks-27m{kind}").query("significant") for kind in ("", "-kv", "-activations")
    )
    hqq = marked[marked.method == "hqq"]
    assert (len(hqq), (hqq.favour > 0).all()) == (8, True)
    wikitext = marked[marked.task == "wikitext"]
    assert (wikitext.favour > 0).sum() == 15
    assert list(wikitext[wikitext.favour < 0].quantizer) == ["kv2"]
    against = marked[(marked.favour < 0) & (marked.task != "wikitext")]
    assert (len(against), set(against.task)) == (22, {"lambada_openai"})
    assert (against.softmax_gain > 0).sum() == 15
    known = tables("-activations", "sinks-27m")
    clipped, whole = (
        known["delta", "lambada_openai", "Acc ↑", one][3].partition(" ")[0]
        for one in ("a8-static-99.99", "bf16")
    )
    assert f"clipped at 99.99 % it answers {clipped} % instead of {whole} %" in text
    assert "HQQ has 8 and none of them, WikiText 15 and one" in text
    assert "the other 22 against softpick are LAMBADA's. In 15 of these" in text


def test_calibration_with_bos_is_told_as_the_page_has_it():
    told = " ".join(part("**With sinks", "## Running it").split())
    page = (RESULTS / "bench" / "sinks.md").read_text()
    known = {(row[0], row[1]): row[-1].partition(" [")[0] for row in rows(page) if len(row) == 5}
    without, first = (known["all that was seen", one] for one in ("without BOS", "BOS first"))
    assert f"({without} without, {first} with, 400 documents on a CPU" in told


@pytest.mark.parametrize("folder", NEARER)
def test_divergences_are_counted_right(folder):
    means: dict[tuple[str, str], float] = {}
    for record in Store(RESULTS / folder).records():
        found = [
            one.distributions for one in (record.damage.tasks if record.damage else {}).values()
        ]
        if found:
            tokens = sum(one.tokens for one in found)
            mean = sum(one.tokens * one.kl.mean for one in found) / tokens
            means[record.checkpoint, record.quantizer] = mean
    quantizers = {quantizer for _, quantizer in means}
    nearer = [one for one in quantizers if means["softpick", one] < means["softmax", one]]
    assert (len(nearer), len(quantizers)) == NEARER[folder]
    told = " ".join(part("**With sinks", "## Running it").split())
    assert f"{NEARER[folder][0]} of {NEARER[folder][1]}" in told or folder == "pair-27m-kv"


def test_sinks_of_the_second_pair_are_those_of_its_analysis():
    text = (RESULTS / "sinks-27m" / "analysis" / "tables.md").read_text()
    known: dict[str, dict[str, str]] = {"softmax/bf16": {}, "softpick/bf16": {}}
    for section in text.split("\n## ")[1:]:
        head, *body = rows(section)
        for row in body:
            if row[0] in known:
                known[row[0]] |= dict(zip(head, row, strict=True))
    softmax, softpick = known.values()
    told = " ".join(part("**And with real sinks?**", "| | task |").split())
    theirs, ours = "Sink rate of Gu et al. %, ε 0.3", "Sink rate %, ε 0.3"
    assert (softmax[theirs], softpick[theirs]) == ("65.35", "1.39")
    assert (softmax[ours], softpick[ours]) == ("16.27", "0.00")
    assert (softmax["Kurtosis"], softpick["Kurtosis"]) == ("334.19", "30.17")
    assert (softmax["Max"], softpick["Min"]) == ("67.50", "−18.25")
    assert "65.4 % of heads at ε 0.3 as Gu et al. count them (softpick 1.4 %), in 16.3 %" in told
    assert "a kurtosis of 334 (30) and a largest activation of 67.5 (18.25)" in told
    tables_of = tables("", "sinks-27m")["delta", *TASKS["WikiText"], "bf16"]
    assert tables_of[3:5] == ["85.41", "83.85"]
    assert "85.41 and 83.85" in told


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
