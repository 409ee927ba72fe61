"""What the page of evidence says of sigmoid attention stands in the results that it names."""

import math
import re
from statistics import mean

import pytest
from readme_results import RESULTS, divergences, part, rows, scores, table

from qbench.records import Training
from qbench.store import Analyses

SECTION = part("## Sigmoid attention", "## At 126 M")
TOLD = " ".join(SECTION.split())
GROUPS = {
    "sigmoid-27m": ("softmax", "softpick", "sigmoid"),
    "sigmoid-27m-alibi": ("softmax", "sigmoid"),
}
COLUMNS = [(folder, one) for folder, ones in GROUPS.items() for one in ones]
SEEDS = (1, 2, 3)
PRECISIONS = {
    "weights, bitsandbytes NF4": "bnb-4bit",
    "weights, LLM.int8": "bnb-8bit",
    "weights, GPTQ 4-bit": "gptq-4bit",
    "weights, GPTQ 3-bit": "gptq-3bit",
    "weights, GPTQ 2-bit": "gptq-2bit",
    "weights, HQQ 3-bit": "hqq-3bit",
    "weights, HQQ 2-bit": "hqq-2bit",
    "activations, int8, a scale a token": "a8",
    "activations, int6, a scale a token": "a6",
    "activations, int4, a scale a token": "a4",
    "activations, int8, a range for each layer from calibration": "a8-static",
    "KV cache, 8 bits, a scale a head and token": "kv8",
    "KV cache, 4 bits, a scale a head and token": "kv4",
    "KV cache, 3 bits, a scale a head and token": "kv3",
    "KV cache, 2 bits, a scale a head and token": "kv2",
}
SCORES = {
    "WikiText, word perplexity": ("wikitext", "word_perplexity"),
    "SciQ, acc_norm (chance 25 %)": ("sciq", "acc_norm"),
    "LAMBADA, acc": ("lambada_openai", "acc"),
    "ARC easy, acc_norm (chance 25 %)": ("arc_easy", "acc_norm"),
    "PIQA, acc_norm (at chance, 50 %)": ("piqa", "acc_norm"),
}


def trainings(folder: str, normalizer: str) -> list[Training]:
    found = (RESULTS / folder / "training").glob(f"{normalizer}-seed*/training.json")
    return [Training.model_validate_json(path.read_bytes()) for path in sorted(found)]


def held_out(folder: str, normalizer: str) -> float:
    return mean(one.watched[-1].loss for one in trainings(folder, normalizer))


def score(folder: str, normalizer: str, task: str, metric: str) -> str:
    every = scores(folder)
    chosen = every[(every.task == task) & (every.metric == metric) & (every.quantizer == "bf16")]
    found = chosen[chosen.checkpoint.isin([f"{normalizer}.{seed}" for seed in SEEDS])].value
    assert len(found) == len(SEEDS)
    return f"{found.mean() * (1 if task == 'wikitext' else 100):.2f}"


def measured(folder: str, normalizer: str) -> dict[str, str]:
    found = [
        one.measured
        for one in Analyses(RESULTS / folder).records()
        if one.checkpoint.startswith(f"{normalizer}.")
    ]
    assert len(found) == len(SEEDS)
    first = [one.sinks[0] for one in found]  # on the first key
    assert not any(one.rates["0.2"] for one in first)
    assert not any(one.hidden.massive for one in found)
    largest = (max(-one.hidden.minimum, one.hidden.maximum) for one in found)
    gu = mean(one.rates_gu["0.3"] for one in first)
    return {
        "sinks of Gu et al., ε 0.3, % of heads": f"{100 * gu:.2f}",
        "kurtosis of hidden states": f"{mean(one.hidden.kurtosis for one in found):.2f}",
        "largest activation of any seed": f"{max(largest):.2f}",
    }


def moved(folder: str, normalizer: str, quantizer: str) -> str:
    """Mean KL divergence over seeds; ▲ above softmax's in all seeds, ▼ below it in all."""
    found = divergences(folder)
    own, base = (
        [found[f"{one}.{seed}", quantizer] for seed in SEEDS] for one in (normalizer, "softmax")
    )
    text = f"{mean(own):.4f}" if mean(own) < 1 else f"{mean(own):.3f}"
    pairs = list(zip(own, base, strict=True))
    if all(a > b for a, b in pairs):
        return f"{text} ▲"
    return f"{text} ▼" if all(a < b for a, b in pairs) else text


