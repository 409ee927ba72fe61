"""Say whether a mix is better than the best uniform column, and draw KL against bits. Imports no
torch."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from qbench.comparison.losses import kl_column
from qbench.comparison.wording import effect_text, interval_text, nats
from qbench.files import write_atomically
from qbench.quantizers.config import alike
from qbench.records import Record
from qbench.statistics import KL_MEAN, Effect, Missing, Panel, adjust, effect
from qbench.store import Store
from qbench.viewer.figures import COLOURS, MARKERS, STYLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Holds the KL divergence of a ``mix`` over that of another column, on a run's documents."""

    mix: str
    other: str
    answer: Effect | Missing
    records: tuple[Record, Record]

    def text(self) -> str:
        """Return the certificate, a sentence."""
        sizes = [
            f"{record.quantizer} ({record.audit.size.bits_per_weight:.2f} bits per weight)"
            for record in self.records
        ]
        if isinstance(self.answer, Missing):
            return f"{sizes[0]} against {sizes[1]}: no test: {self.answer.reason}."
        size = f"KL {effect_text(self.answer, percent=False).rstrip('‡')} "
        size += interval_text(self.answer, percent=False).removeprefix("× ")
        claim = "is not shown to be better than"
        if self.answer.significant:
            claim = f"is significantly {'better' if self.answer.estimate < 0 else 'worse'} than"
        better = self.answer.significant and self.answer.estimate < 0
        tests = f", Holm’s correction over {self.answer.family}" if self.answer.family > 1 else ""
        text = f"{sizes[0]} {claim} {sizes[1]}: {size}, {self.answer.documents:,} documents{tests}"
        return f"{text}." if better else f"{text}; take {self.other}."

    def to_dict(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"mix": self.mix, "other": self.other, "text": self.text()}
        for what, record in zip(("mix", "other"), self.records, strict=True):
            parts[f"{what}_bits"] = record.audit.size.bits_per_weight
            parts[f"{what}_gib"] = record.audit.size.gib
        if isinstance(self.answer, Effect):
            interval = self.answer.interval
            parts |= {
                "ratio": math.exp(interval.estimate), "low": math.exp(interval.low),
                "high": math.exp(interval.high), "p_holm": self.answer.p_holm,
                "documents": self.answer.documents, "significant": self.answer.significant,
            }  # fmt: skip
        return parts


def compare_with(store: Store, pairs: Sequence[tuple[str, str]]) -> list[Comparison]:
    """Return the comparison of each (mix, other column) whose records are finished; p-values are
    corrected over all of them."""
    records = {record.quantizer: record for record in store.records() if record.status == "ok"}
    pairs = [pair for pair in pairs if all(name in records for name in pair)]
    columns = {name: kl_column(store, records[name]) for pair in pairs for name in pair}
    answers: list[Effect | Missing] = []
    for mix, other in pairs:
        both = {name: columns[name] for name in (mix, other)}
        if None in both.values():
            answers.append(Missing(reason="no KL divergence was measured"))
        else:
            answers.append(effect(Panel.of(both), {mix: 1.0, other: -1.0}, KL_MEAN))
    tested = iter(adjust([each for each in answers if isinstance(each, Effect)]))
    answers = [next(tested) if isinstance(each, Effect) else each for each in answers]
    return [
        Comparison(mix=mix, other=other, answer=answer, records=(records[mix], records[other]))
        for (mix, other), answer in zip(pairs, answers, strict=True)
    ]


def additivity(total: float, measured: float) -> str:
    """Return a sentence on the sum of single costs against the ``measured`` cost of the mix."""
    if not total > 0:
        return f"the layers' costs are within rounding, and the mix measures a KL of {measured:.2g}"
    return (
        f"the layers' costs, above the floor of rounding, sum to a KL of {nats(math.log(total))}, "
        f"and the mix measures {nats(math.log(measured))} (× {measured / total:.2f}) on the text "
        "of the search"
    )


def write(folder: Path, results: Mapping[str, Any]) -> list[Path]:
    """Write the results of a search to ``budget.json`` and their figure to ``budget.svg``; return
    the paths."""
    paths = [folder / "budget.json", folder / "budget.svg"]
    write_atomically(paths[0], (json.dumps(results) + "\n").encode())
    target = io.StringIO()
    with rc_context({**STYLE, "svg.hashsalt": "budget"}):
        draw(results).savefig(target, format="svg", transparent=True, metadata={"Date": None})
    write_atomically(paths[1], target.getvalue().encode())
    return paths


def draw(results: Mapping[str, Any]) -> Figure:
    """Return a figure: KL against bits per weight on the search's text, of mixes and of uniform
    columns; below, the bits of each layer of each mix."""
    mixes = results["mixes"]
    figure = Figure(figsize=(7.2, 3.4 + 1.5 * len(mixes)), layout="constrained")
    top, *charts = figure.subplots(
        1 + len(mixes), 1, height_ratios=[3.2, *(1.4 for _ in mixes)], squeeze=False
    )[:, 0]
    curve = [(x, y) for x, y in results["curve"] if y > 0]
    top.plot(*zip(*curve, strict=True), color="0.6", linewidth=1,
             label="mix: sum of the layers’ costs") if curve else None  # fmt: skip
    top.plot([m["bits"] for m in mixes], [m["kl"] for m in mixes], "o-", color="black",
             label="mix: measured")  # fmt: skip
    families: dict[str, list[tuple[float, float]]] = {}
    for each in results["uniform"]:
        families.setdefault(each["label"].partition("-")[0], []).append((each["bits"], each["kl"]))
    for place, (family, points) in enumerate(families.items()):
        top.plot(*zip(*sorted(points), strict=True), linestyle="none",
                 marker=MARKERS[place + 1], color=COLOURS[place], label=family)  # fmt: skip
    top.set(xlabel="bits per weight", ylabel="KL (nats per token)", yscale="log")
    top.grid(visible=True)
    top.legend()
    for axes, mix in zip(charts, mixes, strict=True):
        rows = {shared.rpartition(".")[2]: names for shared, names in alike(mix["layers"]).items()}
        grid = np.full((len(rows), max(map(len, rows.values()))), np.nan)
        for row, names in enumerate(rows.values()):
            grid[row, : len(names)] = [mix["layers"][name][1] for name in names]
        image = axes.imshow(grid, norm=LogNorm(2, 16), interpolation="nearest")
        axes.set_yticks(range(len(rows)), list(rows), fontsize=6)
        axes.set_title(f"{mix['label']}: bits per weight of each layer")
        bar = figure.colorbar(image, ax=axes, ticks=[2, 3, 4, 8, 16])
        bar.ax.set_yticklabels(["2", "3", "4", "8", "16"])
        bar.ax.minorticks_off()
    charts[-1].set_xlabel("decoder layer") if charts else None
    return figure
