"""Choose a quantizer for each linear layer so that the sum of costs is smallest under a budget of
bits, and write the choice as a column of a recipe. Imports no torch. A cost is the KL divergence,
in nats per token on calibration text, of the model with that layer alone quantized. Bits are those
of the tables: all that is stored of a matrix, scales and zeros counted."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from qbench.errors import RecipeError
from qbench.quantizers.config import Shapes, WeightSettings, alike
from qbench.quantizers.registry import METHODS, config_of
from qbench.recipe import label_of
from qbench.records import UNQUANTIZED_BITS

GIB = 8 * 2**30  # bits
UNQUANTIZED = "unquantized"  # the choice to leave a layer as it is
SMALLER_GROUPS = (16, 32, 64)  # that a budget may have room for


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Holds what each choice costs. ``table``: a row per (layer, choice), with the ``bits`` that
    are stored of the layer's matrix, its ``width`` in bits per weight, and the ``kl`` above the
    layer's ``floor``: the KL if its weights change in their last bits. ``shapes``: [out, in] by
    layer. ``ends``: the LM head and embeddings among the layers. ``others``: number of weights and
    bits of the matrices that no choice quantizes. ``outside``: bits of all other weights."""

    shapes: Shapes
    table: pd.DataFrame = field(default_factory=pd.DataFrame)
    ends: Sequence[str] = ()
    floor: Mapping[str, float] = field(default_factory=dict)
    others: tuple[int, float] = (0, 0.0)
    outside: float = 0.0

    @property
    def numbers(self) -> int:
        """Return the number of weights that bits per weight are an average over."""
        return sum(map(math.prod, self.shapes.values())) + self.others[0]

    def of(self, chosen: Mapping[str, str]) -> tuple[float, float]:
        """Return the bits per weight, and the sum of costs, of ``chosen``, layer → choice."""
        bits, kl = self.table.loc[[*chosen.items()], ["bits", "kl"]].sum()
        return (bits + self.others[1]) / self.numbers, kl

    def from_gib(self, gib: float) -> float:
        """Return the bits per weight that are left if all weights may take ``gib``."""
        return (gib * GIB - self.outside) / self.numbers

    def gib(self, bits_per_weight: float) -> float:
        """Return the GiB of all weights at ``bits_per_weight``."""
        return (bits_per_weight * self.numbers + self.outside) / GIB


def expand(methods: Sequence[str]) -> list[str]:
    """Return the quantizers of ``methods``: of a family such as ``gptq``, or
    ``gptq:group_size=32``, one per width; others as they are. Raises RecipeError for an unknown
    one, for one that quantizes more than weights, and for a copy that others made."""
    quantizers: dict[str, None] = {}
    for method in methods:
        family, colon, options = method.partition(":")
        widths = [name for name in METHODS if re.fullmatch(rf"{re.escape(family)}-\d+bit", name)]
        quantizers |= dict.fromkeys(name + colon + options for name in widths or [family])
    for quantizer in quantizers:
        config = config_of(quantizer)
        if config.weights is None or config.beside_weights or config.weights.prequantized:
            raise RecipeError(
                f"--methods {quantizer}: not a method by which qbench itself quantizes weights "
                "alone; name such methods, as rtn, hqq, gptq or bnb"
            )
    return list(quantizers)


def with_group_size(choice: str, settings: Any) -> str:
    """Return the text of ``choice`` with the group size of its fitted ``settings``, such as
    ``gptq-4bit:group_size=64``, unless it has one: patterns of a mix would be fitted anew."""
    size = getattr(settings, "group_size", None)
    if size is None or "group_size" in choice:
        return choice
    return f"{choice}{',' if ':' in choice else ':'}group_size={size}"


def _stated_bits(settings: WeightSettings, shape: tuple[int, int]) -> float:
    """Return the bits that a matrix of this ``shape`` takes, as the settings state them."""
    return math.prod(shape) * (settings.num_bits + settings.shared_bits(*shape))


