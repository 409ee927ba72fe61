"""Every number on the pages of evidence and speed stands in the files that it names."""

import json
import math
import re
import runpy
from functools import partial

import pandas as pd
import pytest
from readme_results import (
    EVIDENCE,
    RESULTS,
    ROOT,
    SPEED,
    TASKS,
    analysis,
    differences,
    divergences,
    part,
    rows,
    shown,
    table,
)

from qbench.store import Store

METHODS = {"bf16": "BNB", "bnb": "BNB", "gptq": "GPTQ", "hqq": "HQQ"}
# the page's row → folder, quantizer
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
# the page's row of the pair with sinks → the same
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
COUNTED = {  # folder → differences, in softpick's favour and against it after Holm's correction
    "sinks-27m": (72, 6, 10),
    "sinks-27m-kv": (81, 6, 7),
    "sinks-27m-activations": (126, 11, 23),
    "pair-27m": (72, 2, 8),
    "pair-27m-kv": (81, 12, 1),
    "pair-27m-activations": (126, 3, 13),
}
NEARER = {  # folder → cells in which softpick's KL divergence is the smaller one, all cells
    "sinks-27m": (5, 8),
    "sinks-27m-kv": (6, 9),
    "sinks-27m-activations": (9, 14),
    "pair-27m": (0, 8),
    "pair-27m-kv": (6, 9),
    "pair-27m-activations": (3, 14),
}
# The same of an earlier training of the pair with sinks: its records are in the folders' history
EARLIER_COUNTED = {"": (11, 4), "-kv": (8, 1), "-activations": (14, 18)}
EARLIER_NEARER = {"": 7, "-kv": 5, "-activations": 13}
KINDS = {"": "weights", "-kv": "KV cache", "-activations": "activations"}
# a cell of README's table of speeds, the file, and what must stand in one of its lines
A64, A128 = "B4 T4096 H16 D64", "B4 T4096 H16 D128"
SPEEDS = [
    ("2.57", "evaluation-h200", ["all", "fast", "2.57"]),
    ("3.54", "evaluation-h200", ["all", "fast, damage measured", "3.54"]),
    ("1.99", "evaluation-h200", ["all", "exact", "1.99"]),
    ("1.04 × and 0.93", "attention-h200", [A64, "causal", "softpick", "1.04", "0.93"]),
    ("0.90 × and 0.88", "attention-h200", [A128, "causal", "softpick", "0.90", "0.88"]),
    ("1.17 × and 1.00", "attention-h200", [A64, "causal", "softmax", "1.17", "1.00"]),
    ("0.92 × and 0.90", "attention-h200", [A128, "causal", "softmax", "0.92", "0.90"]),
    ("1.25 × and 1.24", "attention-h200", [A64, "ALiBi", "softpick", "1.25", "1.24"]),
    ("3.72 × and 2.53", "attention-h200", [A64, "soft cap", "softmax", "3.72", "2.53"]),
    ("1.26 × and 1.05", "attention-h200", [A64, "window", "softpick", "1.26", "1.05"]),
    ("114 %", "attention-h200", ["softpick, random keys", "114%"]),
    ("10.9", "generation-340m-h200", ["HFLM", "| softmax ", "10.9 ×"]),
    ("12.2", "generation-340m-h200", ["HFLM", "| softpick ", "12.2 ×"]),
    ("0.99 × and 0.98", "training-124m-h200", ["softmax/triton", "0.994"]),
    ("0.99 × and 0.98", "training-124m-h200", ["softpick/triton", "0.978"]),
    ("1.11", "training-27m-h200", ["softpick/triton", "1.110"]),
    ("1.12", "training-340m-h200", ["softpick/triton", "1.119"]),
]


def exact(folder: str, task: str, metric: str, quantizer: str) -> list[float]:
    """Ratios in full precision: softmax's damage, softpick's, and softpick's over softmax's with
    both ends of its interval."""
    every = table(folder).query("task == @task and metric == @metric and quantizer == @quantizer")
    softmax, softpick = (every[every.checkpoint == one].iloc[-1] for one in ("softmax", "softpick"))
    ends = [softpick[f"did_log_ratio{end}"] for end in ("", "_low", "_high")]
    return [math.exp(x) for x in (softmax.damage_log_ratio, softpick.damage_log_ratio, *ends)]


