"""Write the pages that state numbers of results from their templates: `make pages`.

docs/templates has a Jinja2 template for each such page, under the page's own path. A number in it
is an expression over docs/numbers.csv (written by docs/read_results.py) or over the tables in
results/bench, made with the functions below. What is not in the results is an error.
"""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import jinja2
import pandas as pd
from scipy.stats import t

from qbench.cli.run import RATES
from qbench.statistics.effect import holm

ROOT = Path(__file__).parent.parent
TEMPLATES = ROOT / "docs" / "templates"
PAIRS = {  # folders that were measured on the same models
    "first": ("pair-27m", "pair-27m-kv", "pair-27m-activations"),
    "outliers": ("pair-27m-outliers",),
    "seeds": ("seeds-27m", "seeds-27m-kv", "seeds-27m-activations"),
    "sinks": ("sinks-27m", "sinks-27m-kv", "sinks-27m-activations"),
    "126M": ("sinks-124m",),
    "rotary": ("sigmoid-27m",),
    "alibi": ("sigmoid-27m-alibi",),
    "variants": ("variants-27m",),
    "real": ("smollm2",),
    "real sinks": ("real-sinks",),
    "formats": ("published-27m",),
    "gguf": ("published-27m-gguf",),
    "methods": ("methods", "methods-made"),
    "methods-27m": ("methods-27m", "methods-27m-made"),
    "gptq": ("gptq-library", "gptq-library-b"),
    "gptq seeds": ("gptq-seeds", "gptq-seeds-b", "gptq-seeds-c", "gptq-seeds-d"),
    "kinds": ("kinds-27m", "kinds-27m-gate", "kinds-27m-more"),
    "kinds answers": ("kinds-27m-answers",),
    "kinds short": ("kinds-27m-short",),
    "kinds 126M": ("kinds-124m",),
    "kinds 126M answers": ("kinds-124m-answers",),
}
BUDGETS = {
    "budget-smollm2": "SmolLM2-135M-Instruct",
    "budget-smollm2-alone": "SmolLM2-135M-Instruct, three budgets",
    "budget-smollm2-head": "SmolLM2-135M-Instruct, embeddings and LM head (one matrix) too",
    "budget-smollm2-llamacpp": "SmolLM2-135M-Instruct beside llama.cpp’s mixes",
    "budget-smollm2-peers": "SmolLM2-135M-Instruct beside AutoRound and its own search",
    "budget-gemma3": "Gemma 3 270M",
    "budget-softmax": "27M, softmax", "budget-softpick": "27M, softpick",
    "budget-340m": "The 340M shape, random weights",
    "budget-7b": "The 7B shape, random weights",
}  # fmt: skip
WEIGHTS = (("gptq", ""), ("gptq", "-columns"), ("hqq", ""), ("rtn", ""), ("rtn", "-asym"))
PRECISION_GROUPS = {  # of kinds of attention, in the order of their page
    "4-bit weights: GPTQ, HQQ, rounding": tuple(f"{name}-4bit{end}" for name, end in WEIGHTS),
    "3-bit weights: the same": tuple(f"{name}-3bit{end}" for name, end in WEIGHTS),
    "NVFP4 weights, with activations or not": ("nvfp4", "w4a4-nvfp4"),
    "MXFP4 weights, with activations or not": ("mxfp4", "w4a4-mxfp4"),
    "int4 activations, with GPTQ 4 bits or not": ("a4", "w4a4"),
    "int8 activations, one scale": ("a8-tensor",),
    "KV cache, 4 bits": ("kv4",),
    "KV cache, 3 bits, first 4 tokens kept or not": ("kv3", "kv3-first4"),
    "FP8": ("w8a8-fp8",),
}
REAL_SINKS = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma 3 270M"}
KEYS = ["task", "metric", "quantizer", "checkpoint"]
SCORED = (("wikitext", "word_perplexity"), ("lambada_openai", "acc"))
METRICS = {"wikitext": "word_perplexity", "lambada_openai": "perplexity"}  # whose ratios are shown
KINDS = {"weights": r"(bnb|gptq|hqq).*", "activations": r"[aw]\d.*", "KV cache": r"kv.*"}


