"""Search a mix for each budget, choose the uniform column to compare it with, and report the test
of both. Imports no torch before costs are measured."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from qbench.budget import choose
from qbench.budget.choose import UNQUANTIZED, column, solve, uniform_entry
from qbench.comparison.losses import kl_column
from qbench.comparison.rows import bits_per_weight, gib
from qbench.comparison.verdict import interval_text
from qbench.files import write_atomically
from qbench.plan import Plan
from qbench.quantizers.config import alike
from qbench.records import Record
from qbench.statistics import KL_MEAN, Effect, Missing, adjust, effects
from qbench.store import Store
from qbench.text import ratio as ratio_text
from qbench.viewer.figures import COLOURS, MARKERS, STYLE, save_svg


def search(
    plan_of: Callable[[Sequence[Any]], Plan],
    choices: Sequence[str],
    peers: Sequence[str],
    budgets: Mapping[str, tuple[float, str]],
    **text: Any,
) -> tuple[dict[str, Any], list[Any]]:
    """Return the results of the search as plain JSON, and the recipe's entries: the mix of each
    budget, and the best uniform columns by KL on the text of the search. ``plan_of`` plans a recipe
    with given quantizers after an unquantized one; ``choices``: the quantizers that layers choose
    from; ``peers``: others, which are checked and not measured; ``budgets``: a number and its unit,
    bits or gib, by label of the mix; ``text``: the other arguments of ``measure.Search``. Raises
    RecipeError for a budget that no choice fits."""
    from qbench.budget import measure

    began = time.monotonic()
    plan = plan_of([*choices, *(peer for peer in peers if peer not in choices)])
    checkpoint = plan.cells[0].checkpoint_name
    fitted = zip(choices, (cell.quantization.weights for cell in plan.cells[1:]), strict=False)
    settings = {choose.with_group_size(*each): each[1] for each in fitted}
    text["progress"].begin(checkpoint)
    searched = measure.Search(plan=plan, **text)
    sizes, ends = searched.sizes, searched.sizes.ends
    bits = {label: value if unit == "bits" else sizes.from_gib(value)
            for label, (value, unit) in budgets.items()}  # fmt: skip
    choose.require_budgets(sizes, settings.values(), bits.values())
    every = settings | choose.smaller_groups(sizes, settings, bits.values())
    entries = [uniform_entry(choice, choice if each.of_ends else UNQUANTIZED, ends)
               for choice, each in every.items()]  # fmt: skip
    costs, kl = searched.costs(dict(zip(every, plan_of(entries).cells[1:], strict=True)))
    mixes = {label: solve(costs, budget) for label, budget in bits.items()}
    columns = choose.uniform_columns(costs, {choice: kl[choice] for choice in every})
    best = {mix: min((name for name, each in columns.items() if each["bits"] <= budget),
                     key=lambda name: columns[name]["kl"], default=None)
            for mix, budget in bits.items()}  # fmt: skip
    entries = [column(chosen, label, ends) for label, chosen in mixes.items()]
    entries += [columns[name]["entry"] for name in dict.fromkeys(best.values()) if name]
    kl = {n: each["kl"] for n, each in columns.items() if each["entry"]["name"] in every}
    kl |= {cell.label: searched.whole(cell) for cell in plan_of(entries).cells[1:]
           if cell.label not in kl}  # fmt: skip
    text["progress"].end(checkpoint)
    return {
        "checkpoint": checkpoint,
        "text": {name: text[name] for name in ("windows", "length", "include")},
        "seconds": None if searched.reused else round(time.monotonic() - began, 1),
        "costs": {
            choice: {name: [round(width, 4), float(f"{cost:.4g}")] for name, _, width, cost in
                     costs.table.xs(choice, level="choice").itertuples()}
            for choice in every
        },
        "floor": costs.floor,
        "curve": choose.curve(costs),
        "uniform": [{"label": name, "bits": columns[name]["bits"], "kl": kl[name]}
                    for name in kl if name in columns],
        "mixes": [
            {
                "label": label, "budget": bits[label], "bits": size, "gib": costs.gib(size),
                "kl": kl[label], "sum": total, "best_uniform": best[label],
                "asks": choose.most_bits(costs, chosen),
                "layers": {each[0]: [each[1], costs.table["width"][each]]
                           for each in chosen.items()},
            }
            for label, chosen in mixes.items() for size, total in [costs.of(chosen)]
        ],
    }, entries  # fmt: skip


def certificate(answer: Effect | Missing, mix: Record, other: Record) -> dict[str, Any]:
    """Return the test of a mix's KL divergence against another column's on a run's documents as
    plain JSON, with a sentence, ``text``, that says which to take; or the sentence alone."""
    parts, texts = dict[str, Any](), []
    for what, record in {"mix": mix, "other": other}.items():
        bits, size = bits_per_weight(record), gib(record)
        parts |= {what: record.quantizer, f"{what}_bits": bits, f"{what}_gib": size}
        texts.append(f"{record.quantizer} ({bits:.2f} bits per weight, {size:.3g} GiB)")
    first, second = texts
    if isinstance(answer, Missing):
        return parts | {"text": f"{first} against {second}: no test: {answer.reason}."}
    low, ratio, high = map(math.exp, (answer.low, answer.estimate, answer.high))
    better, claim = answer.significant and ratio < 1, "not shown to be better"
    if answer.significant:
        claim = f"significantly {'better' if better else 'worse'}"
    interval = interval_text(answer, percent=False).removeprefix("× ")
    return parts | {
        "text": f"{first} is {claim} than {second}: KL × {ratio_text(answer.estimate)} {interval}, "
        f"{answer.documents:,} documents"
        + (f", Holm’s correction over {answer.family}" if answer.family > 1 else "")
        + ("." if better else f"; take {parts['other']}."),
        "ratio": ratio, "low": low, "high": high, "p_holm": answer.p_holm,
        "documents": answer.documents, "significant": answer.significant,
    }  # fmt: skip


def compare_with(store: Store, pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the ``certificate`` of each (mix, other column), labels both; pairs without two
    finished records are left out. P-values are corrected over all of them."""
    records = {record.quantizer: record for record in store.records() if record.status == "ok"}
    pairs = [pair for pair in pairs if records.keys() >= {*pair}]
    columns = {name: kl_column(store, records[name]) for pair in pairs for name in pair}
    measured = [pair for pair in pairs if all(columns[name] for name in pair)]
    tests = effects(columns, [{mix: 1.0, other: -1.0} for mix, other in measured], KL_MEAN)
    adjust(tests)
    answers = dict(zip(measured, tests, strict=True))
    unmeasured = Missing(reason="no KL divergence was measured")
    return [certificate(answers.get(pair, unmeasured), *map(records.get, pair)) for pair in pairs]