def require_exact(told: list[float], shown: list[str]) -> None:
    """Each shown number is rounded once from the one in full precision."""
    rounded = re.findall(r"[\d.]+", " ".join(shown))
    assert [
        f"{a:.{len(b.partition('.')[2])}f}" for a, b in zip(told, rounded, strict=True)
    ] == rounded


def require_rounded(told: list[str], shown: list[str], count: int = 5) -> None:
    """Each shown number is the told one, rounded to the places that it shows."""
    exact, rounded = (re.findall(r"[\d.]+", " ".join(texts)) for texts in (told, shown))
    assert len(exact) == len(rounded) == count
    for one, other in zip(exact, rounded, strict=True):
        half = 0.5 * 10.0 ** -len(other.partition(".")[2])
        assert abs(float(one) - float(other)) <= half + 1e-9, (told, shown)


def two_trainings() -> dict[tuple[str, str], list[str]]:
    """By quantizer and task: what the page on sinks has of softpick's damage over softmax's,
    earlier and now, and before it, where it was calibrated, softmax's and softpick's own."""
    page = (RESULTS / "bench" / "sinks.md").read_text()
    found = {}
    for row in rows(page[page.index("| not calibrated |") : page.index("**The two differ")])[2:]:
        found |= {(row[0], "WikiText"): row[1:3], (row[0], "LAMBADA"): row[3:5]}
    for row in rows(page[page.index("| calibrated |") : page.index("**Static ranges")])[2:]:
        found[row[0], row[1]] = [*row[6:], *row[2:6]]
    return found


def test_scores_of_the_pair_are_those_of_its_tables():
    known, task, seen = shown("pair-27m"), "", 0
    for row in rows(part("| Task | Metric | Quantization | softmax", "\n‡ differs"))[2:]:
        task = row[0] or task
        delta = known["delta", task, row[1], row[2]]
        assert [*delta[3:5], delta[5], delta[-1]] == [*row[3:6], row[7]]
        if row[2] != "bf16":
            assert known["damage", task, row[1], row[2]][7] == row[6]
        seen += 1
    assert seen == 27


def test_significant_differences_are_counted_right():
    marked = {
        key: row[7]
        for key, row in shown("pair-27m").items()
        if key[0] == "damage" and "‡" in row[7]
    }
    worse = [
        key
        for key, text in marked.items()
        if (float(text[1:].strip(" ‡")) > 1 if text.startswith("×") else text.startswith("−"))
    ]
    assert (len(marked), len(worse)) == (10, 8)
    told = "after Holm's correction in 10. In eight of them softpick is hurt *more*"
    assert told in " ".join(EVIDENCE.split())


@pytest.mark.slow
def test_ratios_of_activations_and_the_kv_cache_are_those_of_their_tables():
    seen = []
    for row in rows(part("| | softmax | softpick | softpick's / softmax's |", "**In the KV"))[2:]:
        label = row[0] if row[0] not in seen else f"{row[0]}, int4"
        seen.append(label)
        folder, quantizer = RATIOS[label]
        key = "damage", "wikitext [test_document_level]", "Word Perplexity ↓", quantizer
        found = shown(f"pair-27m-{folder}")[key]
        require_rounded([found[index] for index in (3, 5, 7, 8)], row[1:])
        require_exact(
            exact(f"pair-27m-{folder}", "wikitext", "word_perplexity", quantizer), row[1:]
        )
    assert seen == list(RATIOS)


