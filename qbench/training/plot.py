"""Curves of one recipe's runs, as figures 2 and 7 of the softpick paper. Imports no torch."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qbench.files import write_atomically

PANELS = (
    ("step", "loss", "training loss (nats a token)", False),
    ("step", "grad_norm", "gradient norm (largest of the logged steps)", True),
    ("watch", "loss", "held-out loss (nats a token)", False),
    ("watch", "sink_rate", "sink rate (mean weight on the first token > 0.3)", False),
    ("watch", "kurtosis", "kurtosis of hidden states", True),
    ("watch", "largest", "largest |hidden state|", True),
)


def plot(logs: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Write the curves of runs by (normalizer, seed) to ``path`` (.svg, .png or .pdf): one colour
    a normalizer, a line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    normalizers = list(dict.fromkeys(normalizer for normalizer, _ in logs))
    colours = dict(zip(normalizers, _colours(len(normalizers)), strict=True))
    with pyplot.rc_context({"svg.hashsalt": "qbench", "font.size": 9}):
        figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), layout="constrained")
        for axis, (kind, value, title, logarithmic) in zip(axes.flat, PANELS, strict=True):
            for (normalizer, seed), lines in logs.items():
                points = [
                    (line["step"], line[value])
                    for line in lines
                    if line["kind"] == kind and (line["step"] > 0 or value != "loss")
                ]
                if points:
                    axis.plot(
                        *zip(*points, strict=True),
                        color=colours[normalizer],
                        linewidth=0.9,
                        alpha=0.9,
                        label=f"{normalizer}, seed {seed}",
                    )
            axis.set_title(title)
            axis.set_xlabel("step")
            if logarithmic and axis.lines:
                axis.set_yscale("log")
            axis.grid(alpha=0.25)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)))
        drawn = io.BytesIO()
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(drawn, format=path.suffix.removeprefix("."), metadata=metadata, dpi=120)
        pyplot.close(figure)
    write_atomically(path, drawn.getvalue())


def _colours(count: int) -> list[str]:
    safe = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
    return [safe[index % len(safe)] for index in range(count)]
