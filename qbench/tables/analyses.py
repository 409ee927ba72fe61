"""Tables of what `qbench analyze` measured, and of what else says why models suffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from scipy import stats

from qbench import published as papers
from qbench.records import Analysis, Damage, Measured, Record, Sensitivity
from qbench.tables.analyses_csv import kl, mean
from qbench.tables.analysis_results import AnalysisResults
from qbench.tables.table import Table, from_rows
from qbench.tables.table import markdown as table_markdown
from qbench.text import MINUS, NO_VALUE, for_markdown, group_by_reason, number, significant


def value_text(value: float | None, form: str) -> str:
    return NO_VALUE if value is None else form.format(value).replace("-", "−")


def per_cent_text(logarithm: float | None) -> str:
    """A ratio's logarithm as a change in per cent."""
    if logarithm is None:
        return NO_VALUE
    if logarithm > 20:
        return "∞"
    return f"{number(math.expm1(logarithm), percent=True, signed=True)} %"


MASSIVE_SHOWN = 5  # of each cell; all that are kept are in massive.csv
Cells = Sequence[Analysis]


def _percent(value: float | None) -> str:
    return number(value, percent=True)


def _plain(value: float | None) -> str:
    return number(value, percent=False)


def paper_values(one: Measured) -> dict[str, float | None]:
    """The columns of the softpick paper's table 4; those that are shares have a %."""
    rates = one.sinks[0].rates
    return {
        "Perplexity": one.perplexity,
        **{f"Sink rate %, ε {least}": rate for least, rate in rates.items()},
        "Kurtosis": one.hidden.kurtosis,
        "Min": one.hidden.minimum,
        "Max": one.hidden.maximum,
        "Sparsity %": one.zeros,
    }


def _paper(one: Measured) -> dict[str, str]:
    return {name: number(value, percent="%" in name) for name, value in paper_values(one).items()}


def _others(one: Measured) -> dict[str, str]:
    later = max(sink.rates_gu["0.3"] for sink in one.sinks[1:])
    gu = one.sinks[0].rates_gu.items()
    return {
        **{f"Sink rate of Gu et al. %, ε {least}": _percent(rate) for least, rate in gu},
        "on keys 1–3, the most, ε 0.3": _percent(later),
        "on a delimiter, ε 0.3": _percent(one.delimiters and one.delimiters.rates["0.3"]),
        "Kurtosis a text": _plain(one.hidden.kurtosis_sequence),
        "a token, excess": _plain(one.hidden.kurtosis_token),
        "Largest / median": _plain(one.hidden.largest_to_median),
        "Massive activations": str(one.hidden.massive),
    }


def _heads(one: Measured) -> dict[str, str]:
    return {
        "Σ weights": _plain(one.mass),
        "Entropy, nats": _plain(one.entropy),
        "Attention on key 0 %": _percent(one.sinks[0].attention),
        "on delimiters %": _percent(one.delimiters and one.delimiters.attention),
        "Dormant heads %": _percent(one.dormant_heads),
        "Heads without any weight %": _percent(one.silent_heads),
    }


def _inputs(one: Measured) -> dict[str, str]:
    worst = max(one.inputs, key=lambda given: given.largest_to_rms or 0.0, default=None)
    errors = {
        f"{bits}-bit error %, a scale a {kind}": _percent(mean(getattr(i, f"error_{kind}")[bits]
                                                                for i in one.inputs))
        for kind in ("token", "text")
        for bits in ("8", "4")
    }  # fmt: skip
    return {
        **errors,
        "Largest / rms, the most": _plain(worst.largest_to_rms if worst else None),
        "in": worst.name if worst else NO_VALUE,
    }


def sections(results: AnalysisResults) -> list[Table]:
    """A row a cell, the paper's table first."""
    found: list[Table] = []
    for title, columns, notes in SECTIONS:
        rows = [{"Cell": one.cell, **columns(one.measured)} for one in results.cells]
        found += from_rows(rows, title=title, notes=notes, also_words=("in",))
    return [*found, *_massive(results.cells)]


