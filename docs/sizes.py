"""The pairs with attention sinks of 27 M and of 126 M parameters side by side: a page and a figure
of results/sinks-124m, `python docs/sizes.py`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from matplotlib import pyplot

from qbench.api import compare
from qbench.statistics import Effect
from qbench.store import Store

RESULTS = Path(__file__).parent.parent / "results"
SIZES = {  # the folders of each pair
    "27 M": ("sinks-27m", "sinks-27m-activations", "sinks-27m-kv"),
    "126 M": ("sinks-124m",),
}
KINDS = ("weights", "activations", "KV cache")
TICKS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2)


class Row(NamedTuple):
    """Of a precision and a pair: WikiText's damage to softpick against that to softmax (a ratio of
    ratios of perplexities, as a logarithm), and each model's KL divergence from itself
    unquantized, in nats a token."""

    difference: Effect | None
    softmax: float | None
    softpick: float | None


def kind(quantizer: str) -> str:
    known = {"bnb": KINDS[0], "gptq": KINDS[0], "hqq": KINDS[0], "kv": KINDS[2]}
    return next((name for begin, name in known.items() if quantizer.startswith(begin)), KINDS[1])


@cache
def rows() -> dict[str, dict[str, Row]]:
    """By precision, then by size."""
    found: dict[str, dict[str, Row]] = {}
    for size, folders in SIZES.items():
        for folder in folders:
            means = {}
            for record in Store(RESULTS / folder).records():
                tasks = record.damage.tasks.values() if record.damage else ()
                known = [task.distributions for task in tasks if task.distributions]
                if known:
                    total = sum(one.tokens * one.kl.mean for one in known)
                    mean = total / sum(one.tokens for one in known)
                    means[record.checkpoint, record.quantizer] = mean
            for line in compare(RESULTS / folder).lines:
                if line.task == "wikitext" and line.metric == "word_perplexity":
                    name = line.quantizer
                    kls = (means.get((one, name)) for one in ("softmax", "softpick"))
                    if name != "bf16":
                        row = Row(line.differences.get("softpick"), *kls)
                        found.setdefault(name, {})[size] = row
    return dict(sorted(found.items(), key=lambda item: KINDS.index(kind(item[0]))))


def table() -> Iterator[str]:
    """Lines of Markdown."""
    yield "| | | " + " | ".join(f"WikiText, {size} | KL, {size}" for size in SIZES) + " |"
    yield "| --- | --- |" + " ---: | ---: |" * len(SIZES)
    for quantizer, sizes in rows().items():
        cells = [kind(quantizer), quantizer]
        for size in SIZES:
            row = sizes[size]
            cells.append(ratio(row.difference))
            kls = (row.softmax, row.softpick)
            cells.append(" / ".join("–" if one is None else f"{one:.4f}" for one in kls))
        yield f"| {' | '.join(cells)} |"


def ratio(effect: Effect | None) -> str:
    """``× 0.220 [0.207, 0.237]‡``"""
    if effect is None:
        return "–"
    interval = effect.interval
    value, low, high = (math.exp(x) for x in (interval.estimate, interval.low, interval.high))
    return f"× {value:.3f} [{low:.3f}, {high:.3f}]{effect.mark}"


def parameters(size: str) -> int:
    path = RESULTS / SIZES[size][0] / "training" / "softmax-seed0" / "training.json"
    return json.loads(path.read_text())["parameters"]


def draw(path: Path) -> None:
    """A panel a kind; a line a precision, from one size to the other."""
    pyplot.rcParams["svg.hashsalt"] = "qbench"
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 5.5), layout="constrained")
    places = [parameters(size) for size in SIZES]
    every = rows()
    for panel, name in zip(panels, KINDS, strict=True):
        there = [one for one in every if kind(one) == name]
        colours = pyplot.get_cmap("tab20")
        for number, quantizer in enumerate(there):
            effects = [every[quantizer][size].difference for size in SIZES]
            known = [(x, e.interval) for x, e in zip(places, effects, strict=True) if e]
            offset = 1 + 0.012 * (number - len(there) / 2)
            middle = [math.exp(one.estimate) for _, one in known]
            low = [m - math.exp(one.low) for m, (_, one) in zip(middle, known, strict=True)]
            high = [math.exp(one.high) - m for m, (_, one) in zip(middle, known, strict=True)]
            panel.errorbar(
                [x * offset for x, _ in known], middle, (low, high), label=quantizer,
                color=colours(number % 20), marker="o" if len(known) > 1 else "s", markersize=4,
                linewidth=1.2, capsize=2,
            )  # fmt: skip
        panel.axhline(1, color="0.6", linewidth=0.8, zorder=0)
        panel.set(xscale="log", yscale="log", title=name, xlabel="parameters")
        panel.set_xticks(places, list(SIZES))
        panel.minorticks_off()
        low, high = panel.get_ylim()
        ticks = [one for one in TICKS if low < one < high]
        panel.set_yticks(ticks, [f"× {one:g}" for one in ticks])
        panel.set_xlim(places[0] / 1.25, places[1] * 1.25)
        panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    panels[0].set_ylabel("WikiText: softpick's damage / softmax's")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    folder = RESULTS / "sinks-124m"
    text = (folder / "sizes.md").read_text(encoding="utf-8")
    begin = text.index("| | |")
    (folder / "sizes.md").write_text(text[:begin] + "\n".join(table()) + "\n", encoding="utf-8")
    draw(folder / "sizes.svg")


if __name__ == "__main__":
    main()
