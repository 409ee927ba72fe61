"""Write results/*/tables.md and docs/numbers.csv, which pages take their numbers from, from the
records of results/: `make numbers`, a minute.

One row per score, damage or measurement. Perplexities are compared by the logarithm of their ratio,
accuracies as fractions. `damage` is what quantization costs a checkpoint and `difference` is
softpick's (or sigmoid's) damage minus softmax's; above 0 is worse in every metric. `low` and `high`
are the ends of 95 % intervals, `p` is not corrected. Rows over several seeds have a value of each.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pandas as pd

from qbench.comparison.compare import compare
from qbench.comparison.rows import Comparison
from qbench.records import Measured
from qbench.statistics import Effect
from qbench.store import Analyses, Sensitivities, Store
from qbench.tables import table_files

RESULTS = Path(__file__).parent.parent / "results"
KEYS = ["folder", "task", "metric", "quantizer", "checkpoint"]
EFFECTS = [
    f"{effect}{end}" for effect in ("damage", "difference") for end in ("", "_low", "_high", "_p")
]
COLUMNS = [*KEYS, "value", "documents", *EFFECTS, "each"]
SCORES = ("acc", "acc_norm", "perplexity", "word_perplexity")  # what pages speak of


def read_scores(files: Mapping[str, str]) -> pd.DataFrame:
    """Return the scores in the CSV tables of a results folder with their damage and differences
    of damage.

    Of trainings with several seeds: the effects over all seeds, and each training's unquantized
    scores.
    """
    table = pd.read_csv(io.StringIO(files["tables.csv"]))
    table = table[table.metric.isin(SCORES) & (table.status == "ok")].copy()
    for effect, ours in (("damage", "damage"), ("did", "difference")):
        for end in ("", "_low", "_high"):
            table[ours + end] = table[f"{effect}_log_ratio{end}"].fillna(table[effect + end])
        # What is outside Holm's family, such as a task at chance, is not tested
        table[ours + "_p"] = table[effect + "_p"].where(table[effect + "_p_holm"].notna())
    if "seeds.csv" not in files:
        return table
    seeds = pd.read_csv(io.StringIO(files["seeds.csv"]))
    seeds = seeds[seeds.metric.isin(SCORES) & seeds.question.isin(("damage", "did"))]
    groups = {}
    for row in seeds.itertuples():
        effect = "difference" if row.question == "did" else "damage"
        numbers = (row.estimate, row.low, row.high)
        found = groups.setdefault((row.task, row.metric, row.quantizer, row.group), {})
        found |= {effect + e: n for e, n in zip(("", "_low", "_high"), numbers, strict=True)}
        p = row.p if row.p_holm == row.p_holm else None
        found |= {effect + "_p": p, "documents": row.documents}
        if effect == "difference":
            found["each"] = " ".join(f"{float(one):.6g}" for one in row.each.split())
    rows = [dict(zip(KEYS[1:], key, strict=True)) | found for key, found in groups.items()]
    each = table[table.quantizer == "bf16"][[*KEYS[1:], "value"]]
    return pd.concat([each, pd.DataFrame(rows)])


def read_cells(comparison: Comparison) -> Iterator[dict[str, object]]:
    """Yield measurements of whole cells: KL from the unquantized model (nats per token, mean over
    the documents of all tasks, with its interval); of kinds of attention and models that people
    have also per task; of the latter the sizes."""
    kinds = comparison.grid.name.startswith("kinds")
    sizes = comparison.grid.name.startswith(("published", "smollm2", "methods"))
    for name, record in comparison.records.items():
        cell = {"quantizer": record.quantizer, "checkpoint": record.checkpoint}
        if name in comparison.kl.means:
            row = {**cell, "task": "all", "metric": "kl", "value": comparison.kl.means[name]}
            for end in ("low", "high"):  # of the interval of its logarithm
                if hasattr(kl := comparison.kl.cells[name], end):
                    row[f"damage_{end}"] = math.exp(getattr(kl, end))
            yield row
        tasks = record.damage.tasks if record.damage and (kinds or sizes) else {}
        for task, damage in tasks.items():
            if divergence := damage.distributions:
                yield {**cell, "task": task, "metric": "kl", "value": divergence.kl.mean}
                if sizes:
                    top = divergence.top1_agreement
                    yield {**cell, "task": task, "metric": "same_top", "value": top}
        if sizes:
            size = record.audit and record.audit.size
            if size:
                yield {**cell, "task": "all", "metric": "bits", "value": size.bits_per_weight}
                yield {**cell, "task": "all", "metric": "gib", "value": size.gib}
            seconds = sum(s.seconds for s in record.stages if s.name in ("make", "quantize"))
            yield {**cell, "task": "all", "metric": "seconds", "value": seconds}


def read_pairs(comparison: Comparison) -> Iterator[dict[str, object]]:
    """Yield the logarithm of a column's KL over that of GPTQModel's column with the same settings,
    or of rounding to nearest with as many bits, paired by document, with its interval and p."""
    for (checkpoint, quantizer, other), effect in comparison.kl.pairs.items():
        library = other == quantizer.replace("gptq-", "gptqmodel-")
        rounding = re.fullmatch(rf"\w+{other.removeprefix('rtn')}-(s\d|\d+-steps)", quantizer)
        if library or (other.startswith("rtn-") and rounding):
            yield {"task": "all", "metric": f"kl over {'library' if library else 'rounding'}",
                   "quantizer": quantizer, "checkpoint": checkpoint, "damage": effect.estimate,
                   "damage_p": effect.p, "damage_low": effect.low,
                   "damage_high": effect.high}  # fmt: skip


def read_kinds(comparison: Comparison) -> Iterator[dict[str, object]]:
    """Yield the logarithm of each kind of attention's KL over softmax's with its interval over
    documents and seeds, by precision."""
    if not comparison.grid.name.startswith("kinds") or next(iter(comparison.groups)) != "softmax":
        return
    for (kind, quantizer), effect in comparison.kl.contrasts.items():
        if isinstance(effect, Effect):
            yield {"task": "all", "metric": "kl over softmax", "quantizer": quantizer,
                   "checkpoint": kind, "difference": effect.estimate,
                   "difference_low": effect.low, "difference_high": effect.high}  # fmt: skip


def read_analyses(folder: Path) -> Iterator[dict[str, object]]:
    """Yield what `qbench analyze` measured of the unquantized cells and what trainings logged."""
    for record in Analyses(folder).records():
        measured, cell = record.measured, {"checkpoint": record.checkpoint}
        first, hidden = measured.sinks[0], measured.hidden
        values = {
            **{f"sinks {least}": rate for least, rate in first.rates.items()},
            **{f"sinks of Gu {least}": rate for least, rate in first.rates_gu.items()},
            "kurtosis": hidden.kurtosis,
            "minimum": hidden.minimum,
            "maximum": hidden.maximum,
            "massive": hidden.massive,
            "zeros": measured.zeros,
            "perplexity": measured.perplexity,
            "silent heads": measured.silent_heads,
        }
        for name, value in values.items():
            yield {**cell, "task": "analysis", "metric": name, "value": value}
        if folder.name == "real-sinks":
            yield from read_layers(record.checkpoint, measured)
    read = folder.name in ("real-sinks", "kinds-27m", "kinds-124m")
    for record in Sensitivities(folder).records() if read else ():
        values = Counter({"all": record.together.kl.value})
        for unit in record.units:  # of trainings the sum over all layers
            name = unit.name if folder.name == "real-sinks" else unit.name.rpartition(".")[2]
            values[name] += unit.kl.value
        for name, value in values.items():
            yield {"checkpoint": record.checkpoint, "task": "sensitivity", "metric": name,
                   "value": value, "quantizer": record.quantizer}  # fmt: skip
    for path in sorted(folder.glob("training/*/training.json")):
        log = json.loads(path.read_bytes())
        name = path.parent.name.removeprefix("softmax+").replace("-seed", ".")
        cell = {"checkpoint": name, "task": "training"}
        last = log["watched"][-1]
        values = {"loss": last["loss"], "tokens": log["tokens"], "parameters": log["parameters"]}
        if folder.name.startswith("kinds"):
            names = ("sink_rate", "sink_rate_gu", "kurtosis", "largest")
            values |= {name: last[name] for name in names}
            values["seconds"] = sum(session["seconds"] for session in log["sessions"])
        for name, value in {**values, "unique tokens": log["data"]["tokens"]}.items():
            yield {**cell, "metric": name, "value": value}


def read_layers(checkpoint: str, measured: Measured) -> Iterator[dict[str, object]]:
    """Yield measurements of each decoder layer, and of the largest activation: where it stands."""
    for number, layer in enumerate(measured.layers):
        rates = [head.sinks[0].rates["0.3"] for head in layer.heads]
        values = {
            "sinks 0.3": sum(rates) / len(rates),
            "largest": max(-layer.hidden.minimum, layer.hidden.maximum),
            "kurtosis": layer.hidden.kurtosis,
        }
        for (
            measured_input
        ) in measured.inputs:  # of what writes massive activations, and removes them
            if measured_input.name.endswith(f".{number}.mlp.down_proj"):
                values |= {"input largest": measured_input.largest, "input rms": measured_input.rms}
        for name, value in values.items():
            yield {"task": f"layer {number}", "metric": name, "value": value,
                   "checkpoint": checkpoint}  # fmt: skip
    largest = measured.massive[0]
    firsts = sum(value.position == 0 for value in measured.massive) / len(measured.massive)
    for name, value in {"massive first": firsts, "massive channel": largest.channel}.items():
        yield {"task": "analysis", "metric": name, "value": value, "checkpoint": checkpoint,
               "each": largest.text}  # fmt: skip


def made() -> dict[Path, str]:
    """Return the text of docs/numbers.csv and of results/*/tables.md."""
    texts, numbers = {}, []
    for folder in sorted(path.parent for path in RESULTS.glob("*/records.tar.xz")):
        store = Store(folder)
        comparison = compare(store)
        files = table_files(comparison)
        cells = [*read_cells(comparison), *read_pairs(comparison), *read_kinds(comparison)]
        others = pd.DataFrame([*cells, *read_analyses(folder)])
        numbers.append(pd.concat([read_scores(files), others]).assign(folder=folder.name))
        texts[folder / "tables.md"] = files["tables.md"]
    table = pd.concat(numbers).reindex(columns=COLUMNS)
    text = table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
    return {Path(__file__).parent / "numbers.csv": text, **texts}


if __name__ == "__main__":
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")