@lru_cache
def all_numbers() -> pd.DataFrame:
    """Return docs/numbers.csv, its texts as objects, of which rows are taken faster."""
    numbers = pd.read_csv(ROOT / "docs" / "numbers.csv")
    return numbers.astype(dict.fromkeys(numbers.select_dtypes("str"), object))


@lru_cache
def pair(name: str) -> pd.DataFrame:
    """Return a pair's rows, with ``holm``: the p-values of its differences of damage after Holm's
    correction over all of them. A cell of two folders counts once; scores at chance are not
    tested."""
    numbers = all_numbers()
    rows = numbers[numbers.folder.isin(PAIRS[name])].drop_duplicates(KEYS).copy()
    rows["kind"] = [
        next((kind for kind, names in KINDS.items() if re.fullmatch(names, str(quantizer))), "")
        for quantizer in rows.quantizer
    ]
    untested = rows[rows.difference.notna() & rows.difference_p.isna()]  # in one folder at least
    scores = rows.task + rows.metric
    rows.loc[scores.isin(untested.task + untested.metric), "difference_p"] = None
    tested = rows.difference_p.notna()
    rows.loc[tested, "holm"] = holm(rows.difference_p[tested])
    return rows


@lru_cache
def by_score(name: str) -> dict[tuple[str, str], pd.DataFrame]:
    """Return a pair's rows by task and metric."""
    return dict(iter(pair(name).groupby(["task", "metric"])))


def scores(name, task, metric) -> pd.DataFrame:
    return by_score(name).get((task, metric), pair(name)[:0])


@lru_cache(None)
def by_quantizer(name, task, metric) -> dict[str, pd.DataFrame]:
    """Return the rows of one score by quantizer, "" of none."""
    rows = scores(name, task, metric)
    return dict(iter(rows.groupby(rows.quantizer.fillna(""))))


@lru_cache(None)
def select(name, task, metric, checkpoint, quantizer) -> pd.DataFrame:
    rows = by_quantizer(name, task, metric).get(quantizer or "", pair(name)[:0])
    return rows[[bool(re.fullmatch(checkpoint, str(one))) for one in rows.checkpoint.fillna("")]]


def find(name, task, metric, checkpoint, quantizer=None) -> pd.Series:
    """Return the row of one score or measurement."""
    rows = select(name, task, metric, checkpoint, quantizer)
    if len(rows) != 1:
        raise KeyError(f"{len(rows)} rows: {metric} of {task}, {name} {checkpoint}/{quantizer}")
    return rows.iloc[0]


def value(name, task, metric, checkpoint, quantizer=None) -> float:
    return float(find(name, task, metric, checkpoint, quantizer).value)


def mean(name, task, metric, checkpoint, quantizer=None, scale=1) -> float:
    """Return the mean over the seeds of ``checkpoint``, times ``scale``."""
    rows = select(name, task, metric, rf"{checkpoint}\.\d", quantizer)
    assert len(rows), (name, metric, checkpoint)
    return scale * float(rows.value.mean())


def by_layer(name, metric, checkpoint, quantizer=None) -> list[float]:
    """Return a measurement of each decoder layer, in order."""
    rows = pair(name)
    rows = rows[(rows.metric == metric) & (rows.checkpoint == checkpoint)]
    rows = rows[rows.quantizer.isna() if quantizer is None else rows.quantizer == quantizer]
    numbers = rows.task.str.extract(r"^layer (\d+)$")[0].dropna().astype(int)
    return [float(rows.value[index]) for index in numbers.sort_values().index]