def report(
    folder: Path, results: dict[str, Any], peers: Sequence[str]
) -> tuple[list[str], list[Path]]:
    """Compare the finished cells of ``folder``, a mix with its uniform column and with each of
    ``peers``, labels; add that to ``results``, those of :func:`search`; write budget.json and
    budget.svg. Return the lines to print, and the files."""
    store, mixes, lines = Store(folder), results["mixes"], []
    pairs = [(mix["label"], mix["best_uniform"]) for mix in mixes if mix["best_uniform"]]
    results["certificates"] = compare_with(store, pairs)
    results["peers"] = compare_with(store, [(m["label"], peer) for peer in peers for m in mixes])
    texts = {each["mix"]: each["text"] for each in results["certificates"]}
    for mix in mixes:
        label, total, measured = mix["label"], mix["sum"], mix["kl"]
        nothing = "no uniform column is as small, so there is none to compare with"
        reason = "not compared, since a cell failed" if mix["best_uniform"] else nothing
        factor = f" (× {measured / total:.2f})" if total > 0 else ""
        lines += [
            texts.get(label, f"{label}: {reason}."),
            "  the layers' costs, above the floor of rounding, sum to a KL of "
            f"{total:.2g}, and the mix measures {measured:.2g}{factor} on the text of the search",
            f"  {mix['asks']}",
        ]
    paths = [folder / "budget.json", folder / "budget.svg"]
    write_atomically(paths[0], (json.dumps(results) + "\n").encode())
    with rc_context(STYLE):
        save_svg(draw(results), paths[1])
    return [*lines, *(each["text"] for each in results["peers"])], paths


def draw(results: Mapping[str, Any]) -> Figure:
    """Return a figure of the ``results`` of :func:`search`: KL against bits per weight on its text,
    of mixes and of uniform columns; below, the bits of each layer of each mix."""
    mixes = results["mixes"]
    figure = Figure(figsize=(7.2, 3.9 + 1.25 * len(mixes)), layout="constrained")
    top, *charts = figure.subplots(1 + len(mixes), height_ratios=[3.2, *[1.2] * len(mixes)])
    sizes = {each["label"]: (each["bits"], each["kl"]) for each in results["uniform"]}
    lines = {
        "mix: sum of the layers’ costs": ("-", "0.6", results["curve"]),
        "best uniform column": ("--", "0.6", [sizes[mix["best_uniform"]] for mix in mixes
                                              if mix["best_uniform"]]),
        "mix: measured": ("o-", "black", [(mix["bits"], mix["kl"]) for mix in mixes]),
    }  # fmt: skip
    families = dict.fromkeys(label.partition("-")[0] for label in sizes)
    for family, marker, colour in zip(families, MARKERS[1:], COLOURS, strict=False):
        points = [point for label, point in sizes.items() if label.startswith(f"{family}-")]
        lines[family] = marker, colour, points
    for label, (style, colour, points) in lines.items():
        x, y = np.reshape([p for p in sorted(points) if p[1] > 0], (-1, 2)).T
        top.plot(x, y, style, color=colour, label=label)
    top.set(xlabel="bits per weight", ylabel="KL (nats per token)", yscale="log")
    top.grid(visible=True)
    top.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)  # above, where no point lies
    for axes, mix in zip(charts, mixes, strict=True):
        widths = {name: bits for name, (_, bits) in mix["layers"].items()}
        rows = {n.rpartition(".")[2]: names for n, names in alike(widths).items() if "*" in n}
        grid = pd.DataFrame([map(widths.get, names) for names in rows.values()])
        alone = [f"; {n} {widths[n]:.2f}" for n in alike(widths) if "*" not in n]
        image = axes.imshow(grid, cmap="viridis_r", norm=LogNorm(2, 16), interpolation="nearest")
        axes.set_yticks(range(len(rows)), rows, fontsize=6)
        axes.locator_params(axis="x", integer=True)
        axes.set_title(f"{mix['label']}: width of each layer{''.join(alone)}")
    axes.set_xlabel("decoder layer")
    bar = figure.colorbar(image, ax=axes, location="bottom", aspect=50, label="bits per weight",
                          ticks=[2, 3, 4, 8, 16], format="{x:g}")  # fmt: skip
    bar.minorticks_off()
    return figure