def unquantized() -> list[list[str]]:
    made = [["held-out loss, nats a token", *(f"{held_out(*one):.3f}" for one in COLUMNS)]]
    for label, key in SCORES.items():
        made.append([label, *(score(*one, *key) for one in COLUMNS)])
    columns = [measured(*one) for one in COLUMNS]
    return made + [[label, *(one[label] for one in columns)] for label in columns[0]]


def divergence_rows() -> list[list[str]]:
    return [
        [label, *(moved(*one, quantizer) for one in COLUMNS)]
        for label, quantizer in PRECISIONS.items()
    ]


def test_both_tables_are_those_of_the_results():
    first, second = SECTION.split("softmax's in all three seeds")
    assert rows(first)[2:] == unquantized()
    assert rows(second)[2:] == divergence_rows()


def test_what_moves_most_under_each_kind_of_precision():
    rotary, alibi = (divergences(folder) for folder in GROUPS)

    def above(found, one, other, quantizer):  # in every seed
        return all(found[f"{one}.{s}", quantizer] > found[f"{other}.{s}", quantizer] for s in SEEDS)

    weights = [quantizer for label, quantizer in PRECISIONS.items() if "weights" in label]
    for quantizer in weights:
        assert above(rotary, "sigmoid", "softmax", quantizer)
        assert above(rotary, "softpick", "sigmoid", quantizer)
    hurt_less = [one for one in weights if above(alibi, "softmax", "sigmoid", one)]
    assert len(hurt_less) == 5
    assert len(weights) == 7
    assert "five of seven weight quantizers" in TOLD.lower()
    assert all(above(alibi, "sigmoid", "softmax", one) for one in ("a8", "a6", "a4"))
    for quantizer in ("kv4", "kv3", "kv2"):
        for seed in SEEDS:
            sigmoid, softmax = (alibi[f"{n}.{seed}", quantizer] for n in ("sigmoid", "softmax"))
            assert sigmoid < 0.505 * softmax
    ratios = [
        mean(found[f"sigmoid.{s}", "a8-static"] for s in SEEDS)
        / mean(found[f"softmax.{s}", "a8-static"] for s in SEEDS)
        for found in (rotary, alibi)
    ]
    assert [round(one, 1) for one in ratios] == [3.5, 3.4]


@pytest.mark.slow
def test_one_difference_over_seeds_is_significant():
    count, marked = 0, []
    for folder in GROUPS:
        every = table(folder, "seeds.csv")
        found = every[
            (every.question == "did")
            & every.metric.isin(["acc", "acc_norm", "perplexity", "word_perplexity"])
        ]
        count += len(found)
        marked += [
            (folder, one.task, one.quantizer) for one in found[found.p_holm < 0.05].itertuples()
        ]
        if folder == "sigmoid-27m-alibi":
            for task in ("wikitext", "lambada_openai"):
                one = found[
                    (found.task == task)
                    & (found.quantizer == "kv2")
                    & found.metric.str.endswith("perplexity")
                ].iloc[0]
                ratio, low, high = (math.exp(x) for x in (one.estimate, one.low, one.high))
                assert f"× {ratio:.3f} [{low:.3f}, {high:.3f}]" in TOLD
    assert marked == [("sigmoid-27m-alibi", "wikitext", "kv2")]
    assert f"one of {count} differences" in TOLD


def test_how_they_were_trained():
    runs = [one for column in COLUMNS for one in trainings(*column)]
    assert len(runs) == 15
    assert {one.tokens for one in runs} == {79_953_920}
    assert {one.data.tokens for one in runs} == {59_244_652}
    assert {one.parameters for one in runs} == {27_534_720, 27_534_792}  # ALiBi's slopes
    behind = held_out("sigmoid-27m-alibi", "sigmoid") - held_out("sigmoid-27m-alibi", "softmax")
    assert f"{behind:.3f} nats behind" in TOLD
    assert re.search(r"80 M tokens .* 59 M", TOLD)


def test_forward_speeds_are_those_of_the_page():
    page = (RESULTS / "bench" / "training-27m-h200.md").read_text()
    for normalizer, told in (("sigmoid", "4.26 M"), ("softmax", "4.32 M")):
        forward = page[page.index("## The forward pass alone") :]
        found = re.search(rf"{normalizer}/triton \| yes +\| +([\d,]+)", forward)
        assert f"{int(found[1].replace(',', '')) / 1e6:.2f} M" == told
        assert told in TOLD