def ranges(numbers) -> str:
    """Return "12–28, 30": ascending whole numbers, each run of them as a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}–{last}" if last > first else f"{first}" for first, last in runs)


def percent(name, task, metric, checkpoint, quantizer=None, decimals=1) -> str:
    return f"{100 * value(name, task, metric, checkpoint, quantizer):.{decimals}f}"


def kl(name, checkpoint, quantizer, task="all") -> float:
    """Return the mean KL divergence from the unquantized model, nats per token."""
    return value(name, task, "kl", checkpoint, quantizer)


def kl_interval(name, checkpoint, quantizer) -> str:
    """Return "0.305 [0.301, 0.309]": the KL divergence with its interval, three digits."""
    row = find(name, "all", "kl", checkpoint, quantizer)
    mean, low, high = (f"{n:#.3g}" for n in (row.value, row.damage_low, row.damage_high))
    return f"{mean} [{low}, {high}]"


def points(name, task, metric, checkpoint, quantizer) -> str:
    """Return "+1.9 [1.3, 2.5]": the percentage points that quantization loses."""
    row = find(name, task, metric, checkpoint, quantizer)
    loss, low, high = (100 * n for n in (row.damage, row.damage_low, row.damage_high))
    return f"{loss:+.1f} [{low:.1f}, {high:.1f}]".replace("-", "−")


def rounded(number: float, decimals: int) -> str:
    return f"{number:.{decimals if number < 10 else 1 if number < 100 else 0}f}"


def times(name, checkpoint, quantizer, task="wikitext", decimals=3) -> str:
    """Return "× 1.177": perplexity quantized over unquantized."""
    damage = find(name, task, METRICS[task], checkpoint, quantizer).damage
    return f"× {rounded(math.exp(damage), decimals if abs(damage) > 0.01 else 4)}"


def ratio(
    name, quantizer, task="wikitext", mark=False, interval=True, checkpoint="softpick", metric=""
) -> str:
    """Return "× 1.041 [1.034, 1.048]": softpick's damage over softmax's, of perplexity unless
    ``metric`` says; ``mark`` adds ‡ if it differs from 1 after Holm's correction over all
    differences of the pair."""
    row = find(name, task, metric or METRICS[task], checkpoint, quantizer)
    ends = row.difference, row.difference_low, row.difference_high
    middle, low, high = (math.exp(end) for end in ends)
    least = 2 if metric else 3
    decimals = min(max(1 - math.floor(math.log10(high - low)), least), 5)  # two digits of the width
    text = f"× {rounded(middle, decimals)}"
    if interval:
        text += f" [{rounded(low, decimals)}, {rounded(high, decimals)}]"
    return text + ("‡" if mark and row.holm < 0.05 else "")


def spread(name, pattern, task="wikitext") -> tuple[float, float, int, int, int]:
    """Return the least and largest ratio of damages over the precisions that ``pattern`` matches,
    how many there are, and how many intervals lie above and below 1."""
    rows = pair(name)[lambda rows: (rows.task == task) & (rows.metric == METRICS[task])]
    rows = rows[rows.quantizer.str.fullmatch(pattern) & rows.difference.notna()]
    above, below = (rows.difference_low > 0).sum(), (rows.difference_high < 0).sum()
    return (*map(math.exp, (rows.difference.min(), rows.difference.max())), len(rows), above, below)


def each(name, quantizer, task="wikitext") -> str:
    """Return softpick's damage over softmax's of every seed: "1.473, 1.457, 1.441"."""
    seeds = find(name, task, METRICS[task], "softpick", quantizer)["each"].split()
    return ", ".join(rounded(math.exp(float(seed)), 3) for seed in seeds)


def least(names, quantizers, task="wikitext") -> float:
    """Return the smallest of softpick's damages over softmax's, over pairs and quantizers."""
    cells = [(name, task, METRICS[task], "softpick", one) for name in names for one in quantizers]
    return min(math.exp(find(*cell).difference) for cell in cells)


def differences(name, kind="") -> pd.DataFrame:
    rows = pair(name)[pair(name).difference.notna()]
    return rows[rows.kind == kind] if kind else rows


def compared(name, kind="") -> int:
    """Return the number of differences that are tested: scores at chance are not."""
    return int(differences(name, kind).difference_p.notna().sum())


def counts(name, kind) -> str:
    """Return "2 and 6 of 64": significant differences in softpick's favour, against it, of all."""
    less, more = significant(name, kind=kind)
    return f"{less} and {more} of {compared(name, kind)}"