def require_budgets(
    sizes: Costs, settings: Iterable[WeightSettings], budgets: Iterable[float]
) -> None:
    """Raise RecipeError for one of ``budgets``, in bits per weight, that no choice of ``settings``
    for each layer of ``sizes`` fits, or in which all layers fit unquantized."""
    smallest = [
        min(_stated_bits(s, shape) for s in settings if s.of_ends or name not in sizes.ends)
        for name, shape in sizes.shapes.items()
    ]
    least = (sum(smallest) + sizes.others[1]) / sizes.numbers
    for bits in budgets:
        if not least <= bits < UNQUANTIZED_BITS:
            raise RecipeError(
                f"a budget of {bits:.4g} bits per weight, {sizes.gib(bits):.3g} GiB: the smallest "
                f"choice takes {least:.4g}, {sizes.gib(least):.3g} GiB; give from "
                f"{np.ceil(1000 * least) / 1000:g} to less than {UNQUANTIZED_BITS:g} bits"
            )


def smaller_groups(
    sizes: Costs, settings: Mapping[str, WeightSettings], budgets: Iterable[float]
) -> dict[str, WeightSettings]:
    """Return choices beside ``settings`` (by choice, fitted): of each method the widest that fits
    one of ``budgets``, in bits per weight, with the smallest groups that still fit. A uniform
    column might spend the rest of the budget on these, so the mix may too."""
    inside = [shape for name, shape in sizes.shapes.items() if name not in sizes.ends]
    numbers = sum(map(math.prod, inside)) + sizes.others[0]
    candidates = []
    for choice, chosen in settings.items():
        size = getattr(chosen, "group_size", None) or 0
        for group in (size, *(g for g in SMALLER_GROUPS if g < size and size % g == 0)):
            each = replace(chosen, group_size=group) if size else chosen
            bits = sum(_stated_bits(each, shape) for shape in inside) + sizes.others[1]
            name = choice.replace(f"group_size={size}", f"group_size={group}")
            family = type(each), choice.partition(":")[2]
            candidates.append((each.num_bits, bits / numbers, name, family, each))
    candidates.sort(key=itemgetter(0, 1, 2))
    further = {}
    for budget in budgets:
        widest = {family: (name, each) for _, bits, name, family, each in candidates
                  if bits <= budget}  # fmt: skip
        further |= dict(widest.values())
    return {name: each for name, each in further.items() if name not in settings}


def solve(costs: Costs, bits_per_weight: float) -> dict[str, str]:
    """Return layer → choice with the smallest sum of costs within ``bits_per_weight``: a
    multiple-choice knapsack, solved exactly, or as well as 120 seconds allow. Raises RecipeError if
    no choice is found."""
    layers, _ = pd.factorize(costs.table.index.get_level_values("layer"))
    bits, kl = costs.table[["bits", "kl"]].to_numpy().T
    once = csr_array((np.ones(len(kl)), (layers, range(len(kl)))))
    room = bits_per_weight - costs.others[1] / costs.numbers
    result = milp(
        kl * 1e6 / max(kl.max(), 1e-30),  # its tolerances are absolute
        constraints=[LinearConstraint(once, 1, 1),
                     LinearConstraint(bits[None] / costs.numbers, ub=room)],
        integrality=np.ones(len(kl)), bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-7, "time_limit": 120},
    )  # fmt: skip
    if result.x is None:
        raise RecipeError(
            f"--bits {bits_per_weight:.4g}: the solver found no choice ({result.message}); "
            "give more bits or fewer methods"
        )
    return dict(costs.table.index[result.x > 0.5])


def curve(costs: Costs, most: float = 6.0) -> list[tuple[float, float]]:
    """Return (bits per weight, sum of costs) of the best mixes of up to ``most`` bits per weight,
    which take the choice of the smallest cost in each layer at one price per bit: ``solve`` finds
    them too, a thousand times as slowly."""
    bits, kl = (costs.table[part].unstack().to_numpy() for part in ("bits", "kl"))
    points = set()
    for price in np.nanmax(kl) / np.nanmin(bits) * np.geomspace(1e-9, 10, 400):
        chosen = np.nanargmin(kl + price * bits, axis=1)[:, None]
        size, total = (np.take_along_axis(part, chosen, 1).sum() for part in (bits, kl))
        points.add(((size + costs.others[1]) / costs.numbers, total))
    return sorted(point for point in points if point[0] <= most)


