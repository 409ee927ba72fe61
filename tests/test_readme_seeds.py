"""What the page of evidence says of three seeds of the pair stands in the results that it names."""

import numpy as np
import pandas as pd
import pytest
from readme_results import RESULTS, TASKS, differences, divergences, part, rows, shown, table

from qbench.store import Analyses

PARAGRAPH = part("## Other seeds", "## With real sinks")
TOLD = " ".join(PARAGRAPH.split())
KINDS = ("", "-kv", "-activations")
KEYS = ["task", "metric", "quantizer"]
# the page's row → folder, quantizer
ROWS = {
    "weights, GPTQ 2-bit": ("", "gptq-2bit"),
    "weights, GPTQ 3-bit": ("", "gptq-3bit"),
    "weights, HQQ 2-bit": ("", "hqq-2bit"),
    "KV cache, 4 bits, a scale a layer": ("-kv", "kv4-tensor"),
    "KV cache, 3 bits, a scale a head and token": ("-kv", "kv3"),
    "activations, int8, a range for each layer, clipped": ("-activations", "a8-static-99.99"),
    "activations, int4, a scale a token": ("-activations", "a4"),
}
# folder → precisions under which softpick moves less in every seed, more in every seed, all
MOVES = {"": (1, 3, 8), "-kv": (7, 1, 9), "-activations": (9, 0, 14)}
SAME_SIGN = {"": (10, 5), "-kv": (13, 9), "-activations": (16, 6)}


def over_seeds(kind: str) -> pd.DataFrame:
    """Of each score and quantizer: what softpick's damage is above softmax's, ``each`` seed's in
    softpick's favour where positive, and p after Holm's correction."""
    every = table(f"seeds-27m{kind}", "seeds.csv")
    every = every[every.metric.isin(["acc", "acc_norm", "perplexity", "word_perplexity"])]
    found = every[every.question == "did"].set_index(KEYS)
    sign = found.direction.map({"up": 1, "down": -1})
    numbers = [
        np.array([float(one) for one in each.split()]) * way
        for each, way in zip(found.each, sign, strict=True)
    ]
    return found.assign(numbers=numbers)


def test_ratios_are_those_of_the_tables():
    seen = set()
    for label, task, first, three, each in rows(PARAGRAPH)[2:]:
        folder, quantizer = ROWS[label]
        key = ("damage", *TASKS[task], quantizer)
        one, seeds = (shown(f"{name}-27m{folder}")[key][3:] for name in ("pair", "seeds"))
        for told, columns in ((first, one), (three, seeds)):
            assert told == f"{columns[4].rstrip('‡†§')} {columns[5].removeprefix('× ')}"
        assert each == seeds[6]
        seen.add(label)
    assert seen == set(ROWS)


@pytest.mark.slow
def test_differences_of_the_first_pair_are_looked_for_in_every_seed():
    significant = 0
    for kind in KINDS:
        known = over_seeds(kind)
        first = differences(f"pair-27m{kind}").query("significant").set_index(KEYS).favour
        same = [
            (np.sign(known.numbers[key]) == np.sign(favour)).all() for key, favour in first.items()
        ]
        assert (len(first), sum(same)) == SAME_SIGN[kind]
        marked = known[known.p_holm < 0.05]
        significant += len(marked)
        if len(marked):
            assert list(marked.index) == [("wikitext", "word_perplexity", "gptq-2bit")]
            assert (marked.numbers.iloc[0] < 0).all()
    every = sum(len(over_seeds(kind)) for kind in KINDS)
    assert (significant, every) == (1, 279)
    numbers = [count for count, _ in SAME_SIGN.values()]
    same = [count for _, count in SAME_SIGN.values()]
    assert f"call {sum(numbers)} differences significant" in TOLD
    assert "({} of weights, {} of the cache, {} of activations)".format(*numbers) in TOLD
    assert f"{sum(same)} have the same sign in all three seeds ({same[0]}, {same[1]} and" in TOLD
    assert "Of all 279 differences, one is significant over seeds" in TOLD


@pytest.mark.parametrize("kind", KINDS)
def test_divergences_of_every_seed_are_counted_right(kind):
    means = divergences(f"seeds-27m{kind}")
    quantizers = {quantizer for _, quantizer in means}
    less = more = 0
    for one in quantizers:
        signs = {
            means[f"softpick.{seed}", one] < means[f"softmax.{seed}", one] for seed in (1, 2, 3)
        }
        less += signs == {True}
        more += signs == {False}
    assert (less, more, len(quantizers)) == MOVES[kind]
    smaller = f"under {less} of {len(quantizers)}"
    told = {"": f"{smaller}, and larger under {more} ("}
    told["-kv"] = f"in every seed {smaller} precisions, and larger under one"
    told["-activations"] = f"{smaller}, and larger under none"
    assert told[kind] in TOLD


def test_the_models_are_those_of_the_tables():
    text = (RESULTS / "seeds-27m" / "tables.md").read_text().split("### ")[1]
    softmax, softpick = next(
        (row[3], row[5]) for row in rows(text) if row[1:3] == ["Word Perplexity ↓", "bf16"]
    )
    assert f"WikiText {softmax} and {softpick} instead of 83.36 and 86.14" in TOLD
    found = Analyses(RESULTS / "seeds-27m").records()
    first = [
        next(sink for sink in one.measured.sinks if sink.position == 0)
        for one in found
        if one.checkpoint.startswith("softmax")
    ]
    assert len(first) == 3
    assert f"{100 * np.mean([s.rates['0.3'] for s in first]):.2f} % of heads at ε 0.3" in TOLD
    theirs = [100 * s.rates_gu["0.3"] for s in first]
    assert f"{min(theirs):.0f} to {max(theirs):.0f} % by Gu et al." in TOLD