@pytest.mark.slow
def test_ratios_of_the_pair_with_sinks_are_those_of_its_tables():
    table = part("| | task | softmax | softpick | softpick's / softmax's |", "**With sinks")
    seen, known = set(), two_trainings()
    for row in rows(table)[2:]:
        folder, quantizer = SINKS[row[0]]
        found = shown(f"sinks-27m{folder}")["damage", *TASKS[row[1]], quantizer]
        require_rounded([found[index] for index in (3, 5, 7, 8)], row[2:5])
        metric = {
            "WikiText": ("wikitext", "word_perplexity"),
            "LAMBADA": ("lambada_openai", "perplexity"),
        }
        require_exact(exact(f"sinks-27m{folder}", *metric[row[1]], quantizer), row[2:5])
        earlier, _, *damages = known[quantizer, row[1]]
        require_rounded([earlier], [row[5]], 1)
        assert row[5].endswith("\\*") == bool(damages)
        seen.add(row[0])
    assert seen == set(SINKS)


@pytest.mark.slow
def test_two_trainings_of_one_recipe_are_told_as_their_tables_have_them():
    known = two_trainings()
    folders = {
        quantizer: folder
        for folder in KINDS
        for kind, *_, quantizer in shown(f"sinks-27m{folder}")
        if kind == "damage"
    }
    for (quantizer, task), (_, now, *damages) in known.items():
        found = shown(f"sinks-27m{folders[quantizer]}")["damage", *TASKS[task], quantizer]
        require_rounded([found[7]], [now], 1)
        assert ("‡" in found[7]) == ("‡" in now)
        if damages:
            require_rounded([found[3], found[5]], [damages[1], damages[3]], 2)
    calibrated = {"w4a8", "w4a4"}  # GPTQ's weights, and nothing more to say of calibration
    assert {quantizer for quantizer, _ in known} == set(folders) - calibrated
    assert len(known) == 2 * (21 + 7)
    told = " ".join(part("## Two trainings", "## What would change").split())
    page = " ".join((RESULTS / "bench" / "sinks.md").read_text().split())
    assert "47 of 189 differences are significant in one training at least. 27 of these" in told
    assert (
        "have the same sign in both, and so have 16 of the 20 that are significant in both" in told
    )
    assert "Of the 189 differences of damage of these 21 quantizers" in page


@pytest.mark.slow
@pytest.mark.parametrize("folder", COUNTED)
def test_differences_of_damage_are_counted_right(folder):
    found = differences(folder)
    marked = found[found.significant]
    favour = int((marked.favour > 0).sum())
    assert (len(found), favour, len(marked) - favour) == COUNTED[folder]


@pytest.mark.slow
def test_differences_of_the_pair_with_sinks_are_told_as_they_were_counted():
    counted = {row[0]: row[1:] for row in rows(part("| | this pair |", "HQQ has"))[2:]}
    expected = {}
    for folder, kind in KINDS.items():
        every, *pair = COUNTED[f"sinks-27m{folder}"]
        _, *first = COUNTED[f"pair-27m{folder}"]
        row = f"{kind}, of {every}" + " differences" * (folder == "")
        told = pair, EARLIER_COUNTED[folder], first
        expected[row] = [f"{favour} and {against}" for favour, against in told]
    for folder, kind in KINDS.items():
        near, every = NEARER[f"sinks-27m{folder}"]
        row = f"{kind}, KL, of {every}" + " cells" * (folder == "")
        first, _ = NEARER[f"pair-27m{folder}"]
        expected[row] = [str(count) for count in (near, EARLIER_NEARER[folder], first)]
    assert counted == expected
    text = " ".join(part("**With sinks", "## Two trainings").split())
    marked = pd.concat(differences(f"sinks-27m{folder}").query("significant") for folder in KINDS)
    hqq = marked[marked.method == "hqq"]
    assert (len(hqq), (hqq.favour > 0).all()) == (2, True)
    wikitext, lambada = (marked[marked.task == one] for one in ("wikitext", "lambada_openai"))
    assert [(one.favour > 0).sum() for one in (wikitext, lambada)] == [9, 12]
    assert [(one.favour < 0).sum() for one in (wikitext, lambada)] == [11, 26]
    assert "HQQ has 2 in softpick's favour and none against it, WikiText 9 and 11" in text
    assert (lambada[lambada.favour < 0].softmax_gain > 0).sum() == 15
    assert "LAMBADA 12 and 26. In 15 of these 26 softmax scores *better* quantized" in text
    known = shown("sinks-27m")
    gptq, whole = (
        known["delta", "lambada_openai", "Acc ↑", one][3].partition(" ")[0]
        for one in ("gptq-4bit", "bf16")
    )
    assert f"with GPTQ 4-bit it answers {gptq} % instead of {whole} %" in text
    # the claim, where it holds and where it does not
    cache = wikitext[wikitext.method == "kv"]
    assert (len(cache), (cache.favour > 0).all()) == (4, True)
    one_scale = marked[marked.quantizer.isin(["a8-static", "a8-static-99.99", "a8-tensor"])]
    assert (len(one_scale), (one_scale.favour > 0).all()) == (10, True)
    few = marked[marked.quantizer.str.match(r"gptq-[234]|a[46]|w4")]
    assert (len(few), (few.favour < 0).all()) == (31, True)


