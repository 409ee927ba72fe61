"""Hold the results of ``qbench.api.evaluate``: the verdict, pandas tables, a figure; render a
comparison as CSV, a row per score with the key of its record."""

from __future__ import annotations

import html
import io
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from qbench.comparison.rows import Comparison, Row, RowValue, bits_per_weight, gib
from qbench.comparison.verdict import about, margin_of, verdict
from qbench.errors import RecipeError
from qbench.metrics import base_metric, is_percentage
from qbench.statistics import Missing, documents_for_margin
from qbench.store import Store
from qbench.tables.summary import summary
from qbench.tables.table import Table, as_csv, from_rows
from qbench.text import MINUS, NO_VALUE, group_by_reason, metric_title, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LINE = ("task", "label", "metric", "direction", "method")
PRECISION = ("precision", "activations", "arithmetic", "kv_cache")  # where these are parts
SCORE = ("status", "value", "stderr", "low", "high", "documents")
ENTRY = ("checkpoint", "status", "value", "stderr", "documents", "key", "reason")
CONTRASTS = {"delta": "deltas", "damage": "damages", "did": "differences"}
PARTS = ("", "_stderr", "_low", "_high")  # empty for perplexities, but for ``delta``
LOG_PARTS = ("_log_ratio", "_log_ratio_stderr", "_log_ratio_low", "_log_ratio_high")
TESTS = ("_test", "_p", "_p_holm", "_family", "_detectable", "_documents")
COLUMNS = (
    *(*LINE, "bits", *PRECISION, "quantizer", "checkpoint", *SCORE),
    *(contrast + part for contrast in CONTRASTS for part in (*PARTS, *LOG_PARTS, *TESTS)),
    *("damage_at_most", "damage_documents_needed", "at_chance"),
    *("bits_per_weight", "gib", "kl_mean", "kl_p99", "top1_agreement"),
    *("right_to_wrong", "wrong_to_right", "key", "reason"),
)


def comparison_rows(comparison: Comparison) -> list[dict[str, object]]:
    """Return one dict per score of the manifest, failed and missing ones too, in full precision and
    the record's units. Its names are of ``COLUMNS``; those without a value may be left out.

    ``did`` is the difference-in-differences. For perplexities: ``low`` and ``high`` come from the
    logarithm and are converted to perplexities, ``delta`` is the raw difference without error, and
    errors, intervals, damage, ``did`` and ``detectable`` are log ratios, in columns of their own.
    """
    rows = []
    for line in comparison.lines:
        for entry in line.entries.values():
            name = (entry.checkpoint, line.task, line.metric)
            row = _row(line, entry) | {"at_chance": name in comparison.at_chance or None}
            rows.append(row)
            if record := comparison.records.get(entry.cell):
                row |= {"bits_per_weight": bits_per_weight(record), "gib": gib(record)}
            damage = comparison.task_damage(entry.cell, line.task)
            if damage and (divergence := damage.distributions):
                row |= {"kl_mean": divergence.kl.mean, "kl_p99": divergence.kl.p99}
                row["top1_agreement"] = divergence.top1_agreement
            if damage and (flips := damage.flips.get(line.metric)):
                row |= {n: getattr(flips, n) for n in ("right_to_wrong", "wrong_to_right")}
    return rows


def _about(line: Row) -> dict[str, object]:
    """Return the columns that describe a row: task, metric, quantizer, direction."""
    names = ("task", "label", "metric", "method", "quantizer")
    direction = "up" if line.higher_is_better else "down"
    return {name: getattr(line, name) for name in names} | {"direction": direction}


