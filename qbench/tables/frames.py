"""Hold the results of ``qbench.api.evaluate``: the verdict, pandas tables, a figure."""

from __future__ import annotations

import html
import io
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qbench.comparison.rows import Comparison
from qbench.comparison.verdict import about, verdict
from qbench.store import Store
from qbench.tables import COLUMNS, comparison_rows, summary
from qbench.text import group_by_reason

if TYPE_CHECKING:
    from matplotlib.figure import Figure


KL = ["kl", "kl_low", "kl_high"]
CELL = ["checkpoint", "quantizer", "bits_per_weight", "gib", *KL]
DOCUMENT = ["task", "metric", "document"]


@dataclass(frozen=True, repr=False)
class Results:
    """Hold the results of an evaluation. Printed it gives the terminal's summary, in a notebook a
    short one."""

    comparison: Comparison
    store: Store

    @property
    def verdict(self) -> str:
        """Return the answer in sentences, and a line per group of missing or failed cells."""
        problems = ((cell.cell, reason) for cell, reason in self.comparison.problems())
        return "\n".join([*verdict(self.comparison), *group_by_reason(problems)])

    @cached_property
    def damage(self) -> pd.DataFrame:
        """Return one row per quantized cell, task and metric, missing scores too, with the columns
        of tables.csv but those of Δ and difference-in-differences, and ``kl`` with its 95 %
        interval: over all tasks of the cell, in nats per token."""
        left_out = [name for name in COLUMNS if name.startswith(("delta", "did"))]
        rows = pd.DataFrame(comparison_rows(self.comparison), columns=[*COLUMNS])
        rows = rows[rows.quantizer.isin(self.comparison.quantizers)].drop(columns=left_out)
        means, cells = {}, {}
        if self.comparison.kl:
            means, cells = self.comparison.kl.means, self.comparison.kl.cells
        names = rows.checkpoint + "/" + rows.quantizer
        low, high = (  # of the logarithm
            [np.exp(getattr(cells.get(name), side, np.nan)) for name in names]
            for side in ("low", "high")
        )
        return rows.assign(kl=names.map(means), kl_low=low, kl_high=high).reset_index(drop=True)

    @cached_property
    def documents(self) -> pd.DataFrame:
        """Return one row per quantized cell, task, metric and document: its ``value``, the
        ``unquantized`` model's, its ``weight``, and ``kl`` in nats per token (NaN if not measured).
        Cells without damage are left out, and documents that one of the two models lacks."""
        names = ["checkpoint", "quantizer", *DOCUMENT, "value", "unquantized", "weight", "kl"]
        tables = [pd.DataFrame(columns=names)]
        for cell in self.comparison.grid.cells:
            if not cell.quantized or self.comparison.no_damage(cell.cell):
                continue
            base = f"{cell.checkpoint}/{self.comparison.unquantized_of[cell.quantizer]}"
            before, record = (self.comparison.records[name] for name in (base, cell.cell))
            unquantized = self.store.outcomes(before).rename(columns={"value": "unquantized"})
            table = self.store.outcomes(record).merge(unquantized[[*DOCUMENT, "unquantized"]])
            if "divergences" in record.files:
                sums = self.store.divergences(record).fillna({"tokens": 1})
                sums = sums.assign(kl=sums.kl * sums.tokens).groupby(["task", "document"])
                sums = sums[["kl", "tokens"]].sum().eval("kl / tokens").rename("kl")
                table = table.merge(sums.reset_index(), how="left")
            tables.append(table.assign(checkpoint=cell.checkpoint, quantizer=cell.quantizer))
        return pd.concat(tables[1:] or tables, ignore_index=True).reindex(columns=names)

    def plot(self) -> Figure:
        """Return a figure of KL divergence (log scale, 95 % intervals if there are any) against GiB
        of weights, every point labelled. Cells without KL or size are left out."""
        from matplotlib.figure import Figure

        class Plot(Figure):
            """A figure that notebooks draw without pyplot."""

            def _repr_png_(self) -> bytes:
                image = io.BytesIO()
                self.savefig(image, format="png", dpi=72)
                return image.getvalue()

        figure = Plot(layout="constrained")
        axes = figure.subplots()
        several = len(self.comparison.grid.checkpoints) > 1
        cells = self._cells().dropna(subset=["kl", "gib"]).sort_values("kl")
        for rank, each in enumerate(cells.itertuples()):
            bars = np.nan_to_num([[each.kl - each.kl_low], [each.kl_high - each.kl]])
            axes.errorbar(each.gib, each.kl, yerr=bars, fmt="o", capsize=3)
            label = f"{each.checkpoint}/{each.quantizer}" if several else each.quantizer
            axes.annotate(
                label, (each.gib, each.kl), xytext=(1.03, (rank + 0.5) / len(cells)), va="center",
                textcoords="axes fraction", arrowprops={"arrowstyle": "-", "color": "0.8"},
            )  # fmt: skip
        axes.set(xlabel="GiB of weights", ylabel="KL from the unquantized model, nats per token",
                 yscale="log")  # fmt: skip
        return figure

    def __repr__(self) -> str:
        return summary(self.comparison)

    def _repr_html_(self) -> str:
        lines = [*about(self.comparison), *verdict(self.comparison)]
        paragraphs = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
        return paragraphs + self._cells().to_html(index=False, float_format="{:.3g}".format)

    def _cells(self) -> pd.DataFrame:
        """Return one row per cell: the columns of ``damage`` that do not depend on the task."""
        return self.damage[CELL].drop_duplicates()