@pytest.mark.parametrize("folder", NEARER)
def test_divergences_are_counted_right(folder):
    means = divergences(folder)
    quantizers = {quantizer for _, quantizer in means}
    nearer = [one for one in quantizers if means["softpick", one] < means["softmax", one]]
    assert (len(nearer), len(quantizers)) == NEARER[folder]


def test_sinks_of_the_second_pair_are_those_of_its_analysis():
    known = analysis("sinks-27m")
    softmax, softpick = (known[f"{name}/bf16"] for name in ("softmax", "softpick"))
    told = " ".join(part("## With real sinks", "| | task |").split())
    theirs, ours = "Sink rate of Gu et al. %, ε 0.3", "Sink rate %, ε 0.3"
    assert (softmax[theirs], softpick[theirs]) == ("69.31", "2.01")
    assert (softmax[ours], softpick[ours]) == ("54.05", "0.00")
    assert (softmax["Kurtosis"], softpick["Kurtosis"]) == ("622.82", "130.39")
    assert (softmax["Min"], softpick["Max"]) == ("−70.50", "40.00")
    assert "69.3 % of heads at ε 0.3 as Gu et al. count them (softpick 2.0 %)." in told
    assert "By the softpick paper's definition it is 54.1 % (0 %)." in told
    assert "Its kurtosis is 623 (130), its largest activation 70.5 (40)." in told
    page = (RESULTS / "bench" / "sinks.md").read_text()
    (earlier,) = (row for row in rows(page) if row[0] == "the same recipe, an earlier run")
    assert earlier[6:8] == ["16.27 %", "65.35 %"]
    assert "with sinks in 65.4 % and 16.3 % of heads" in told
    tables_of = shown("sinks-27m")["delta", *TASKS["WikiText"], "bf16"]
    assert tables_of[3:5] == ["86.59", "85.82"]
    assert "86.59 and 85.82" in told


LARGER = part("## At 126 M", "## What would change")
LABELS = {  # of the page's table
    "weights, GPTQ 2-bit": "gptq-2bit",
    "weights, GPTQ 3-bit": "gptq-3bit",
    "weights, HQQ 2-bit": "hqq-2bit",
    "activations, int4, a scale a token": "a4",
    "activations, int8, one scale for all tokens": "a8-tensor",
    "KV cache, 3 bits, a scale a head and token": "kv3",
    "KV cache, 2 bits, a scale a head and token": "kv2",
}


