"""Draw results/methods/quality.svg, quality against size by method, and
results/sinks-124m/sizes.svg: softpick's damage over softmax's on WikiText, by precision,
for the pairs with attention sinks of 27 M and of 126 M parameters, and, once it was measured,
results/kinds-27m/kinds.svg. `make pages` runs it."""

import math
from itertools import zip_longest

from generate import (
    KINDS,
    PRECISION_GROUPS,
    ROOT,
    by_method,
    find,
    kl_gaps,
    pair,
    precisions,
    replicated,
    value,
)
from matplotlib import pyplot

SIZES = {"27 M": "sinks", "126 M": "126M"}
TICKS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2)


def ratios(name: str, quantizer: str) -> tuple[float, float, float]:
    """Return the ratio of damages and the ends of its interval."""
    rows = pair(name).query("task == 'wikitext' and metric == 'word_perplexity'")
    row = rows[(rows.quantizer == quantizer) & rows.difference.notna()].iloc[0]
    return tuple(math.exp(row[f"difference{end}"]) for end in ("", "_low", "_high"))


def draw() -> pyplot.Figure:
    """Return a figure with one panel per kind and one line per precision."""
    pyplot.rcParams["svg.hashsalt"] = "qbench"
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 5.5), layout="constrained")
    sizes = [value(name, "training", "parameters", "softmax.0") for name in SIZES.values()]
    for panel, kind in zip(panels, KINDS, strict=True):
        names = sorted({*precisions("sinks", kind), *precisions("126M", kind)})
        for number, quantizer in enumerate(names):
            known = [
                (size, ratios(name, quantizer))
                for size, name in zip(sizes, SIZES.values(), strict=True)
                if quantizer in precisions(name, kind)
            ]
            offset = 1 + 0.012 * (number - len(names) / 2)  # so that bars do not cover each other
            panel.errorbar(
                [size * offset for size, _ in known],
                [middle for _, (middle, _, _) in known],
                [[m - low for _, (m, low, _) in known], [high - m for _, (m, _, high) in known]],
                label=quantizer, color=pyplot.get_cmap("tab20")(number % 20), markersize=4,
                marker="o" if len(known) > 1 else "s", linewidth=1.2, capsize=2,
            )  # fmt: skip
        panel.axhline(1, color="0.6", linewidth=0.8, zorder=0)
        panel.set(xscale="log", yscale="log", title=kind, xlabel="parameters")
        panel.set_xticks(sizes, list(SIZES))
        panel.minorticks_off()
        low, high = panel.get_ylim()
        ticks = [tick for tick in TICKS if low < tick < high]
        panel.set_yticks(ticks, [f"× {tick:g}" for tick in ticks])
        panel.set_xlim(sizes[0] / 1.25, sizes[1] * 1.25)
        panel.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    panels[0].set_ylabel("WikiText: softpick's damage / softmax's")
    return figure


MODELS = {("methods", "smollm2"): "SmolLM2-135M-Instruct",
          ("methods-27m", "softmax"): "27M, softmax"}  # fmt: skip


def draw_methods() -> pyplot.Figure:
    """Return a figure of KL divergence against bits per weight below 5, a panel per model: a point
    per method, and a bar over the seeds of its calibration or, of one seed, the 95 % interval."""
    pyplot.rcParams["svg.hashsalt"] = "qbench"
    figure, panels = pyplot.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    for panel, ((name, checkpoint), title) in zip(panels, MODELS.items(), strict=True):
        heights: dict[float, float] = {}  # of the last label of a column
        methods = by_method(name, checkpoint)
        rows = {method: [find(name, "all", "kl", checkpoint, one) for one in members]
                for method, members in methods.items()}  # fmt: skip
        middle = {method: sum(row.value for row in of) / len(of) for method, of in rows.items()}
        for method in sorted(methods, key=middle.__getitem__):
            bits = value(name, "all", "bits", checkpoint, methods[method][0])
            if bits > 5:
                continue
            of, kl = rows[method], middle[method]
            several = len(of) > 1
            ends = [r.value for r in of] if several else (of[0].damage_low, of[0].damage_high)
            bars = [[kl - min(ends)], [max(ends) - kl]]
            panel.errorbar([bits], [kl], bars, fmt="o" if several else "s", capsize=3)
            column = 3.78 if bits < 4 else 4.68
            heights[column] = max(kl, 1.13 * heights.get(column, 0))
            panel.annotate(
                method, (bits, kl), (column, heights[column]), fontsize=9, va="center",
                arrowprops={"arrowstyle": "-", "color": "0.7", "linewidth": 0.7, "shrinkB": 3,
                            "relpos": (0, 0.5)},
            )  # fmt: skip
        panel.set(yscale="log", xlabel="bits per weight", title=title, xlim=(3, 5.4))
    panels[0].set_ylabel("KL divergence from the unquantized model, nats per token")
    return figure


KIND_LABELS = {"head-gate": "gate per head", "element-gate": "gate per element",
               "softmax-sink": "learned sinks"}  # fmt: skip


def draw_kinds(kinds: list[str], columns: list[str]) -> pyplot.Figure:
    """Return a figure of the KL divergence of each kind of attention over softmax's: a panel per
    kind, a row per precision, a point per seed and text, hollow on LAMBADA's."""
    pyplot.rcParams["svg.hashsalt"] = "qbench"
    others = [kind for kind in kinds if kind != "softmax"]
    rows = -(-len(others) // 3)
    figure, panels = pyplot.subplots(
        rows, 3, figsize=(9, rows * (0.15 * len(columns) + 0.7)), sharex=True, sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for panel, kind in zip_longest(panels.flat, others):
        if kind is None:
            panel.set_visible(False)
            continue
        for task, fill, shift in (("wikitext", "C0", -0.17), ("lambada_openai", "none", 0.17)):
            gaps = [kl_gaps("kinds", "", kind, quantizer=one, task=task) for one in columns]
            points = [
                (gap, row) for row, each in enumerate(gaps) for gap in each.to_numpy().ravel()
            ]
            panel.plot([math.exp(gap) for gap, _ in points], [row + shift for _, row in points],
                       "o", markersize=4, color="C0", markerfacecolor=fill)  # fmt: skip
        panel.axvline(1, color="0.6", linewidth=0.8, zorder=0)
        panel.set_title(KIND_LABELS.get(kind, kind), fontsize=10)
        panel.tick_params(labelsize=8, labelbottom=True)
        panel.grid(axis="y", color="0.93")
        panel.set_axisbelow(True)
    first = panels[0, 0]
    first.set_yticks(range(len(columns)), columns)
    first.set_xscale("log")
    ticks = (0.3, 0.5, 1, 2, 4)
    first.set_xticks(ticks, [f"× {tick:g}" for tick in ticks])
    first.minorticks_off()
    first.invert_yaxis()
    figure.supxlabel("KL over softmax's; left: moved less; filled: WikiText, hollow: LAMBADA",
                     fontsize=10)  # fmt: skip
    return figure


if __name__ == "__main__":
    kinds, columns = replicated("kinds")
    columns = [one for names in PRECISION_GROUPS.values() for one in names if one in columns]
    path = ROOT / "results" / "kinds-27m" / "kinds.svg"
    draw_kinds(kinds, columns).savefig(path, metadata={"Date": None})
    draw_methods().savefig(ROOT / "results" / "methods" / "quality.svg", metadata={"Date": None})
    draw().savefig(ROOT / "results" / "sinks-124m" / "sizes.svg", metadata={"Date": None})
