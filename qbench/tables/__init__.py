"""Render a comparison as tables in Markdown, LaTeX and CSV, and as the answer on one screen: a line
per precision, at most 100 columns wide."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from itertools import product
from statistics import fmean
from textwrap import fill

from qbench.comparison.rows import Comparison, Row, RowValue, bits_per_weight, gib
from qbench.comparison.verdict import about, effect_text, loss_text, margin_of, ordered, verdict
from qbench.errors import RecipeError, shown
from qbench.metrics import base_metric, is_percentage
from qbench.statistics import Missing, documents_for_margin
from qbench.tables.answers import answer_tables
from qbench.tables.scores import against_table, by_method, tables_of
from qbench.text import (
    MINUS,
    NO_VALUE,
    Table,
    as_csv,
    for_markdown,
    from_rows,
    group_by_reason,
    latex,
    markdown,
    metric_title,
    number,
    short,
    table,
)

FORMATS = ("md", "tex", "csv")
PAGE = (
    "This page compares each quantized precision with the same checkpoint unquantized: the scores "
    "of both, what was lost, and whether the loss is significant."
)
WIDTH = 100
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


def render(comparison: Comparison, *, format: str = "md", published: str | None = None) -> str:
    """Return the tables of a comparison as text in ``format`` (md, tex or csv). With ``published``
    (see ``printed_table``) they include the scores that a paper prints; csv does not. Raises
    RecipeError if either is unknown."""
    if format not in FORMATS:
        raise RecipeError(f"format {shown(format)}: unknown; possible: {', '.join(FORMATS)}")
    if format == "csv":
        in_parts = any(line.precision.in_parts for line in comparison.lines)
        columns = [column for column in COLUMNS if in_parts or column not in PRECISION]
        return as_csv(comparison_rows(comparison), columns)
    tables = score_tables(comparison)
    tables += printed_table(comparison, published) if published else []
    return markdown(tables) if format == "md" else latex(tables)


def score_tables(comparison: Comparison) -> list[Table]:
    """Return all tables of a comparison in their order: precisions, scores and damage by method,
    losses against one precision, answers. Tables without rows are left out."""
    rows = precision_rows(comparison) if comparison.tested and comparison.quantizers else []
    notes = legend(comparison, rows, list(rows[0])[4:]) if rows else ()
    tables = from_rows(rows, title="Precisions", notes=notes)
    for method in by_method(comparison):
        tables += tables_of(method)
    tables += against_table(comparison) if comparison.against else []
    return [*tables, *(answer_tables(comparison) if comparison.answers else [])]


def table_files(
    comparison: Comparison, formats: Sequence[str] = ("md", "csv"), *, published: str | None = None
) -> dict[str, str]:
    """Return file name → content: ``tables.<format>`` for each of ``formats``, and ``seeds.csv`` if
    there are several trainings. Markdown begins with the verdict. ``published``: see ``render``."""
    files = {}
    for format in formats:
        text = render(comparison, format=format, published=published)
        if format == "md":
            folder, recipe = comparison.folder, comparison.grid.name
            lines = about(comparison)
            if folder != recipe:
                lines[0] = f"{folder} (recipe {recipe}){lines[0].removeprefix(recipe)}"
            title, *lines = map(for_markdown, lines)
            answer = "\n".join(f"- {for_markdown(line)}" for line in verdict(comparison))
            text = "\n\n".join([f"# Results in {title}", PAGE, "  \n".join(lines), answer, text])
        files[f"tables.{format}"] = text
    if comparison.seeds:
        files["seeds.csv"] = seeds_csv(comparison)
    return files


# --- the answer on one screen


def summary(comparison: Comparison) -> str:
    """Return as text: models and data, the verdict, missing and failed cells, and a table with a
    line per precision, if any was scored, with as many columns as fit the width and their legend.
    """
    lines = [*verdict(comparison)]
    lines += group_by_reason((cell.cell, reason) for cell, reason in comparison.problems())
    if comparison.grid.skipped:
        lines.append(f"Left out, without data: {', '.join(comparison.grid.skipped)}.")
    above = "\n\n".join(
        "\n".join(fill(line, WIDTH) for line in part) for part in (about(comparison), lines) if part
    )
    every = precision_rows(comparison)
    if not every:
        return f"{above}\n"
    heads, align = list(every[0]), "l" + "r" * (len(every[0]) - 1)
    for rows in (every, [{**row, "KL": row["KL"].partition(" [")[0]} for row in every]):
        text = table(heads, [[row[name] for name in heads] for row in rows], align=align)
        widths = [len(part) + 1 for part in text.splitlines()[1].split("|")[1:-1]]
        if sum(widths) < WIDTH:
            break  # else intervals go first
    while len(heads) > 4 and sum(widths[: len(heads)]) >= WIDTH:
        heads.pop()
    hidden = [name for name in every[0] if name not in heads]
    rows = [{name: row[name] for name in heads} for row in rows]
    text = table(heads, [[*row.values()] for row in rows], align=align[: len(heads)])
    notes = legend(comparison, rows, heads[4:])
    notes += [f"In tables.md also: {', '.join(hidden)}."] if hidden else []
    return f"{above}\n\n{text}\n\n{fill(' '.join(notes), WIDTH)}\n"


def legend(
    comparison: Comparison, rows: Sequence[dict[str, str]], tasks: Sequence[str]
) -> list[str]:
    """Return a sentence per column and mark of ``rows``. ``tasks``: names of the tasks' columns."""
    metrics = {row.label: metric_title(row.metric) for row in _first_rows(comparison)}
    text = "".join(text for row in rows for text in row.values())
    notes = ["KL: divergence of the predictions from the unquantized model’s, nats per token."]
    if tasks:
        ratios = ", of perplexities the ratio (×)" if "×" in text else ""
        names = ", ".join(f"{name} {metrics[name]}" for name in tasks)
        meaning = "the score."
        if comparison.unquantized is not None:
            meaning = (f"{comparison.unquantized} has the score, the other rows what they lose "
                     f"against it in points{ratios}; minus is a gain.")  # fmt: skip
        notes.append(f"Tasks ({names}): {meaning}")
    wide = {
        record.quantizer: None
        for record in comparison.records.values()
        if record.precision.weights and "float32 scales" in record.precision.weights.scheme
    }
    if wide:
        notes.append(
            f"Bits of {', '.join(wide)}: scales and zeros are stored in the model’s dtype, here "
            "float32, 64 bits per group of weights; bfloat16 needs half."
        )
    notes += ["‡: significant (5 %, Holm’s correction)."] if "‡" in text else []
    notes += ["§: mostly from the seeds."] if "§" in text else []
    notes += ["¶: no interval (tables.md says why)."] if "¶" in text else []
    notes += ["°: no better than guessing, so nothing can be lost."] if "°" in text else []
    return notes