def uniform_columns(costs: Costs, kl: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Return by label the ``bits``, ``kl`` and recipe's ``entry`` of the uniform columns: one per
    pair of a choice for all layers and one for LM head and embeddings, if these have choices.
    ``kl``: by choice, with all layers quantized but these two, whose costs are added."""
    at_ends = costs.table.loc[costs.ends[0]].index if costs.ends else (UNQUANTIZED,)
    columns = {}
    for choice, end in itertools.product(kl, at_ends):
        ends, entry = dict.fromkeys(costs.ends, end), uniform_entry(choice, end, costs.ends)
        bits, _ = costs.of(dict.fromkeys(costs.shapes, choice) | ends)
        total = kl[choice] + costs.of(ends)[1]
        columns[entry["label"]] = {"bits": bits, "kl": total, "entry": entry}
    return columns


def uniform_entry(choice: str, end: str = UNQUANTIZED, ends: Sequence[str] = ()) -> dict[str, Any]:
    """Return the recipe's entry of a column that gives all layers ``choice``, and ``ends``, the LM
    head and embeddings, the choice ``end``."""
    label, of_ends = (label_of(each).replace("group_size-", "g") for each in (choice, end))
    if end == UNQUANTIZED or not ends:
        return {"name": choice, "label": label}
    layers = {**dict.fromkeys(ends, end), "*": choice}
    return {"name": "mixed", "label": f"{label}-ends-{of_ends}", "layers": layers}


def column(chosen: Mapping[str, str], label: str, ends: Sequence[str] = ()) -> dict[str, Any]:
    """Return the recipe's entry, named ``label``, of the mix ``chosen``, a choice by layer:
    patterns of layers' names, the first of which counts. ``ends``: LM head and embeddings, which
    are unquantized unless a pattern names them."""
    quantized = {name: choice for name, choice in chosen.items() if choice != UNQUANTIZED}
    left_out = sorted(chosen.keys() - quantized.keys() - set(ends))
    entry = {"name": "mixed", "label": label, "layers": dict(patterns(quantized))}
    return {**entry, "ignore": left_out} if left_out else entry


def patterns(chosen: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (pattern, choice) pairs that give each layer its choice in ``chosen`` by the first
    pattern that matches. Layers of one projection are one pattern, less exceptions, which are one
    pattern if their numbers differ in the last digit alone: ``model.layers.*.mlp.up`` after
    ``model.layers.1[024].mlp.up``."""
    pairs = []
    for shared, names in alike(chosen).items():
        usual = Counter(chosen[name] for name in names).most_common(1)[0][0]
        exceptions: dict[tuple[str, str, str], str] = defaultdict(str)
        for name in names:
            if chosen[name] != usual:
                before, digit, after = re.match(r"(\D*\d*)(\d)(.*)", name).groups()
                exceptions[chosen[name], before, after] += digit
        for (choice, before, after), digits in sorted(exceptions.items()):
            pairs.append((f"{before}[{digits}]{after}", choice))
        pairs.append((shared, usual))
    return pairs


def most_bits(costs: Costs, chosen: Mapping[str, str]) -> str:
    """Return a sentence that says which projections and layers of the mix ``chosen``, a choice by
    layer, have the most bits."""
    table = costs.table.loc[[*chosen.items()]].reset_index()
    table["numbers"] = table["bits"] / table["width"]

    def means(pattern: str, form: str) -> list[str]:
        groups = table.groupby(table["layer"].str.extract(pattern, expand=False), sort=False)
        ranked = groups["bits"].sum() / groups["numbers"].sum()
        ranked = ranked.sort_values(ascending=False, kind="stable")
        return [form.format(*each) for each in ranked.items()]

    projections, layers = means(r"([^.]+)$", "{} {:.2f}"), means(r"^\D*(\d+)", "{} ({:.2f})")
    return f"bits per weight: {', '.join(projections)}; most in layers {', '.join(layers[:3])}"
