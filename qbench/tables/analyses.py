"""Analyses → the softpick paper's table 4 and what it leaves out, beside the damage; CSV of all.

Shares become per cent in Markdown and stay numbers from 0 to 1 in CSV.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from qbench.analyses import Analyses
from qbench.errors import ResultsError
from qbench.record import Damage, Record
from qbench.record.analysis import Analysis, LinearInput, Measured
from qbench.store import Store, write_atomically
from qbench.tables.analyses_csv import CSV_FILES, comma_separated
from qbench.text.escape import for_markdown
from qbench.text.markdown import table
from qbench.text.numbers import NO_VALUE, number

MASSIVE_SHOWN = 5  # of each cell; all that are kept are in massive.csv
Cells = Sequence[Analysis]


def write_analyses(store: Store) -> list[Path]:
    """Write ``tables.md`` and the CSV files into the folder of the analyses; returns the paths,
    Markdown first. Raises ResultsError where nothing was analyzed or a file is damaged."""
    analyses = Analyses(store.directory)
    found = analyses.all()
    contents = {"tables.md": markdown(found, *damages(store))}
    contents |= {name: comma_separated(name, found) for name in CSV_FILES}
    paths = []
    for name, text in contents.items():
        paths.append(analyses.folder / name)
        write_atomically(paths[-1], text.encode())
    return paths


def damages(store: Store) -> tuple[list[Record], str | None]:
    """The results folder's records with damage; or none, and why."""
    if not store.has_grid():
        return [], None
    try:
        return [one for one in store.records() if isinstance(one.damage, Damage)], None
    except ResultsError as error:
        return [], f"Damage is left out: {error}"


def markdown(found: Cells, records: Sequence[Record] = (), problem: str | None = None) -> str:
    """All tables as Markdown; ``problem``: why there are no records."""
    whole = [one for one in found if one.measured is not None]
    if not whole:
        return "# Analysis\n\nNo cell was analyzed.\n"
    parts = ["# Analysis", _texts(whole)]
    parts += _section("Sinks, hidden states, sparsity: the softpick paper's table 4", PAPER, whole)
    parts += _section("Other definitions", OTHERS, whole)
    parts += _section("Heads", HEADS, whole)
    parts += _section("Inputs of linear layers", INPUTS, whole)
    parts += _massive(whole)
    parts += _beside(whole, records)
    failed = [one for one in found if one.measured is None]
    parts += [for_markdown(f"{one.cell}: failed: {one.error}") for one in failed]
    if problem:
        parts.append(for_markdown(problem))
    return "\n\n".join(parts) + "\n"


def _percent(value: float | None) -> str:
    return number(value, percent=True)


def _plain(value: float | None) -> str:
    return number(value, percent=False)


def _mean(values: Iterator[float]) -> float | None:
    every = list(values)
    return sum(every) / len(every) if every else None


def _worst(measured: Measured) -> LinearInput | None:
    return max(measured.inputs, key=lambda one: one.largest_to_rms or 0.0, default=None)


def _paper(one: Measured) -> dict[str, str]:
    rates = one.sinks[0].rates
    return {
        "Perplexity": _plain(one.perplexity),
        **{f"Sink rate %, ε {least}": _percent(rate) for least, rate in rates.items()},
        "Kurtosis": _plain(one.hidden.kurtosis),
        "Min": _plain(one.hidden.minimum),
        "Max": _plain(one.hidden.maximum),
        "Sparsity %": _percent(one.zeros),
    }


def _others(one: Measured) -> dict[str, str]:
    later = max(sink.rates_gu["0.3"] for sink in one.sinks[1:])
    gu = one.sinks[0].rates_gu.items()
    return {
        **{f"Sink rate of Gu et al. %, ε {least}": _percent(rate) for least, rate in gu},
        "on keys 1–3, the most, ε 0.3": _percent(later),
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
        "Dormant heads %": _percent(one.dormant_heads),
        "Heads without any weight %": _percent(one.silent_heads),
    }


def _inputs(one: Measured) -> dict[str, str]:
    worst = _worst(one)
    errors = {
        f"{bits}-bit error %, a scale a {kind}": _percent(_mean(getattr(i, f"error_{kind}")[bits]
                                                                for i in one.inputs))
        for kind in ("token", "text")
        for bits in ("8", "4")
    }  # fmt: skip
    return {
        **errors,
        "Largest / rms, the most": _plain(worst.largest_to_rms if worst else None),
        "in": worst.name if worst else NO_VALUE,
    }