def precisions(name, kind) -> list[str]:
    return list(dict.fromkeys(differences(name, kind).quantizer))


def significant(*names, kind="", task="") -> tuple[int, int]:
    """Return how many differences are significant in softpick's favour and against it, after
    Holm's correction over all differences of the named pairs."""
    rows = pd.concat([differences(name) for name in names])
    rows = rows[rows.difference_p.notna()]
    marked = rows[pd.Series(holm(rows.difference_p), index=rows.index) < 0.05]
    marked = marked[(marked.kind == kind) | (not kind)]
    marked = marked[(marked.task == task) | (not task)].difference
    return int((marked < 0).sum()), int((marked > 0).sum())


def same_sign(name, seeds) -> tuple[int, int]:
    """Return how many of a pair's significant differences have their sign in each seed, and how
    many there are."""
    marked = differences(name)[differences(name).holm < 0.05]
    both = marked.merge(differences(seeds), on=KEYS, suffixes=("", "_seeds"))
    assert len(both) == len(marked)
    signs = zip(both.difference, both["each_seeds"], strict=True)
    return sum(all(float(s) * one > 0 for s in each.split()) for one, each in signs), len(both)


@lru_cache(None)
def kl_table(name, task) -> pd.DataFrame:
    """Return the logarithms of the KL [precisions, checkpoints]."""
    rows = scores(name, task, "kl")
    return rows.pivot(index="quantizer", columns="checkpoint", values="value").map(math.log)


@lru_cache(None)
def kl_gaps(name, kind, one="softpick", base="softmax", quantizer="", task="all") -> pd.DataFrame:
    """Return the logarithms of the KL of ``one`` over that of ``base``, [precisions, seeds]."""
    rows = scores(name, task, "kl")
    chosen = {quantizer} if quantizer else {*rows.quantizer[rows.kind == kind]}
    table = kl_table(name, task)
    table = table[table.index.isin(chosen)].dropna(axis=1, how="all")
    seeds = [column[len(one) :] for column in table if column.split(".")[0] == one]
    gaps = [table[one + seed] - table[base + seed] for seed in seeds]
    return pd.concat(gaps, axis=1) if gaps else pd.DataFrame(index=table.index, dtype=float)


def moves(*cells, **chosen) -> tuple[int, int, int]:
    """Return under how many precisions the KL of ``one`` is below that of ``base``, under how many
    above it (of several seeds: in each of them), and the number of precisions."""
    gaps = kl_gaps(*cells, **chosen)
    return int((gaps < 0).all(axis=1).sum()), int((gaps > 0).all(axis=1).sum()), len(gaps)


def kl_ratio(name, kind) -> str:
    """Return "× 1.12": softpick's KL over softmax's, geometric mean over precisions and seeds."""
    return f"× {math.exp(kl_gaps(name, kind).to_numpy().mean()):.2f}"


def direction(name, one, quantizer) -> str:
    """Return " ▲" if the KL of ``one`` is above softmax's in every seed, " ▼" if below."""
    if kl_gaps(name, "", one, quantizer=quantizer).empty:
        return ""
    less, more, _ = moves(name, "", one, quantizer=quantizer)
    return " ▼" if less else " ▲" if more else ""


def replicated(name) -> tuple[list[str], list[str]]:
    """Return the kinds of checkpoints of ``name``, and the precisions that each seed of all kinds
    with several seeds has, or that all kinds have if none has several."""
    rows = scores(name, "all", "kl")
    table = rows.pivot(index="quantizer", columns="checkpoint", values="value")
    kinds: dict[str, list[str]] = {}
    for column in dict.fromkeys(rows.checkpoint):
        kinds.setdefault(column.split(".")[0], []).append(column)
    several = [column for seeds in kinds.values() if len(seeds) > 1 for column in seeds]
    several = several or [column for seeds in kinds.values() for column in seeds]
    return list(kinds), list(table[several].dropna().index)


def of_kind(task, metric, kind, quantizer, decimals, scale=1, name="kinds") -> str:
    """Return the value of each seed of a kind of attention as text; a dash if it was not run."""
    values = select(name, task, metric, rf"{kind}(\.\d)?", quantizer).value
    return ", ".join(f"{scale * one:.{decimals}f}" for one in values) or "–"


