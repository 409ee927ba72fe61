"""Search a mix for each budget, choose the uniform column to compare it with, and report the test
of both. Imports no torch before costs are measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qbench.budget.choose import (
    Costs,
    SearchText,
    asking,
    column,
    explicit,
    least_bits,
    require_budget,
    solve,
    uniform_candidates,
)
from qbench.budget.report import additivity, compare_with, write
from qbench.checkpoints.find import linear_shapes
from qbench.errors import RecipeError
from qbench.files import cache_folder
from qbench.plan import Plan
from qbench.progress import Progress
from qbench.records import UNQUANTIZED_BITS
from qbench.store import Store

CURVE = [2.5 + step / 8 for step in range(29)]  # bits per weight, to 6


def search(
    plan_of: Callable[[Sequence[Any]], Plan], choices: Sequence[str], peers: Sequence[str],
    budgets: Mapping[str, tuple[float, str]], text: SearchText, progress: Progress,
) -> tuple[dict[str, Any], list[Any]]:  # fmt: skip
    """Return the results of the search as plain JSON, and the recipe's entries: the mix of each
    budget, and the best uniform columns by KL on the text of the search.

    ``plan_of`` plans a recipe with given quantizers after an unquantized one; ``budgets``: a number
    and its unit, bits or gib, by label of the mix.
    """
    from qbench.budget.measure import measure_costs, measure_whole

    began = time.monotonic()
    plan = plan_of([*choices, *peers])
    base, *cells = plan.cells
    by_choice = {
        explicit(choice, cell.quantization.weights): cell
        for choice, cell in zip(choices, cells, strict=False)
    }
    settings = {choice: cell.quantization.weights for choice, cell in by_choice.items()}
    least = least_bits(settings.values(), linear_shapes(base.checkpoint))
    for value, unit in budgets.values():
        if (unit == "bits" and value < 0.99 * least) or value >= UNQUANTIZED_BITS:
            require_budget(value, least)  # before the work; exactly, after it
    name = base.checkpoint_name
    progress.begin(name)
    costs = measure_costs(plan, base, by_choice, text, cache_folder(), progress)
    bits = {label: value if unit == "bits" else costs.from_gib(value)
            for label, (value, unit) in budgets.items()}  # fmt: skip
    mixes = {label: solve(costs, budget) for label, budget in bits.items()}
    fitting = {label: uniform_candidates(costs, settings, budget) for label, budget in bits.items()}
    uniform = {label: each for columns in fitting.values() for label, each in columns.items()}
    entries = [column(chosen, label) for label, chosen in mixes.items()]
    plan = plan_of([*entries, *(entry for entry, _ in uniform.values())])
    base, *cells = plan.cells
    kl = measure_whole(plan, base, cells, text, cache_folder(), progress)
    progress.end(name)
    best = {mix: min(columns, key=kl.__getitem__, default=None) for mix, columns in fitting.items()}
    results = {
        "checkpoint": name,
        "text": {"windows": text.windows, "length": text.length},
        "seconds": round(time.monotonic() - began, 1),
        "costs": {
            choice: {n: [round(costs.bits[choice][n] / costs.parameters[n], 4),
                         float(f"{costs.kl[choice][n]:.4g}")] for n in costs.parameters}
            for choice in by_choice
        },
        "floor": costs.floor,
        "curve": _curve(costs),
        "uniform": [{"label": label, "bits": size, "kl": kl[label]}
                    for label, (_, size) in uniform.items()],
        "mixes": [_mix(costs, label, chosen, bits[label], kl[label], best[label])
                  for label, chosen in mixes.items()],
    }  # fmt: skip
    return results, [
        *entries,
        *(uniform[label][0] for label in dict.fromkeys(best.values()) if label),
    ]


def _mix(
    costs: Costs, label: str, chosen: Mapping[str, str], budget: float, kl: float, best: str | None
) -> dict[str, Any]:
    size = costs.bits_per_weight(chosen)
    return {
        "label": label, "budget": budget, "bits": size, "gib": costs.gib(size), "kl": kl,
        "sum": costs.sum_of(chosen), "best_uniform": best, "asks": asking(costs, chosen),
        "layers": {n: [c, costs.bits[c][n] / costs.parameters[n]] for n, c in chosen.items()},
    }  # fmt: skip


def _curve(costs: Costs) -> list[list[float]]:
    """Return the size and the sum of costs of the best mix under each budget of ``CURVE``."""
    points = []
    for budget in CURVE:
        try:
            chosen = solve(costs, budget)
        except RecipeError:  # below the smallest choice
            continue
        points.append([round(costs.bits_per_weight(chosen), 4), costs.sum_of(chosen)])
    return points


def report(
    folder: Path, results: dict[str, Any], peers: Sequence[str]
) -> tuple[list[str], list[Path]]:
    """Compare the finished cells of ``folder``, a mix with its uniform column and with each of
    ``peers``; return the lines to print and the files that were written."""
    store, mixes = Store(folder), results["mixes"]
    pairs = [(mix["label"], mix["best_uniform"]) for mix in mixes if mix["best_uniform"]]
    certificates = compare_with(store, pairs)
    against = compare_with(store, [(mix["label"], peer) for peer in peers for mix in mixes])
    results["certificates"] = [each.to_dict() for each in certificates]
    results["peers"] = [each.to_dict() for each in against]
    texts = {each.mix: each.text() for each in certificates}
    lines = []
    for mix in mixes:
        nothing = (
            f"{mix['label']}: no uniform column is as small, so there is none to compare with."
        )
        if mix["best_uniform"]:
            nothing = f"{mix['label']}: not compared, since a cell failed."
        lines += [
            texts.get(mix["label"], nothing),
            f"  {additivity(mix['sum'], mix['kl'])}",
            f"  {mix['asks']}",
        ]
    lines += [each.text() for each in against]
    return lines, write(folder, results)