SECTIONS = (
    (
        "Sinks, hidden states, sparsity: the softpick paper's table 4",
        _paper,
        (
            "Sink rate: share of heads, over texts, whose mean weight on the first key exceeds ε.",
            "Kurtosis of all hidden states at once. Sparsity: exact zeros in the lower triangle.",
        ),
    ),
    (
        "Other definitions",
        _others,
        (
            "Gu et al. 2024: the first 64 tokens, mean over the queries that see the key.",
            "Delimiter: the same of any full stop, comma or the like after the first token.",
            "Kurtosis a text: Bondarenko et al. 2023; a token: OSP 2025.",
            "Largest / median of |x|: the most over layers and texts.",
            "Massive: |x| > 100, ≥ 1,000 × the median (Sun et al. 2024).",
        ),
    ),
    (
        "Heads",
        _heads,
        (
            "Means over heads, texts and queries.",
            "Dormant on a text: a head whose output's mean norm is below 1 % of its layer's mean.",
        ),
    ),
    (
        "Inputs of linear layers",
        _inputs,
        (
            "‖Q(x) − x‖ / ‖x‖ of a symmetric grid, mean over linear layers.",
            "Largest / rms of the layer where it is the most.",
        ),
    ),
)


def texts(whole: Cells) -> list[str]:
    """What was read, once where all cells read the same."""
    lines = []
    for one in whole:
        text = one.text
        bos = "BOS counted" if text.bos else "without BOS"
        line = f"{text.samples} texts of {text.length} tokens ({bos}) of {text.source}"
        if text.left_out:
            line += f"; {text.left_out} shorter one{'s' * (text.left_out > 1)} left out"
        lines.append((one.cell, f"{line}; {one.environment.device}, {one.attention}"))
    return group_by_reason(lines)


def _massive(whole: Cells) -> list[Table]:
    rows = [
        {
            "Cell": one.cell,
            "Layer": str(m.layer),
            "Position": str(m.position),
            "Token": m.text,
            "Channel": str(m.channel),
            "Value": _plain(m.value),
            "to median": _plain(m.to_median),
        }
        for one in whole
        for m in one.measured.massive[:MASSIVE_SHOWN]
    ]
    notes = (f"The {MASSIVE_SHOWN} largest of each cell; layers, positions, channels from 0.",)
    return from_rows(rows, title="Massive activations", notes=notes, also_words=("Token",))


KL = (
    "KL divergence from the unquantized model, nats a token, mean over all scored tokens of all "
    "tasks"
)


def beside(results: AnalysisResults) -> list[Table]:
    """Each unquantized model's outliers beside what quantization did to the same weights."""
    rows = [
        {"Cell": one.cell, **_text([one], results)} for one in _whole(results) if _labels(results)
    ]
    notes = (f"Table 4's row beside the damage of the same weights quantized: {KL}.",)
    return from_rows(rows, title="Beside the damage", notes=notes)


def over_seeds(results: AnalysisResults) -> list[Table]:
    """A row a group of trainings and unquantized quantizer; nothing without groups."""
    rows = []
    for group, members in results.replicates.items():
        own = [one for one in _whole(results) if one.checkpoint in members]
        for quantizer in dict.fromkeys(one.quantizer for one in own):
            same = [one for one in own if one.quantizer == quantizer]
            if len(same) == len(members):
                cell = f"{group}/{quantizer}, {len(same)} trainings"
                rows.append({"Cells": cell, **_text(same, results)})
    notes = (
        "Means over trainings that differ in their seed; in brackets the lowest and the highest.",
        f"Table 4's columns are those of the next table. The last ones are {KL}.",
    )
    return from_rows(rows, title="Over seeds: table 4 beside the damage", notes=notes)


def _whole(results: AnalysisResults) -> list[Analysis]:
    return [one for one in results.cells if not one.precision.quantized]


def _labels(results: AnalysisResults) -> list[str]:
    """Quantizers whose damage is known of one of the models."""
    return list(dict.fromkeys(label for one in _whole(results) for label in _damage(one, results)))


def _text(cells: Sequence[Analysis], results: AnalysisResults) -> dict[str, str]:
    measured = [paper_values(one.measured) for one in cells if one.measured is not None]
    row = {
        name: _spread([values[name] for values in measured], partial(number, percent="%" in name))
        for name in measured[0]
        if name != "Perplexity"
    }
    damages = [_damage(one, results) for one in cells]
    for label in _labels(results):
        row[f"KL {label}"] = _spread([found.get(label) for found in damages], significant)
    return row