def seed_gaps(kind, quantizers, *tasks, name="kinds") -> pd.Series:
    """Return, by seed, the logarithm of the KL of a kind of attention over softmax's on the texts
    ``tasks``, mean over ``quantizers`` and texts."""
    cells = product(quantizers, tasks)
    return pd.concat(
        [kl_gaps(name, "", kind, quantizer=one, task=task) for one, task in cells]
    ).mean()


def by_seed(*cells) -> str:
    """Return "1.09, 1.16, 1.12": the ratios of ``seed_gaps``."""
    return ", ".join(f"{math.exp(gap):.2f}" for gap in seed_gaps(*cells))


def over_seeds(*cells, name="kinds") -> str:
    """Return "× 1.38 [1.20, 1.59]": the geometric mean of the ratios of ``seed_gaps``, with
    Student's interval over seeds."""
    seeds = seed_gaps(*cells, name=name)
    half = t.ppf(0.975, len(seeds) - 1) * seeds.sem()
    mean, low, high = (rounded(math.exp(seeds.mean() + e), 2) for e in (0, -half, half))
    return f"× {mean} [{low}, {high}]"


def repeated() -> int:
    """Return how many trainings of kinds-27m later code repeated: all that was logged is equal, but
    speeds."""
    logs = [*(ROOT / "results" / "kinds-27m" / "training").glob("*/again.jsonl")]
    for path in logs:
        first, again = (
            [
                {k: v for k, v in json.loads(line).items() if k not in ("tokens_per_s", "mfu")}
                for line in each.read_text("utf-8").splitlines()
            ]
            for each in (path.with_name("log.jsonl"), path)
        )
        assert first == again, path
    return len(logs)


def gate_share(kind, part, name="kinds", seeds=(".1", ".2", ".3")) -> str:
    """Return "5 to 12 %": the part of a gated model's KL that quantizing the gate alone leaves
    (``gate``), or that quantizing all but the gate takes away (``but-gate``)."""
    shares = []
    for seed, method in product(seeds, ("w4a4-nvfp4", "nvfp4", "rtn-4bit")):
        methods = (method, f"{method}-{part}")
        whole, rest = (kl(name, kind + seed, one) for one in methods)
        shares.append(rest / whole if part == "gate" else 1 - rest / whole)
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %"


def answered(quantizer, column) -> list[float]:
    """Return a number of each kind's table of answers, in the order of results/kinds-27m-answers:
    of the row ``quantizer`` the ``column``, such as "Same answer" in per cent; first seeds."""
    numbers = []
    for kind in dict.fromkeys(pair("kinds answers").checkpoint):
        if not kind.endswith(".1"):  # whose answers are not kept
            continue
        head, _, *rows = (
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in table_of("kinds-27m-answers", f"Answers of {kind}").splitlines()
        )
        (row,) = (row for row in rows if row[0] == quantizer)
        numbers.append(float(row[head.index(column)].strip(" %‡").replace("−", "-")))
    return numbers


def layer_shares(kind, part, name="kinds") -> list[float]:
    """Return, by measured seed of the kinds that the pattern ``kind`` matches, how many per cent of
    the summed KL of all linear layers, quantized one at a time, the layers named ``part`` have; of
    "all" that sum over the KL of all at once. Empty if there are no such layers."""
    rows = pair(name).query("task == 'sensitivity'")
    rows = rows[rows.checkpoint.str.fullmatch(rf"{kind}(\.\d)?")]
    table = rows.pivot(index="checkpoint", columns="metric", values="value")
    if part not in table:
        return []
    together = table.pop("all")
    total = table.sum(axis=1)
    shares = total / together if part == "all" else 100 * table[part] / total
    return shares.dropna().tolist()


def seeds_text(numbers, decimals=0) -> str:
    """Return "11, 12, 10": a number per seed; a dash if there is none."""
    return ", ".join(f"{number:.{decimals}f}" for number in numbers) or "–"


