"""Curves of one recipe's runs, as figures 2 and 7 of the softpick paper. Imports no torch."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.ticker import Formatter

PANELS = (
    ("step", "loss", "training loss (nats a token)", False),
    ("step", "grad_norm", "gradient norm (largest of the logged steps)", True),
    ("watch", "loss", "held-out loss (nats a token)", False),
    ("watch", "sink_rate", "sink rate (mean weight on the first token > 0.3)", False),
    ("watch", "kurtosis", "kurtosis of hidden states", True),
    ("watch", "largest", "largest |hidden state|", True),
)
FEW = 10  # points of a run


def plot(logs: Mapping[tuple[str, int], Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Write the curves of runs by (normalizer, seed) to ``path`` (.svg, .png or .pdf): one colour
    and stroke a normalizer, a line a seed. Their numbers stand in the runs' logs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    normalizers = list(dict.fromkeys(normalizer for normalizer, _ in logs))
    looks = {name: _look(index) for index, name in enumerate(normalizers)}
    with pyplot.rc_context({"svg.hashsalt": "qbench", "font.size": 9}):
        figure, axes = pyplot.subplots(2, 3, figsize=(13, 7), layout="constrained")
        for axis, (kind, value, title, logarithmic) in zip(axes.flat, PANELS, strict=True):
            for (normalizer, _), lines in logs.items():
                points = [
                    (line["step"], line[value])
                    for line in lines
                    if line["kind"] == kind and (line["step"] > 0 or value != "loss")
                ]
                if points:
                    axis.plot(
                        *zip(*points, strict=True),
                        **looks[normalizer],
                        linewidth=1.0,
                        marker="o" if len(points) < FEW else None,  # one point makes no line
                        markersize=3.0,
                        alpha=0.9,
                        label=_label(normalizer, logs),
                    )
            axis.set_title(title)
            axis.set_xlabel("step")
            if logarithmic and axis.lines:
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter(_plain_numbers())
                axis.yaxis.set_minor_formatter(_plain_numbers())
            if value == "sink_rate":
                top = max(0.05, axis.get_ylim()[1])
                axis.set_ylim(bottom=-0.02 * top, top=top)  # a rate of 0 lies beside the frame
            axis.grid(alpha=0.25)
        handles, labels = axes.flat[0].get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        if once:
            figure.legend(
                once.values(), once.keys(), loc="outside lower center", ncols=min(6, len(once))
            )
        drawn = io.BytesIO()
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(drawn, format=path.suffix.removeprefix("."), metadata=metadata, dpi=120)
        pyplot.close(figure)
    write_atomically(path, drawn.getvalue())


def _plain_numbers() -> Formatter:
    """Of a logarithmic axis: ``0.6``, where matplotlib writes 6 × 10⁻¹."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    return Plain(labelOnlyBase=False, minor_thresholds=(2, 0.5))


def _label(normalizer: str, logs: Mapping[tuple[str, int], object]) -> str:
    seeds = [str(seed) for name, seed in logs if name == normalizer]
    return f"{normalizer}, seed{'s' if len(seeds) > 1 else ''} {', '.join(seeds)}"


def _look(index: int) -> dict[str, str]:
    """Okabe and Ito's palette, told apart with any colour vision; strokes tell as well."""
    safe = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
    strokes = ["-", "--", "-.", ":"]
    return {"color": safe[index % len(safe)], "linestyle": strokes[index % len(strokes)]}