def test_the_larger_pair_is_told_as_it_was_trained_and_analyzed():
    every = analysis("sinks-124m")
    known = {name: every[f"{name}/bf16"] for name in ("softmax", "softpick")}
    names = ["Perplexity", "Sink rate %, ε 0.3", "Sink rate of Gu et al. %, ε 0.3", "Kurtosis"]
    for name, *values in rows(LARGER[: LARGER.index("![Curves")])[2:]:
        found = known[name]
        largest = max(abs(float(found[end].replace("−", "-"))) for end in ("Min", "Max"))
        assert values == [*(found[one] for one in names), f"{largest:.0f}"]
    watched = {}
    for name in known:
        path = RESULTS / "sinks-124m" / "training" / f"{name}-seed0" / "training.json"
        training = json.loads(path.read_text())
        watched[name] = training["watched"]
        assert (training["tokens"] // 10**6, training["parameters"] // 10**6) == (600, 125)
        assert training["data"]["tokens"] // 10**6 == 243
        assert round(training["sessions"][0]["seconds"] / 60) == 25
    told = " ".join(LARGER.split())
    losses = [f"{watched[name][-1]['loss']:.3f}" for name in known]
    assert f"the loss is {losses[0]} and {losses[1]} nats a token" in told
    grown = [f"{100 * watched['softmax'][index]['sink_rate']:.1f}" for index in (1, 3, -1)]
    assert (
        f"{grown[0]} % of heads after 131 M tokens, {grown[1]} % after 393 M, {grown[2]} %" in told
    )
    massive = [int(one["Massive activations"]) for one in known.values()]
    assert massive[0] >= 60
    assert massive[1] == 0
    silent = float(known["softpick"]["Heads without any weight %"])
    assert f"on a page {silent:.1f} % of them have no weight at all" in told
    record = next(
        one for one in Store(RESULTS / "sinks-124m").records() if one.cell == "softpick/gptq-8bit"
    )
    dead = [one.dead_inputs // 64 for one in record.audit.modules if "o_proj" in one.name]
    assert f"{sum(dead)} of its {12 * len(dead)} stayed silent on all {128 * 2048:,}" in told


def test_the_larger_pair_is_told_as_its_cells_were_scored():
    sizes = (RESULTS / "sinks-124m" / "sizes.md").read_text()
    known = {row[1]: row for row in rows(sizes)[2:]}
    listed = rows(LARGER[LARGER.index("| softpick's damage") :])[2:]
    assert {name: known[label][2::2] for name, label in LABELS.items()} == {
        name: cells for name, *cells in listed
    }
    told = " ".join(LARGER.split())
    damage = shown("sinks-124m")["damage", *TASKS["WikiText"], "a4"]
    require_rounded([damage[3], damage[5]], ["× 8.80", "× 1.94"], 2)
    assert (
        "Int4 with a scale a token takes softmax's perplexity × 8.80 and softpick's × 1.94" in told
    )
    readme = (ROOT / "README.md").read_text()
    assert f"({known['a4'][4][:7]})" in readme

    def more(folder: str, wanted: str) -> list[bool]:
        means = divergences(folder)
        quantizers = {one for _, one in means if re.fullmatch(wanted, one)}
        return [means["softpick", one] > means["softmax", one] for one in quantizers]

    larger = partial(more, "sinks-124m")
    integer, floating = larger(r"a[468](-tensor|-asym.*|-static.*)?|w.*"), larger(r"a.*fp.")
    assert (len(integer), sum(integer), len(floating), sum(floating)) == (10, 0, 3, 3)
    assert "Under all 10 integer formats softpick moves less" in told
    cache, weights = larger("kv.*"), larger("(bnb|gptq|hqq).*")
    assert (len(cache), sum(cache), len(weights), sum(weights)) == (9, 8, 8, 7)
    assert sum(more("sinks-27m-kv", "kv.*")) == 3
    assert sum(more("sinks-27m", "(bnb|gptq|hqq).*")) == 3
    assert "more under 8 of 9 precisions, at 27 M under 3." in told
    assert "more under 7 of 8 precisions, at 27 M under 3." in told


def test_what_waiting_for_the_unquantized_cell_costs_is_that_of_the_records():
    every = list(Store(RESULTS / "sinks-124m").records())
    seconds = []
    for name in ("softmax", "softpick"):
        (first,) = (one for one in every if one.cell == f"{name}/bf16")
        last = max(one.finished for one in every if one.checkpoint == name)
        seconds.append([(end - first.started).total_seconds() for end in (first.finished, last)])
    (wait, all_of_it), (wait_too, all_too) = seconds
    told = f"wait for {wait:.0f} s and {wait_too:.0f} s, of {all_of_it:.0f} s and {all_too:.0f} s"
    assert told in " ".join(SPEED.split())


@pytest.mark.slow
def test_differences_of_the_larger_pair_are_counted_right():
    found = differences("sinks-124m")
    kinds = {"weights": r"(bnb|gptq|hqq).*", "activations": r"[aw]\d.*", "KV cache": r"kv.*"}
    counted = []
    for wanted in kinds.values():
        every = found[found.quantizer.str.fullmatch(wanted)]
        marked = every[every.significant]
        counted.append(
            f"{(marked.favour > 0).sum()} and {(marked.favour < 0).sum()} of {len(every)}"
        )
    told = " ".join(LARGER.split())
    assert (
        f"{counted[0]} for weights, {counted[1]} for activations, {counted[2]} for the KV" in told
    )


@pytest.mark.slow
def test_sizes_side_by_side_are_those_of_the_records():
    module = runpy.run_path(str(ROOT / "docs" / "sizes.py"))
    page = (RESULTS / "sinks-124m" / "sizes.md").read_text()
    assert page.endswith("\n".join(module["table"]()) + "\n")


def test_table_4_is_that_of_the_analysis():
    known = analysis("pair-27m")
    names = ["Sink rate %, ε 0.2", "Sink rate %, ε 0.3", "Kurtosis", "Min", "Max", "Sparsity %",
             "KL bnb-4bit", "KL gptq-3bit", "KL hqq-3bit"]  # fmt: skip
    for row in rows(part("| | sink rate %, ε 0.2", "![Hidden"))[2:]:
        assert row[1:] == [known[f"{row[0]}/bf16"][name] for name in names]


@pytest.mark.parametrize(("number", "name", "words"), SPEEDS)
def test_speeds_are_those_of_the_bench(number, name, words):
    assert number in part("| what | against | H200 |", "\n\\* Values", SPEED)
    lines = (RESULTS / "bench" / f"{name}.md").read_text().splitlines()
    assert any(all(word in line for word in words) for line in lines)


def test_speeds_of_the_readme_are_those_of_their_pages():
    told = (ROOT / "README.md").read_text()
    listed = {row[0]: row for row in rows(told[told.index("| one H200 |") :])[2:7]}
    streamed = listed.pop("a 7B model block by block, 4.7 GiB of GPU memory")
    page = (RESULTS / "bench" / "large-h200.md").read_text()
    resident, by_block = re.search(r"the command \| \*\*(\d+) s.*?\*\*(\d+) s", page).groups()
    assert streamed[2] == f"{int(by_block) / int(resident):.2f} × the time"
    for what, against, speed in listed.values():
        subject = what.split(",")[0]
        assert any(
            all(one in line for one in (subject, against.split()[0], speed))
            for line in SPEED.splitlines()
        ), what


def test_what_is_compared_with_another_row_or_stands_in_the_text_is_that_of_the_bench():
    page = (RESULTS / "bench" / "attention-h200.md").read_text()
    every = [[cell for cell in row if cell] for row in rows(page)]
    for shape, told in (("B4 T4096 H16 D64", "1.47"), ("B4 T4096 H16 D128", "1.48")):
        rate = {
            kernel: float(forward)
            for place, variant, kernel, forward, *_ in (row for row in every if len(row) == 7)
            if (place, variant) == (shape, "causal")
        }
        assert f"{rate['sigmoid'] / rate['FlashAttention 2']:.2f}" == told
        assert told in SPEED
    steps = {row[1]: row[2:] for row in every if row[0] == "B8 T1024 H16 D64"}
    (_, slow, _, row, _, fast), (_, slow_too, _, row_too, _, fast_too) = (
        steps[name] for name in ("softmax", "softpick")
    )
    said = " ".join(SPEED.split())
    assert f"softmax is at {fast} × cuDNN and softpick at {fast_too} ×" in said
    assert f"host: {slow} × and {slow_too} × here, or {row} × and {row_too} × where" in said
    page = (RESULTS / "bench" / "training-124m-h200.md").read_text()
    rate = {row[1]: float(row[3].replace(",", "")) for row in rows(page) if "124m" in row[0]}
    torch = rate["softmax/torch"]
    told = f"{rate['softmax/triton'] / torch:.2f} × and {rate['softpick/triton'] / torch:.2f} ×"
    assert f"torch's attention (FlashAttention 2) | {told} |" in SPEED
