"""Analyses as CSV, a file a kind of fact, numbers in full precision."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from qbench.records import Analysis, Delimiters, Hidden, Record, Sensitivity, Sinks
from qbench.tables.analysis_results import AnalysisResults
from qbench.tables.table import as_csv

Row = dict[str, object]
WITHOUT_KEY = ("maps.csv",)  # a row a weight: keys would be most of the file


def csv_files(results: AnalysisResults) -> dict[str, str]:
    """Every file by its name; empty text where there is no row. A row begins with its cell and, but
    for ``WITHOUT_KEY``, ends with the key of the record that it comes from."""
    files = {}
    for name, rows_of in OF_CELLS.items():
        along_texts = name == "stretches.csv" and results.long
        rows = [
            {"checkpoint": one.checkpoint, "quantizer": one.quantizer, **row, "key": one.key}
            for one in along_texts or results.cells
            for row in rows_of(one)
        ]
        if name in WITHOUT_KEY:
            rows = [{k: value for k, value in row.items() if k != "key"} for row in rows]
        files[name] = as_csv(rows)
    files["sensitivity.csv"] = as_csv(list(_sensitivity(results.sensitivities)))
    return files


SCALARS = ("zeros", "mass", "entropy", "silent_heads", "dormant_heads", "delimiter_tokens")


def _cells(one: Analysis) -> Iterator[Row]:
    found = one.measured
    yield {
        **{name: getattr(one.text, name) for name in ("samples", "length", "bos")},
        "perplexity": found.perplexity,
        **_sinks(found.sinks),
        **{name: getattr(found, name) for name in SCALARS},
        **_delimiters(found.delimiters),
        **_hidden(found.hidden),
    }


def _layers(one: Analysis) -> Iterator[Row]:
    for index, layer in enumerate(one.measured.layers):
        heads = layer.heads
        yield {
            "layer": index,
            "attention_key_0": mean(head.sinks[0].attention for head in heads),
            **{
                f"sink_rate_key_0_{least}": mean(head.sinks[0].rates[least] for head in heads)
                for least in one.measured.sinks[0].rates
            },
            **{
                name: mean(getattr(head, name) for head in heads)
                for name in ("zeros", "mass", "silent", "dormant")
            },
            **_hidden(layer.hidden),
        }


def _heads(one: Analysis) -> Iterator[Row]:
    for index, layer in enumerate(one.measured.layers):
        for number, head in enumerate(layer.heads):
            yield {
                "layer": index,
                "head": number,
                **_sinks(head.sinks),
                **head.model_dump(exclude={"sinks", "delimiters"}),
                **_delimiters(head.delimiters),
            }


def _inputs(one: Analysis) -> Iterator[Row]:
    for given in one.measured.inputs:
        yield {
            "linear": given.name,
            **{name: getattr(given, name) for name in ("largest", "rms", "largest_to_rms")},
            **{f"error_token_{bits}bit": error for bits, error in given.error_token.items()},
            **{f"error_text_{bits}bit": error for bits, error in given.error_text.items()},
        }


def _maps(one: Analysis) -> Iterator[Row]:
    """A row a query and key, keys that it may see alone."""
    for found in one.measured.maps:
        for query, row in enumerate(found.rows):
            for key, weight in enumerate(row):
                yield {
                    "text": found.text,
                    "layer": found.layer,
                    "head": found.head,
                    "query": query,
                    "query_token": found.tokens[query],
                    "key_index": key,
                    "key_token": found.tokens[key],
                    "weight": weight,
                }


def _sensitivity(found: Sequence[Sensitivity]) -> Iterator[Row]:
    """What quantizing each part alone did; ``all``: all of them at once."""
    for one in found:
        for unit in [*one.units, *([one.together] if one.together else [])]:
            yield {
                "checkpoint": one.checkpoint,
                "quantizer": one.quantizer,
                "part": unit.name,
                "layer": unit.layer,
                "kl": unit.kl.value,
                "kl_stderr": unit.kl.stderr,
                "ln_perplexity_ratio": unit.ln_perplexity_ratio.value,
                "ln_perplexity_ratio_stderr": unit.ln_perplexity_ratio.stderr,
                "texts": unit.kl.documents,
                "key": one.key,
            }


def _delimiters(found: Delimiters | None) -> Row:
    if found is None:
        return {}
    rates = {f"sink_rate_delimiter_{least}": rate for least, rate in found.rates.items()}
    return {"attention_delimiters": found.attention, **rates}


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
    row = hidden.model_dump(exclude={"quantiles"})
    return row | {f"quantile_{level}": value for level, value in hidden.quantiles.items()}


def mean(values: Iterable[float]) -> float | None:
    every = list(values)
    return math.fsum(every) / len(every) if every else None


OF_CELLS: dict[str, Callable[[Analysis], Iterator[Row]]] = {
    "cells.csv": _cells,
    "layers.csv": _layers,
    "heads.csv": _heads,
    "inputs.csv": _inputs,
    "massive.csv": lambda one: (found.model_dump() for found in one.measured.massive),
    "stretches.csv": lambda one: (part.model_dump() for part in one.measured.stretches),
    "maps.csv": _maps,
}


def kl(record: Record) -> float | None:
    """Mean KL divergence over all scored tokens of all tasks, nats a token; None without."""
    every = [task.distributions for task in record.damage.tasks.values() if task.distributions]
    tokens = sum(one.tokens for one in every)
    return sum(one.kl.mean * one.tokens for one in every) / tokens if tokens else None