PAPER = (
    _paper,
    "Sink rate: share of heads, over texts, whose mean weight on the first key exceeds ε. Kurtosis "
    "of all hidden states at once. Sparsity: exact zeros in the lower triangle.",
)
OTHERS = (
    _others,
    "Gu et al. 2024: the first 64 tokens, mean over the queries that see the key. Kurtosis a text: "
    "Bondarenko et al. 2023; a token: OSP 2025. Largest / median of |x|: the most over layers and "
    "texts. Massive: |x| > 100 and ≥ 1,000 × the median (Sun et al. 2024).",
)
HEADS = (
    _heads,
    "Means over heads, texts and queries. Dormant on a text: a head whose output's mean norm is "
    "below 1 % of its layer's mean.",
)
INPUTS = (
    _inputs,
    "‖Q(x) − x‖ / ‖x‖ of a symmetric grid, mean over linear layers; largest / rms of the layer "
    "where it is the most.",
)


def _section(title: str, what: tuple, whole: Cells) -> list[str]:
    columns, note = what
    rows = [columns(one.measured) for one in whole]
    head = ["Cell", *rows[0]]
    align = "l" + "".join("l" if name == "in" else "r" for name in rows[0])
    cells = [[one.cell, *row.values()] for one, row in zip(whole, rows, strict=True)]
    return [f"## {title}", note, table(head, cells, align=align)]


def _texts(whole: Cells) -> str:
    """What was read, once where all cells read the same."""
    lines: dict[str, list[str]] = {}
    for one in whole:
        text = one.text
        assert text is not None, "who measured has read"
        bos = "BOS counted" if text.bos else "without BOS"
        line = f"{text.samples} texts of {text.length} tokens ({bos}) of {text.source}"
        if text.left_out:
            line += f"; {text.left_out} shorter ones left out"
        lines.setdefault(f"{line}; {one.environment.device}, {one.attention}", []).append(one.cell)
    return "\n".join(for_markdown(f"- {', '.join(cells)}: {line}") for line, cells in lines.items())


def _massive(whole: Cells) -> list[str]:
    rows = [
        [one.cell, m.layer, m.position, m.text, m.channel, _plain(m.value), _plain(m.to_median)]
        for one in whole
        for m in one.measured.massive[:MASSIVE_SHOWN]
    ]
    if not rows:
        return []
    head = ["Cell", "Layer", "Position", "Token", "Channel", "Value", "to median"]
    note = f"The {MASSIVE_SHOWN} largest of each cell; layers, positions and channels from 0."
    return ["## Massive activations", note, table(head, rows, align="lrrlrrr")]


def _beside(whole: Cells, records: Sequence[Record]) -> list[str]:
    """Each unquantized model's outliers beside what quantization did to the same weights."""
    by_cell = {
        one.cell: {record.quantizer: kl(record) for record in records if _same_model(one, record)}
        for one in whole
        if not one.precision.quantized
    }
    labels = list(dict.fromkeys(label for found in by_cell.values() for label in found))
    if not labels:
        return []
    rows = []
    for one in whole:
        if one.cell not in by_cell:
            continue
        measured, damage = one.measured, by_cell[one.cell]
        rows.append([
            one.cell,
            _percent(measured.sinks[0].rates["0.3"]),
            _plain(measured.hidden.kurtosis),
            _plain(measured.hidden.largest_to_median),
            *(f"{damage[label]:.4f}" if label in damage else NO_VALUE for label in labels),
        ])  # fmt: skip
    head = ["Cell", "Sink rate %, ε 0.3", "Kurtosis", "Largest / median", *labels]
    note = (
        "Beside the damage of the same weights quantized: KL divergence from the unquantized "
        "model, nats a token, mean over all scored tokens of all tasks."
    )
    return ["## Beside the damage", note, table(head, rows, align="l" + "r" * (len(head) - 1))]


def _same_model(one: Analysis, record: Record) -> bool:
    def model(parts: Mapping[str, object]) -> tuple:
        return tuple(parts.get(name) for name in ("weights", "normalizer", "normalizer source"))

    return (
        record.quantized
        and record.checkpoint == one.checkpoint
        and model(record.key_parts) == model(one.key_parts)
        and kl(record) is not None
    )


def kl(record: Record) -> float | None:
    """Mean KL divergence over all scored tokens of all tasks, nats a token; None without."""
    assert isinstance(record.damage, Damage)
    every = [task.distributions for task in record.damage.tasks.values() if task.distributions]
    tokens = sum(one.tokens for one in every)
    return sum(one.kl.mean * one.tokens for one in every) / tokens if tokens else None
