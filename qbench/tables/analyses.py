"""Analyses → tables: the softpick paper's table 4 and what it leaves out.

Shares become per cent. Each table is text and knows no format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from qbench.analyses import Analyses, long_contexts, sensitivities
from qbench.errors import ResultsError
from qbench.records import Analysis, LinearInput, Measured, Record, Sensitivity
from qbench.store import Store
from qbench.text import NO_VALUE, number, together

MASSIVE_SHOWN = 5  # of each cell; all that are kept are in massive.csv
Cells = Sequence[Analysis]


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One table with a title and what its columns mean; ``keys`` columns say what a row is of."""

    name: str
    title: str
    note: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    keys: int = 1
    text: tuple[str, ...] = ()  # further columns that are no numbers

    @property
    def align(self) -> str:
        return "".join(
            "l" if index < self.keys or name in self.text else "r"
            for index, name in enumerate(self.head)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Why:
    """All that a results folder has to say on why its models suffer.

    ``cells``: analyses that measured something, ``long``: of texts beyond the trained context;
    ``records``: good ones of `qbench run`; ``problems``: what is missing, a line each;
    ``replicates``: trainings of one kind, by its name.
    """

    cells: tuple[Analysis, ...]
    long: tuple[Analysis, ...]
    sensitivities: tuple[Sensitivity, ...]
    records: tuple[Record, ...]
    problems: tuple[str, ...]
    replicates: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def there(self) -> bool:
        return bool(self.cells or self.long or self.sensitivities)


def gather(store: Store) -> Why:
    """Raises ResultsError where a file of an analysis is damaged."""
    parts = [Analyses(store.directory).all(), long_contexts(store.directory).all()]
    units = sensitivities(store.directory).all()
    failed = [one for part in [*parts, units] for one in part if one.status == "failed"]
    problems = together(f"{one.cell}: failed: {one.error}" for one in failed)
    records: list[Record] = []
    if store.has_grid():
        try:
            records = [one for one in store.records() if one.status == "ok"]
        except ResultsError as error:
            problems.append(f"Damage is left out: {error}")
    cells, longer = (tuple(one for one in part if one.measured is not None) for part in parts)
    return Why(
        cells=cells,
        long=longer,
        sensitivities=tuple(one for one in units if one.status == "ok"),
        records=tuple(records),
        problems=tuple(problems),
        replicates=_replicates(store),
    )


def _replicates(store: Store) -> Mapping[str, tuple[str, ...]]:
    analyses: Analyses[Analysis] = Analyses(store.directory)
    stated = analyses.grid().replicates if (analyses.folder / "grid.json").is_file() else {}
    return stated or (store.grid().replicates if store.has_grid() else {})


def sections(why: Why) -> list[Section]:
    """Those that there are rows for, the paper's table first."""
    whole = why.cells
    found = [_section(*one, whole) for one in (PAPER, OTHERS, HEADS, INPUTS)] if whole else []
    return [*found, *_massive(whole)]


def _percent(value: float | None) -> str:
    return number(value, percent=True)


def _plain(value: float | None) -> str:
    return number(value, percent=False)


def _mean(values: Iterator[float]) -> float | None:
    every = list(values)
    return math.fsum(every) / len(every) if every else None


def _worst(measured: Measured) -> LinearInput | None:
    return max(measured.inputs, key=lambda one: one.largest_to_rms or 0.0, default=None)


def paper_values(one: Measured) -> dict[str, tuple[float | None, bool]]:
    """The columns of the softpick paper's table 4, and whether a value is a share."""
    rates = one.sinks[0].rates
    return {
        "Perplexity": (one.perplexity, False),
        **{f"Sink rate %, ε {least}": (rate, True) for least, rate in rates.items()},
        "Kurtosis": (one.hidden.kurtosis, False),
        "Min": (one.hidden.minimum, False),
        "Max": (one.hidden.maximum, False),
        "Sparsity %": (one.zeros, True),
    }


def _paper(one: Measured) -> dict[str, str]:
    found = paper_values(one)
    return {name: number(value, percent=share) for name, (value, share) in found.items()}


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


Columns = Callable[[Measured], dict[str, str]]
PAPER = (
    "table-4",
    "Sinks, hidden states, sparsity: the softpick paper's table 4",
    _paper,
    "Sink rate: share of heads, over texts, whose mean weight on the first key exceeds ε. Kurtosis "
    "of all hidden states at once. Sparsity: exact zeros in the lower triangle.",
)
OTHERS = (
    "definitions",
    "Other definitions",
    _others,
    "Gu et al. 2024: the first 64 tokens, mean over the queries that see the key. Delimiter: the "
    "same of any full stop, comma, line break or the like after the first token, over the whole "
    "text. Kurtosis a text: Bondarenko et al. 2023; a token: OSP 2025. Largest / median of |x|: "
    "the most over layers and texts. Massive: |x| > 100, ≥ 1,000 × the median (Sun et al. 2024).",
)
HEADS = (
    "heads",
    "Heads",
    _heads,
    "Means over heads, texts and queries. Dormant on a text: a head whose output's mean norm is "
    "below 1 % of its layer's mean.",
)
INPUTS = (
    "inputs",
    "Inputs of linear layers",
    _inputs,
    "‖Q(x) − x‖ / ‖x‖ of a symmetric grid, mean over linear layers; largest / rms of the layer "
    "where it is the most.",
)


def _section(name: str, title: str, columns: Columns, note: str, whole: Cells) -> Section:
    rows = [columns(one.measured) for one in whole if one.measured is not None]
    return Section(
        name=name,
        title=title,
        note=note,
        head=("Cell", *rows[0]),
        rows=tuple((one.cell, *row.values()) for one, row in zip(whole, rows, strict=True)),
        text=("in",),
    )


def texts(whole: Cells) -> list[str]:
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
    return [f"{', '.join(cells)}: {line}" for line, cells in lines.items()]


def _massive(whole: Cells) -> list[Section]:
    rows = [
        (
            one.cell,
            *map(str, (m.layer, m.position)),
            m.text,
            str(m.channel),
            _plain(m.value),
            _plain(m.to_median),
        )
        for one in whole
        for m in one.measured.massive[:MASSIVE_SHOWN]
    ]
    if not rows:
        return []
    return [
        Section(
            name="massive",
            title="Massive activations",
            note=f"The {MASSIVE_SHOWN} largest of each cell; layers, positions, channels from 0.",
            head=("Cell", "Layer", "Position", "Token", "Channel", "Value", "to median"),
            rows=tuple(rows),
            text=("Token",),
        )
    ]