def precision_rows(comparison: Comparison) -> list[dict[str, str]]:
    """Return the rows of the table of precisions as texts by column: Precision, Bits, GiB, KL, and
    one per task. A row is a precision of a model; several trainings of one kind share a row, with
    their means. The rows of a single model are in the order of the verdict. No column is left out
    for width. KL of a single training has its interval."""
    by_quantizer: dict[str, dict[str, Row]] = {}
    for row in _first_rows(comparison):
        by_quantizer.setdefault(row.quantizer, {})[row.task] = row
    one = len(comparison.groups) == 1
    order = ordered(comparison, comparison.grid.checkpoints[0]) if one else []
    names = sorted(by_quantizer, key=lambda name: order.index(name) if name in order else -1)
    means, rows = comparison.kl.means if comparison.kl else {}, []
    for name, (group, members) in product(names, comparison.groups.items()):
        cells = [f"{member}/{name}" for member in members]
        records = [comparison.records.get(cell) for cell in cells]
        if len(cells) > 1 and means.keys() >= {*cells}:
            kl = _mean(map(means.get, cells), short)
        else:  # of one cell, with its interval
            kl = loss_text(comparison.kl, cells[0]) or NO_VALUE
        rows.append(
            {
                "Precision": name if one else f"{group}/{name}",
                "Bits": _mean(map(bits_per_weight, records), "{:.2f}".format),
                "GiB": _mean(map(gib, records), short),
                "KL": kl,
                **{r.label: _value(comparison, r, group) for r in by_quantizer[name].values()},
            }
        )
    return rows


def _first_rows(comparison: Comparison) -> list[Row]:
    """Return the row of the first metric, in the papers' order, of each task and precision."""
    rows: dict[tuple[str, str], Row] = {}
    for row in comparison.seeds or comparison.lines:
        if not row.redundant:
            rows.setdefault((row.quantizer, row.task), row)
    return list(rows.values())


def _value(comparison: Comparison, row: Row, group: str) -> str:
    """Return the damage in one score; the score, marked if it may be guessed, if ``row`` is
    unquantized or no row is."""
    if row.quantized and comparison.unquantized is not None:
        return effect_text(row.effects.get(("damages", group)), percent=row.percent)
    value, entry = row.mean(group), row.entries.get(group)
    value = entry.value if value is None and entry else value
    members = comparison.groups[group]
    guessed = any((name, row.task, row.metric) in comparison.at_chance for name in members)
    return number(value, percent=row.percent) + "°" * guessed


def _mean(values: Iterable[float | None], text: Callable[[float], str]) -> str:
    """Return the mean of ``values`` as ``text`` formats it; ``NO_VALUE`` if any is None."""
    return NO_VALUE if None in (values := [*values]) else text(fmean(values))


# --- CSV, a row per score with the key of its record


def comparison_rows(comparison: Comparison) -> list[dict[str, object]]:
    """Return one dict per score of the manifest, failed and missing ones too, in full precision and
    the record's units. Its names are of ``COLUMNS``; those without a value may be left out. ``did``
    is the difference-in-differences. For perplexities: ``low`` and ``high`` come from the logarithm
    and are converted to perplexities, ``delta`` is the raw difference without error, and errors,
    intervals, damage, ``did`` and ``detectable`` are log ratios, in columns of their own."""
    rows = []
    for line in comparison.lines:
        about = _about(line)
        for entry in line.entries.values():
            name = (entry.checkpoint, line.task, line.metric)
            row = about | _row(line, entry)
            row["at_chance"] = name in comparison.at_chance or None
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
    """Return the columns that describe a row: task, metric, direction, quantizer, precision."""
    names = ("task", "label", "metric", "method", "quantizer")
    activations, kv_cache = line.precision.activations, line.precision.kv_cache
    return {name: getattr(line, name) for name in names} | {
        "direction": "up" if line.higher_is_better else "down",
        "bits": line.precision.weights and line.precision.weights.bits,
        "precision": line.precision.name,
        "activations": activations and activations.scheme,
        "arithmetic": activations and ("simulated" if activations.simulated else "real"),
        "kv_cache": kv_cache and kv_cache.scheme,
    }


def _row(line: Row, entry: RowValue) -> dict[str, object]:
    """Return the CSV row of one score: its cell, interval, Δ, damage and ``did``."""
    score = line.effect("scores", entry.checkpoint)
    row: dict[str, object] = {name: getattr(entry, name) for name in ENTRY}
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
    import pandas as pd  # slow to import

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