def _row(line: Row, entry: RowValue) -> dict[str, object]:
    """Return the CSV row of one score: its cell, interval, Δ, damage and
    difference-in-differences."""
    score = line.effect("scores", entry.checkpoint)
    activations, kv_cache = line.precision.activations, line.precision.kv_cache
    row: dict[str, object] = {
        **_about(line),
        **{name: getattr(entry, name) for name in ENTRY},
        "bits": line.precision.weights and line.precision.weights.bits,
        "precision": line.precision.name,
        "activations": activations and activations.scheme,
        "arithmetic": activations and ("simulated" if activations.simulated else "real"),
        "kv_cache": kv_cache and kv_cache.scheme,
    }
    if score is not None:
        row["low"], row["high"], stderr = score.score_interval()
        row["stderr"] = stderr if entry.stderr is None else entry.stderr
    if entry.checkpoint != next(iter(line.entries)):
        row["delta"] = line.delta(entry.checkpoint)
    for prefix, contrast in CONTRASTS.items():
        effect = line.effects.get((contrast, entry.checkpoint))
        parts = LOG_PARTS if getattr(effect, "kind", "") == "log ratio" else PARTS
        if isinstance(effect, Missing):
            row |= {prefix + parts[0]: effect.estimate, f"{prefix}_test": effect.reason}
        elif effect is not None:
            values = (effect.estimate, effect.stderr, effect.low, effect.high)
            row |= {prefix + part: value for part, value in zip(parts, values, strict=True)}
            row |= {prefix + test: getattr(effect, test[1:]) for test in TESTS}
            if contrast == "damages":
                row |= {
                    "damage_at_most": effect.bounds[1],
                    "damage_documents_needed": documents_for_margin(effect, margin_of(line)),
                }
    return row


EFFECT = ("kind", "estimate", "stderr", "low", "high", "p", "p_holm", "family", "detectable",
          "of_seeds", "seeds", "documents")  # fmt: skip
SEED_COLUMNS = (
    *("task", "label", "metric", "direction", "quantizer", "method", "group", "question"),
    *(*EFFECT, "each"),
)


def seeds_csv(comparison: Comparison) -> str:
    """Return the effects over seeds as CSV, one per row. ``kind``: whether the numbers are a
    difference in the score's units or a log ratio; for a score the logarithm itself. ``of_seeds``:
    share of the variance that comes from the seeds."""
    rows = [
        {
            **_about(line),
            "group": group,
            "question": contrast,
            **{name: getattr(effect, name) for name in EFFECT},
            "each": " ".join(map(repr, effect.each)),
        }
        for line in comparison.seeds
        for contrast, effects in (("score", "scores"), *CONTRASTS.items())
        for group, effect in line.of(effects).items()
    ]
    return as_csv(rows, SEED_COLUMNS, numbers=("each",))


def printed_table(comparison: Comparison, published: str) -> list[Table]:
    """Return a list with the table of a paper's printed scores beside ours, for cells that both
    have; [] if there are none. ``published`` is a paper and the size of its models in
    ``published.csv``, such as softpick-340m. Raises RecipeError if it is unknown."""
    text = resources.files(__package__).joinpath("published.csv").read_text("utf-8")
    printed = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)
    sets = (printed.paper + "-" + printed.scale.str.lower()).str.removesuffix("-")
    if published not in set(sets):
        possible = ", ".join(dict.fromkeys(sets))
        raise RecipeError(f"--published {published}: unknown; possible: {possible}")
    ours = pd.DataFrame(comparison_rows(comparison), columns=[*COLUMNS]).dropna(subset="value")
    cells = ours.checkpoint + "/" + ours.quantizer
    ours = ours.assign(
        model=cells.map({name: each.normalizer for name, each in comparison.records.items()}),
        metric=ours.metric.map(base_metric),
        bits=[f"{bits:g}" if bits == bits and bits else "" for bits in ours.bits],
        percent=ours.metric.map(is_percentage),
    )
    names = ["model", "task", "metric", "method", "bits"]
    both = ours.merge(printed[sets == published], on=names, suffixes=("", "_printed"))
    rows = [
        {
            "Task": each.label,
            "Metric": metric_title(each.metric),
            "Cell": f"{each.checkpoint}/{each.quantizer}",
            "Ours": number(each.value, percent=each.percent),
            "± SE": NO_VALUE if pd.isna(each.stderr) else number(each.stderr, percent=each.percent),
            "Printed": each.value_printed.replace("-", MINUS),
            "In": each.table,
        }
        for each in both.itertuples()
    ]
    return from_rows(rows, title=f"Printed: {published}", notes=(), words=3, also_words=("In",))


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