def _spread(values: Sequence[float | None], text: Callable[[float], str]) -> str:
    """One value, or ``3.84 (3.10 to 4.51)``; none where one is not known."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return NO_VALUE
    if len(known) == 1:
        return text(known[0])
    return f"{text(sum(known) / len(known))} ({text(min(known))} to {text(max(known))})"


def _damage(one: Analysis, results: AnalysisResults) -> dict[str, float]:
    """Quantizer → KL divergence."""
    found = {r.quantizer: kl(r) for r in results.records if _same_model(one, r)}
    return {label: value for label, value in found.items() if value is not None}


def _same_model(one: Analysis, record: Record) -> bool:
    def model(parts: Mapping[str, object]) -> tuple:
        return tuple(parts.get(name) for name in ("weights", "normalizer", "normalizer source"))

    return (
        record.quantized
        and isinstance(record.damage, Damage)
        and record.checkpoint == one.checkpoint
        and model(record.key_parts) == model(one.key_parts)
    )


LAYERS_SHOWN = 5  # of each cell; all are in sensitivity.csv
NORMAL = 1.96  # standard errors either side: 95 %


def stretches(results: AnalysisResults) -> list[Table]:
    """Underscoring (the softpick paper's section 7.7): weights and losses along the text."""
    found = results.long or results.cells
    rows = [
        {
            "Cell": one.cell,
            "Positions": f"{part.first}–{part.last}",
            "Loss, nats": value_text(part.loss, "{:.3f}"),
            "± s.e.": value_text(part.loss_stderr, "{:.3f}"),
            "Σ weights": value_text(part.mass, "{:.3f}"),
            "Largest weight": value_text(part.largest, "{:.3f}"),
            "Entropy, nats": value_text(part.entropy, "{:.2f}"),
        }
        for one in found
        for part in one.measured.stretches
    ]
    texts = sorted({one.text.samples for one in found if one.text is not None})
    notes = (
        f"Means over {'/'.join(map(str, texts))} texts (with the standard error of the loss), "
        "heads and the queries of a stretch of positions.",
        "Weights that shrink along the text are what the softpick paper calls underscoring "
        "(section 7.7).",
    )
    title = "Along the text: losses and weights"
    return from_rows(rows, title=title, notes=notes, words=2)


def sensitivity(results: AnalysisResults) -> list[Table]:
    rows = []
    for one in results.sensitivities:
        worst = sorted(one.units, key=lambda unit: -(unit.kl.value or 0.0))
        shown = [*worst[:LAYERS_SHOWN], *([one.together] if one.together else [])]
        rows += [
            {
                "Cell": one.cell,
                "Quantized": "all at once" if unit is one.together else unit.name,
                "KL": value_text(unit.kl.value, "{:.4g}"),
                "± s.e.": value_text(unit.kl.stderr, "{:.2g}"),
                "Perplexity": per_cent_text(unit.ln_perplexity_ratio.value),
            }
            for unit in shown
        ]
    notes = (
        f"The {LAYERS_SHOWN} parts of each cell that hurt most when quantized alone; all are in "
        "sensitivity.csv.",
        "KL divergence from the unquantized model, nats a token, mean over texts.",
    )
    return from_rows(rows, title="Quantized alone", notes=notes, words=2)


def outliers_and_damage(one: Sensitivity, cells: Sequence[Analysis]) -> list[tuple[float, float]]:
    """Of each part of a model of which both is known: its inputs' largest |x| over their rms, and
    the KL divergence when it is quantized alone. The outliers are those of the unquantized model of
    the same checkpoint; those of a decoder layer the most that one of its linear layers receives.
    """
    analysis = next(
        (a for a in cells if a.checkpoint == one.checkpoint and not a.precision.quantized), None
    )
    if analysis is None or analysis.measured is None:
        return []
    known = {given.name: given.largest_to_rms or 0.0 for given in analysis.measured.inputs}
    found = []
    for unit in one.units:
        inside = [v for name, v in known.items() if f"{name}.".startswith(f"{unit.name}.")]
        if inside and unit.kl.value is not None:
            found.append((max(inside), unit.kl.value))
    return found


def correlation(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float] | None:
    """Spearman's rank correlation of pairs, and the ends of its 95 % interval; None of fewer than
    five, or where all of one are equal.

    The interval is on Fisher's z = artanh ρ with standard error √((1 + ρ²/2) / (n − 3)), which
    holds for ranks (Bonett and Wright 2000, Psychometrika 65, 23–28). Layers of one model are
    not independent draws: it says how far chance among so many layers could reach, no more.
    """
    if len(pairs) < 5 or any(len(set(side)) == 1 for side in zip(*pairs, strict=True)):
        return None
    rho = float(stats.spearmanr(*zip(*pairs, strict=True)).statistic)
    if abs(rho) >= 1:
        return rho, rho, rho
    reach = NORMAL * math.sqrt((1 + rho**2 / 2) / (len(pairs) - 3))
    low, high = (math.tanh(math.atanh(rho) + side * reach) for side in (-1, 1))
    return rho, low, high


def correlations(results: AnalysisResults) -> list[Table]:
    rows = []
    for one in results.sensitivities:
        pairs = outliers_and_damage(one, results.cells)
        if (found := correlation(pairs)) is not None:
            rho, low, high = (value_text(value, "{:+.2f}") for value in found)
            ends = f"{low} to {high}"
            rows.append(
                {"Cell": one.cell, "ρ": rho, "95 % interval": ends, "Parts": f"{len(pairs)}"}
            )
    notes = (
        "Spearman's rank correlation over the parts of a model; 95 % interval (Bonett and Wright "
        "2000).",
        "Of the largest |x| / rms of what a part receives with the KL divergence when it is "
        "quantized alone.",
    )
    return from_rows(rows, title="Outliers of inputs and damage", notes=notes)


MEASURES = {
    "sink_rate_0.2": "Sink rate %, ε 0.2",
    "sink_rate_0.3": "Sink rate %, ε 0.3",
    "kurtosis": "Kurtosis",
    "min": "Min",
    "max": "Max",
    "sparsity": "Sparsity %",
}


def all_sections(results: AnalysisResults) -> list[Table]:
    return [
        *over_seeds(results),
        *sections(results),
        *beside(results),
        *stretches(results),
        *sensitivity(results),
        *correlations(results),
    ]


def markdown(results: AnalysisResults) -> str:
    """All tables of the folder `analysis`."""
    found = all_sections(results)
    if not results.there:
        found = []
    parts = ["# Analysis"]
    read = [*texts(results.cells), *(f"Along the text: {line}" for line in texts(results.long))]
    parts += ["\n".join(f"- {for_markdown(line)}" for line in read)] if read else []
    parts += [table_markdown(found).rstrip()] if found else []
    parts += [for_markdown(problem) for problem in results.problems]
    if len(parts) == 1:
        parts.append("No cell was analyzed.")
    return "\n\n".join(parts) + "\n"


def beside_paper(results: AnalysisResults, name: str) -> list[Table]:
    """Table 4 as ``--published NAME``'s paper prints them, with ours of the same
    normalizers below. Raises RecipeError for an unknown set."""
    scale = papers.scale(name)
    four = papers.table("softpick-table-04")
    rows = [
        (f"{scale} {row['model']} (paper)", *(_printed(row[column]) for column in MEASURES))
        for row in four.rows
        if row["size"] == scale
    ]
    for one in results.cells:
        ours = _paper(one.measured)
        rows.append((one.cell, *(ours[title] for title in MEASURES.values())))
    read = "; ".join(texts(results.cells)) or "none; run `qbench analyze`"
    return [
        Table(
            title="Beside the paper: sinks, hidden states, sparsity",
            notes=(
                f"{four.paper}, {four.source}: on 1,000 samples of SlimPajama; sparsity and hidden "
                "states on 10 texts (*: zeros of softmax by underflow, as the paper notes).",
                f"Ours: {read}.",
            ),
            head=("Model", *MEASURES.values()),
            rows=tuple(rows),
        )
    ]


def _printed(text: str) -> str:
    return text.replace("-", MINUS)