def training_seconds(name="kinds") -> str:
    """Return how long the trainings of the kinds of attention took, "131 to 158"."""
    return from_to(select(name, "training", "seconds", ".*", None).value, "{:.0f}".format)


def seed_count(name, kind) -> int:
    """Return how many seeds of a kind of checkpoints were measured."""
    return len(select(name, "all", "kl", rf"{kind}\.\d", "gptq-4bit"))


def has(name, quantizer) -> bool:
    """Return whether a KL divergence under ``quantizer`` was measured in ``name``."""
    return bool((pair(name).query("metric == 'kl'").quantizer == quantizer).any())


def verdict(name, one, quantizers, tasks=("all",)) -> str:
    """Return how the KL of ``one`` compares with softmax's under ``quantizers``, as "**less**, ×
    0.71": in words if every seed agrees under each and on the texts of each of ``tasks``, bold if
    that is of several seeds and of all ``quantizers``, else "open 2 of 9" with the number of
    ratios below 1, and the geometric mean of the ratios."""
    cells = product(quantizers, tasks)
    gaps = pd.concat([kl_gaps(name, "", one, quantizer=each, task=task) for each, task in cells])
    bold = "**" if gaps.shape[1] > 1 and not gaps.isna().any(axis=None) else ""
    ratios = gaps.stack().dropna()
    if ratios.empty:
        return "not run"
    less, count = int((ratios < 0).sum()), len(ratios)
    words = {count: f"{bold}less{bold}", 0: f"{bold}more{bold}"}.get(
        less, f"open {less} of {count}"
    )
    return f"{words}, × {rounded(math.exp(ratios.mean()), 2)}"


def require(claim: bool, words: str) -> str:
    """Return ``words``, which the numbers must support; raise if they do not."""
    if not claim:
        raise ValueError(f"not so any more: {words}")
    return words


@lru_cache
def bench_rows(page: str) -> list[dict[str, str]]:
    rows, head = [], None
    for line in (ROOT / "results" / "bench" / f"{page}.md").read_text("utf-8").splitlines():
        cells = [part.strip() for part in line.strip("|").split("|")] if line[:1] == "|" else None
        if cells is None or head is None:
            head = cells
        elif not re.fullmatch(r"[|:\- ]+", line):
            rows.append(dict(zip(head, cells, strict=True)))
    return rows


def cell(page, column, **where) -> str:
    """Return a cell of a table in results/bench/PAGE.md, in the row with the texts in ``where``."""
    rows = [row for row in bench_rows(page) if column in row and where.items() <= row.items()]
    if len(rows) != 1:
        raise KeyError(f"{page}: {len(rows)} rows have {where}")
    return rows[0][column]


@lru_cache
def _answers() -> pd.Series:
    table = pd.read_csv(ROOT / "docs" / "answers.csv", dtype=str)
    return table.set_index(["checkpoint", "name"])["value"]


def answers(checkpoint, name) -> str:
    """Return a number of docs/answers.csv."""
    return _answers()[checkpoint, name]


def table_of(folder, title) -> str:
    """Return the table under ``title`` in results/FOLDER/tables.md."""
    text = (ROOT / "results" / folder / "tables.md").read_text("utf-8")
    return text.split(f"### {title}\n\n", 1)[1].split("\n\n", 1)[0]


def rate(page, shape, *kernels) -> str:
    """Return how many times as fast the first kernel's causal forward pass is as the second's."""
    where = {"shape": shape, "variant": "causal"}
    ours, theirs = (float(cell(page, "forward TFLOP/s", kernel=one, **where)) for one in kernels)
    return f"{ours / theirs:.2f}"


def by_method(name, checkpoint) -> dict[str, list[str]]:
    """Return the precisions of a checkpoint by method, those that differ in the calibration's seed
    together, the least KL divergence first."""
    rows = pair(name).query("task == 'all' and metric == 'kl' and checkpoint == @checkpoint")
    rows = rows.sort_values("value")
    methods: dict[str, list[str]] = {}
    for quantizer in dict.fromkeys(rows.quantizer):
        methods.setdefault(re.sub(r"-s\d$", "", quantizer), []).append(quantizer)
    return methods


