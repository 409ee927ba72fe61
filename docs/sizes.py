"""Draw results/methods/quality.svg, SmolLM2's quality against size by method, and
results/sinks-124m/sizes.svg: softpick's damage over softmax's on WikiText, by precision,
for the pairs with attention sinks of 27 M and of 126 M parameters, and, once it was measured,
results/kinds-27m/kinds.svg. `make pages` runs it."""

import math

from generate import KINDS, ROOT, by_method, find, kl_gaps, pair, precisions, replicated, value
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


def draw_methods() -> pyplot.Figure:
    """Return a figure of SmolLM2's KL divergence against its bits per weight below 5: a point per
    method, and a bar over the seeds of its calibration or, of one seed, the 95 % interval."""
    pyplot.rcParams["svg.hashsalt"] = "qbench"
    figure, panel = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    heights: dict[float, float] = {}  # of the last label at a size, so that labels do not overlap
    methods = by_method("methods", "smollm2")
    mean_kl = {m: sum(value("methods", "all", "kl", "smollm2", label) for label in members)
               / len(members) for m, members in methods.items()}  # fmt: skip
    for method in sorted(methods, key=mean_kl.__getitem__):
        members, middle = methods[method], mean_kl[method]
        rows = [find("methods", "all", "kl", "smollm2", one) for one in members]
        values = [row.value for row in rows]
        ends = values if len(rows) > 1 else (rows[0].damage_low, rows[0].damage_high)
        bits = value("methods", "all", "bits", "smollm2", members[0])
        if bits > 5:
            continue
        bars = [[middle - min(ends)], [max(ends) - middle]]
        panel.errorbar([bits], [middle], bars, fmt="o" if len(rows) > 1 else "s", capsize=3)
        size = round(bits, 1)
        heights[size] = max(middle, 1.1 * heights.get(size, 0))
        shift, beside = (-0.025, "right") if 4.3 < bits < 4.45 else (0.025, "left")
        if 4.33 < bits < 4.37:  # between columns at 4.3, 4.4 and 4.5: below its point
            panel.text(bits, 0.96 * middle, method, fontsize=9, va="top", ha="center")
            continue
        panel.text(bits + shift, heights[size], method, fontsize=9, va="center", ha=beside)
    panel.set(yscale="log", xlabel="bits per weight", title="SmolLM2-135M-Instruct")
    panel.set(xlim=(3.2, 4.8), ylabel="KL divergence from the unquantized model, nats per token")
    return figure


KIND_LABELS = {"head-gate": "gate per head", "element-gate": "gate per element",
               "softmax-sink": "learned sinks"}  # fmt: skip


def draw_kinds(kinds: list[str], columns: list[str]) -> pyplot.Figure:
    """Return a figure of the KL divergence of each kind of attention over softmax's: a row per
    precision, a point per seed."""
    pyplot.rcParams["svg.hashsalt"] = "qbench"
    figure, panel = pyplot.subplots(figsize=(9, 0.34 * len(columns) + 1.6), layout="constrained")
    others = [kind for kind in kinds if kind != "softmax"]
    for number, kind in enumerate(others):
        gaps = [kl_gaps("kinds", "", kind, quantizer=one).to_numpy().ravel() for one in columns]
        points = [(gap, row) for row, each in enumerate(gaps) for gap in each]
        shift = 0.7 * ((number + 0.5) / len(others) - 0.5)
        panel.plot([math.exp(gap) for gap, _ in points], [row + shift for _, row in points],
                   "os^vDP"[number % 6], markersize=4,
                   label=KIND_LABELS.get(kind, kind))  # fmt: skip
    panel.axvline(1, color="0.6", linewidth=0.8, zorder=0)
    panel.set_yticks(range(len(columns)), columns)
    panel.set_xscale("log")
    ticks = (0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 7)
    panel.set_xticks(ticks, [f"× {tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_xlabel("KL divergence over softmax's of the same seed; left: moved less")
    panel.invert_yaxis()
    panel.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=6)
    return figure


if __name__ == "__main__":
    kinds, columns = replicated("kinds")
    path = ROOT / "results" / "kinds-27m" / "kinds.svg"
    draw_kinds(kinds, columns).savefig(path, metadata={"Date": None})
    draw_methods().savefig(ROOT / "results" / "methods" / "quality.svg", metadata={"Date": None})
    draw().savefig(ROOT / "results" / "sinks-124m" / "sizes.svg", metadata={"Date": None})
