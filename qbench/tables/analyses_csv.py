"""Analyses as CSV, a file a kind of fact, numbers in full precision."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence

from qbench.record.analysis import Analysis, Hidden, Sinks
from qbench.text.escape import for_csv

Row = dict[str, object]


def comma_separated(name: str, found: Sequence[Analysis]) -> str:
    """The file ``name`` of ``CSV_FILES``. Every row begins with its cell and ends with the key of
    the analysis that it comes from. Empty text where there is no row."""
    rows = [
        {"checkpoint": one.checkpoint, "quantizer": one.quantizer, **row, "key": one.key}
        for one in found
        if one.measured is not None
        for row in CSV_FILES[name](one)
    ]
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({column: for_csv(cell) for column, cell in row.items()} for row in rows)
    return text.getvalue()


def _cells(one: Analysis) -> Iterator[Row]:
    found, text = one.measured, one.text
    assert found is not None
    assert text is not None
    yield {
        "samples": text.samples,
        "length": text.length,
        "bos": text.bos,
        "perplexity": found.perplexity,
        **_sinks(found.sinks),
        "zeros": found.zeros,
        "mass": found.mass,
        "entropy": found.entropy,
        "silent_heads": found.silent_heads,
        "dormant_heads": found.dormant_heads,
        **_hidden(found.hidden),
    }


def _layers(one: Analysis) -> Iterator[Row]:
    assert one.measured is not None
    for index, layer in enumerate(one.measured.layers):
        heads = layer.heads
        yield {
            "layer": index,
            "attention_key_0": _mean(head.sinks[0].attention for head in heads),
            **{
                f"sink_rate_key_0_{least}": _mean(head.sinks[0].rates[least] for head in heads)
                for least in one.measured.sinks[0].rates
            },
            **{
                name: _mean(getattr(head, name) for head in heads)
                for name in ("zeros", "mass", "silent", "dormant")
            },
            **_hidden(layer.hidden),
        }


def _heads(one: Analysis) -> Iterator[Row]:
    assert one.measured is not None
    for index, layer in enumerate(one.measured.layers):
        for number, head in enumerate(layer.heads):
            yield {
                "layer": index,
                "head": number,
                **_sinks(head.sinks),
                **head.model_dump(exclude={"sinks"}),
            }


def _inputs(one: Analysis) -> Iterator[Row]:
    assert one.measured is not None
    for given in one.measured.inputs:
        yield {
            "linear": given.name,
            "largest": given.largest,
            "rms": given.rms,
            "largest_to_rms": given.largest_to_rms,
            **{f"error_token_{bits}bit": error for bits, error in given.error_token.items()},
            **{f"error_text_{bits}bit": error for bits, error in given.error_text.items()},
        }


def _massive(one: Analysis) -> Iterator[Row]:
    assert one.measured is not None
    for found in one.measured.massive:
        yield found.model_dump()


def _sinks(sinks: Iterable[Sinks]) -> Row:
    return {
        f"{measure}_key_{sink.position}{'_' + least if least else ''}": value
        for sink in sinks
        for measure, least, value in (
            ("attention", "", sink.attention),
            *(("sink_rate", least, rate) for least, rate in sink.rates.items()),
            ("attention_gu", "", sink.attention_gu),
            *(("sink_rate_gu", least, rate) for least, rate in sink.rates_gu.items()),
        )
    }


def _hidden(hidden: Hidden) -> Row:
    return hidden.model_dump()


def _mean(values: Iterable[float]) -> float | None:
    every = list(values)
    return sum(every) / len(every) if every else None


CSV_FILES: dict[str, Callable[[Analysis], Iterator[Row]]] = {
    "cells.csv": _cells,
    "layers.csv": _layers,
    "heads.csv": _heads,
    "inputs.csv": _inputs,
    "massive.csv": _massive,
}