def from_to(numbers, text) -> str:
    """Return one number as ``text`` writes it, or the least and the largest of several."""
    ends = [text(n) for n in (min(numbers), max(numbers))]
    return " to ".join(dict.fromkeys(ends))


def over_rounding(name, checkpoint, quantizer) -> str:
    """Return a precision's KL over that of rounding to nearest with as many bits, with its interval
    and p, paired by document."""
    row = find(name, "all", "kl over rounding", checkpoint, quantizer)
    ends = (row.damage, row.damage_low, row.damage_high)
    text = "× {:.3f} [{:.3f}, {:.3f}]".format(*map(math.exp, ends))
    return f"{text}, p {'< 0.001' if row.damage_p < 0.001 else f'= {row.damage_p:.3f}'}"


def methods_table(name, checkpoint) -> str:
    """Return a Markdown table with a row per method: of several seeds the least and the largest
    value, of one the value with its interval; tokens/s, and bf16's in that window, if the page of
    speeds has the model."""
    speeds = {row["precision"]: f"{row['tokens/s']} of {row['bf16']}"
              for row in bench_rows("cells-h200") if row.get("model") == checkpoint}  # fmt: skip
    lines = ["| | bits per weight | GiB | KL | WikiText | LAMBADA, points | seconds |",
             "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]  # fmt: skip
    if speeds:
        lines = [f"{line} {more} |" for line, more in zip(lines, ("tokens/s", "---:"), strict=True)]
    for method, members in by_method(name, checkpoint).items():
        sizes = (value(name, "all", what, checkpoint, members[0]) for what in ("bits", "gib"))
        seconds = [value(name, "all", "seconds", checkpoint, one) for one in members]
        text = kl_interval(name, checkpoint, members[0])
        if len(members) > 1:
            text = from_to([kl(name, checkpoint, one) for one in members], "{:#.3g}".format)
        found = [find(name, *score, checkpoint, one) for one in members for score in SCORED]
        words, points = ([row.damage for row in found[start::2]] for start in (0, 1))
        wikitext = from_to([math.exp(one) for one in words], lambda n: rounded(n, 3))
        lambada = from_to([100 * one for one in points], "{:+.1f}".format)
        short = re.sub(r"-\d+-steps$", "", method)
        alike = short.replace("gptaq", "gptqmodel")  # whose copies have the same format
        speed = speeds.get(short) or (f"as {alike}" if alike in speeds else "")
        row = (
            method, f"{next(sizes):.2f}", f"{next(sizes):.3f}", text, f"× {wikitext}", lambada,
            from_to(seconds, "{:.0f}".format), *([speed] if speeds else []),
        )  # fmt: skip
        lines.append(f"| {' | '.join(row)} |".replace("-0.0", "0.0").replace(" -", " −"))
    return "\n".join(lines)


@lru_cache
def gptq_library() -> list[dict[str, object]]:
    """Return our GPTQ beside GPTQModel's, a row per setting. ``z``: the logarithm of the library's
    KL minus the mean of ours over seeds of the calibration text, in standard errors of a new draw;
    ``another``: the 95 % interval of such a draw. Of fewer than 3 seeds both are None."""
    rows = []
    orders = {"x": "group-aware", "g": "as stored", "d": "by activation"}
    suffixes = {"x": "", "g": "-group_aware-false", "d": "-desc_act-true"}
    for bits, symmetric, order in product((8, 4, 3, 2), "sa", orders):
        name = f"gptq-{bits}bit{'' if symmetric == 's' else '-symmetric-false'}{suffixes[order]}"
        effect = find("gptq", "all", "kl over library", "smollm2", name)
        row = {"setting": f"{bits} bits, {'a' * (symmetric == 'a')}symmetric, {orders[order]}",
               "ours": kl("gptq", "smollm2", name), "p": effect.damage_p,
               "library": kl("gptq", "smollm2", name.replace("gptq-", "gptqmodel-")),
               "ratio": [math.exp(effect[f"damage{end}"]) for end in ("", "_low", "_high")],
               "z": None, "another": None}  # fmt: skip
        rows.append(row)
        table = pair("gptq seeds").query("task == 'all' and metric == 'kl'")
        seeds = table[table.quantizer.str.startswith(f"g{bits}{symmetric}{order}-")].value
        row["seeds"] = [row["ours"], *seeds]
        if (count := len(row["seeds"])) >= 3:
            logs = [math.log(seed) for seed in row["seeds"]]
            error = stdev(logs) * math.sqrt(1 + 1 / count)
            row["z"] = (math.log(row["library"]) - fmean(logs)) / error
            limit = t.ppf(0.975, count - 1)
            row["another"] = [math.exp(fmean(logs) + sign * limit * error) for sign in (-1, 1)]
            row["within"] = abs(row["z"]) < limit
    for row, p in zip(rows, holm(pd.Series([row["p"] for row in rows])), strict=True):
        row["holm"] = p
    return rows


@lru_cache
def budgets() -> list[dict[str, Any]]:
    """Return the results of `qbench budget`, one per folder results/budget-NAME."""
    results = []
    for folder, title in BUDGETS.items():
        values = json.loads((ROOT / "results" / folder / "budget.json").read_text())
        results.append(values | {
            "folder": folder, "title": title,
            "choices": len(values["costs"]), "layers": len(values["mixes"][0]["layers"]),
            "by_label": {mix["label"]: mix for mix in values["mixes"]},
        })  # fmt: skip
        kl = {each["label"]: each["kl"] for each in values["uniform"]}
        ratios = {each["mix"]: each.get("ratio") for each in values["certificates"]}
        for mix in values["mixes"]:
            mix["uniform_kl"], mix["ratio"] = kl.get(mix["best_uniform"]), ratios.get(mix["label"])
            mix["choices"] = len(values["costs"])
        for peer in values["peers"]:
            results[-1]["by_label"][peer["mix"]][peer["other"]] = peer.get("ratio")
        if folder == "budget-smollm2-peers":  # cells of budget-smollm2-alone, and peers beside them
            results[-1]["certificates"] = []
    return results


def find_budget(folder: str, label: str) -> dict[str, Any]:
    """Return the mix ``label`` of results/``folder``."""
    return next(each["by_label"][label] for each in budgets() if each["folder"] == folder)


def kl_over_sum(*labels: str) -> str:
    """Return the least and the largest measured KL of the mixes ``labels`` of trained models over
    their sums of costs."""
    trained = [result for result in budgets() if "random" not in result["title"]]
    mixes = [mix for result in trained for mix in result["mixes"] if mix["label"] in labels]
    return from_to([mix["kl"] / mix["sum"] for mix in mixes], "{:.2f}".format)


def planned_rate(device: str, kind: str) -> str:
    """Return what ``qbench plan`` assumes of ``device``: seconds, or 10⁹ operations per second."""
    number = RATES[device][kind]
    return f"{number / 1e9 if number > 1e9 else number:,.0f}"


FUNCTIONS = (
    budgets, find_budget, kl_over_sum, gptq_library, from_to,
    by_method, methods_table, over_rounding, find, by_layer, ranges,
    value, mean, percent, kl, kl_interval, points, times, ratio, spread, each, least, compared,
    counts, precisions, significant, same_sign, moves, kl_ratio, direction, require, cell, rate,
    planned_rate, answers, table_of, replicated, has, verdict, of_kind, by_seed, over_seeds,
    seed_count,
    gate_share, repeated, answered, layer_shares, seeds_text, training_seconds,
)  # fmt: skip


def pages() -> dict[Path, str]:
    """Return the text of every page that has a template."""
    loader = jinja2.FileSystemLoader(TEMPLATES)
    options = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    made = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, **options)
    made.globals |= {function.__name__: function for function in FUNCTIONS}
    made.globals |= {"REAL_SINKS": REAL_SINKS, "PRECISION_GROUPS": PRECISION_GROUPS}
    return {ROOT / name: made.get_template(name).render() for name in loader.list_templates()}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
