"""Choose a quantizer for each linear layer so that the sum of costs is smallest under a budget of
bits, and write the choice as a column of a recipe. Imports no torch.

A cost is the KL divergence, in nats per token on calibration text, of the model with that layer
alone quantized. Bits are those of the tables: all that is stored of a matrix, scales and zeros
counted, over the matrices outside embeddings and LM head.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from qbench.errors import RecipeError
from qbench.machine import redirected
from qbench.quantizers.config import Shapes, WeightSettings, alike
from qbench.quantizers.registry import METHODS, config_of
from qbench.quantizers.texts import CalibrationText
from qbench.records import UNQUANTIZED_BITS

GIB = 8 * 2**30  # bits
UNQUANTIZED = "unquantized"  # the choice to leave a layer as it is
SMALLER_GROUPS = (16, 32, 64)  # that a uniform column may spend the rest of a budget on


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchText:
    """The text that costs are measured on: the last ``windows`` of the calibration text ``source``,
    their first ``length`` tokens. The others calibrate."""

    source: CalibrationText
    windows: int
    length: int

    def key_parts(self) -> dict[str, Any]:
        text = {name: getattr(self.source, name)
                for name in ("digest", "samples", "length", "seed", "bos")}  # fmt: skip
        return {**text, "windows": self.windows, "cut": self.length}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Holds what each choice of each layer costs. ``parameters``: numbers of a layer's matrix;
    ``bits`` and ``kl``: by choice, then by layer; ``floor``: by layer, the KL of other last bits,
    which ``kl`` is above; ``others``: numbers and bits of matrices that no choice quantizes;
    ``outside``: bits of embeddings, LM head, norms and biases."""

    parameters: Mapping[str, int]
    bits: Mapping[str, Mapping[str, float]]
    kl: Mapping[str, Mapping[str, float]]
    floor: Mapping[str, float] = field(default_factory=dict)
    others: tuple[int, float] = (0, 0.0)
    outside: float = 0.0

    @property
    def numbers(self) -> int:
        return sum(self.parameters.values()) + self.others[0]

    def bits_per_weight(self, chosen: Mapping[str, str]) -> float:
        """Return the bits per weight, as the tables count them, of a choice for each layer."""
        stored = sum(self.bits[choice][layer] for layer, choice in chosen.items())
        return (stored + self.others[1]) / self.numbers

    def uniform(self, choice: str) -> dict[str, str]:
        return dict.fromkeys(self.parameters, choice)

    def sum_of(self, chosen: Mapping[str, str]) -> float:
        """Return the sum of the costs of a choice for each layer."""
        return sum(self.kl[choice][layer] for layer, choice in chosen.items())

    def from_gib(self, gib: float) -> float:
        """Return the bits per weight that are left if all weights may take ``gib``."""
        return (gib * GIB - self.outside) / self.numbers

    def gib(self, bits_per_weight: float) -> float:
        return (bits_per_weight * self.numbers + self.outside) / GIB


def expand(methods: Sequence[str]) -> list[str]:
    """Return quantizers: of a family such as ``gptq``, or ``gptq:group_size=32``, one per width.

    Raises RecipeError for an unknown one, or one that is not made here of weights alone."""
    quantizers: list[str] = []
    for method in methods:
        family, colon, options = method.partition(":")
        widths = [name for name in METHODS if re.fullmatch(rf"{re.escape(family)}-\d+bit", name)]
        quantizers += [name + colon + options for name in widths or [family]]
    for quantizer in quantizers:
        config = config_of(quantizer)
        if config.weights is None or config.beside_weights or config.weights.prequantized:
            raise RecipeError(
                f"--methods {quantizer}: name methods that quantize weights alone, here: rtn, hqq, "
                "gptq, bnb"
            )
    return list(dict.fromkeys(quantizers))


def require_budget(bits_per_weight: float, least: float) -> None:
    """Raise RecipeError if no choice takes so few bits as the budget, or if it is no budget."""
    if not least <= bits_per_weight < UNQUANTIZED_BITS:
        raise RecipeError(
            f"--bits {bits_per_weight:.4g}: the smallest choice takes {least:.4g} bits per weight; "
            f"give a budget from {np.ceil(1000 * least) / 1000:g} to less than {UNQUANTIZED_BITS:g}"
        )


def least_bits(settings: Iterable[WeightSettings], shapes: Shapes) -> float:
    """Return the bits per weight of the smallest choice, as the settings state them."""
    settings, numbers = list(settings), {name: math.prod(shape) for name, shape in shapes.items()}
    least = (numbers[name] * min(s.num_bits + s.shared_bits(*shape) for s in settings)
             for name, shape in shapes.items())  # fmt: skip
    return sum(least) / max(1, sum(numbers.values()))


def solve(costs: Costs, bits_per_weight: float) -> dict[str, str]:
    """Return the choice of each layer with the smallest sum of costs of at most
    ``bits_per_weight``: a multiple-choice knapsack, solved exactly.

    Raises RecipeError if the budget is below the smallest choice or not below 16 bits.
    """
    layers = list(costs.parameters)
    smallest = {n: min(costs.bits, key=lambda choice: costs.bits[choice][n]) for n in layers}
    require_budget(bits_per_weight, costs.bits_per_weight(smallest))
    items = [(place, c) for place, name in enumerate(layers) for c in _useful(costs, name)]
    objective = np.array([costs.kl[choice][layers[place]] for place, choice in items])
    weights = np.array([costs.bits[choice][layers[place]] for place, choice in items])
    once = csr_array((np.ones(len(items)), ([place for place, _ in items], range(len(items)))))
    room = bits_per_weight - costs.others[1] / costs.numbers
    with redirected(Path(os.devnull)):  # the solver prints
        result = milp(
            objective * 1e6 / max(objective.max(), 1e-30),  # its tolerances are absolute
            constraints=[LinearConstraint(once, 1, 1),
                         LinearConstraint(weights[None] / costs.numbers, ub=room)],
            integrality=np.ones(len(items)), bounds=Bounds(0, 1),
            options={"mip_rel_gap": 1e-7, "time_limit": 120},
        )  # fmt: skip
    if result.x is None:
        raise RecipeError(f"--bits {bits_per_weight:.4g}: no choice was found: {result.message}")
    return {layers[place]: c for (place, c), x in zip(items, result.x, strict=True) if x > 0.5}


def _useful(costs: Costs, layer: str) -> list[str]:
    """Return the choices of a layer that no other choice beats in bits and cost."""
    useful: list[str] = []
    for choice in sorted(costs.bits, key=lambda c: (costs.bits[c][layer], costs.kl[c][layer])):
        if not useful or costs.kl[choice][layer] < costs.kl[useful[-1]][layer]:
            useful.append(choice)
    return useful


def column(chosen: Mapping[str, str], label: str) -> dict[str, Any]:
    """Return the recipe's entry of a mix: patterns of layers' names, the first of which counts."""
    quantized = {name: choice for name, choice in chosen.items() if choice != UNQUANTIZED}
    left_out = sorted(chosen.keys() - quantized.keys())
    entry = {"name": "mixed", "label": label, "layers": dict(patterns(quantized))}
    return {**entry, "ignore": left_out} if left_out else entry


def patterns(chosen: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return (pattern, choice) pairs that give each layer its choice by the first pattern that
    matches. Layers of one projection are one pattern, less exceptions: ``model.layers.*.mlp.up``
    after ``model.layers.1[024].mlp.up``."""
    pairs = []
    for shared, names in alike(chosen).items():
        counts = Counter(chosen[name] for name in names)
        usual = max(counts, key=counts.__getitem__)
        for choice in sorted(counts.keys() - {usual}):
            pairs += [(p, choice) for p in _numbered([n for n in names if chosen[n] == choice])]
        pairs.append((shared, usual))
    return pairs


def _numbered(names: Iterable[str]) -> list[str]:
    """Return patterns that match ``names`` alone, which differ in numbers; names whose first
    number differs in its last digit alone are one pattern."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        before, number, after = re.match(r"(\D*)(\d*)(.*)", name).groups()
        groups.setdefault((before + number[:-1], after), []).append(number[-1:])
    return [
        f"{before}{digits[0] if len(digits) == 1 else '[' + ''.join(sorted(digits)) + ']'}{after}"
        for (before, after), digits in groups.items()
    ]


def uniform_candidates(
    costs: Costs, settings: Mapping[str, Any], bits_per_weight: float
) -> dict[str, tuple[dict[str, Any], float]]:
    """Return uniform columns that fit, by label: the recipe's entry and its bits per weight. Of
    each method there is the widest, and that with the smallest groups that still fit.

    ``settings``: the fitted settings of each choice.
    """
    bits = {choice: costs.bits_per_weight(costs.uniform(choice)) for choice in settings}
    widest: dict[tuple[type, str], str] = {}
    for choice in sorted(settings, key=bits.__getitem__):
        if bits[choice] <= bits_per_weight:
            widest[type(settings[choice]), choice.partition(":")[2]] = choice
    columns = {}
    for choice in widest.values():
        fitted, size = settings[choice], getattr(settings[choice], "group_size", None)
        columns[_label(choice)] = {"name": choice, "label": _label(choice)}, bits[choice]
        for smaller in SMALLER_GROUPS if size else ():
            name = choice.replace(f"group_size={size}", f"group_size={smaller}")
            # Of a matrix of 4096 × 4096: on shapes depends the padding of HQQ's 3 bits alone
            shared = [
                s.shared_bits(4096, 4096) for s in (replace(fitted, group_size=smaller), fitted)
            ]
            more = bits[choice] + shared[0] - shared[1]
            if smaller < size and more <= bits_per_weight:
                columns[_label(name)] = {"name": name, "label": _label(name)}, more
                break
    return columns


def explicit(choice: str, settings: Any) -> str:
    """Return the text of a choice with the group size of its fitted ``settings``: the patterns of
    a mix would be fitted to their own layers."""
    size = getattr(settings, "group_size", None)
    if size is None or "group_size" in choice:
        return choice
    return f"{choice}{',' if ':' in choice else ':'}group_size={size}"


def _label(choice: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", choice).replace("group_size-", "g")


def asking(costs: Costs, chosen: Mapping[str, str]) -> str:
    """Return a sentence that says which projections and layers of a mix have the most bits."""

    def mean(names: Sequence[str]) -> float:
        numbers = sum(costs.parameters[n] for n in names)
        return sum(costs.bits[chosen[n]][n] for n in names) / numbers

    sizes = {shared.rpartition(".")[2]: mean(names) for shared, names in alike(chosen).items()}
    order = sorted(sizes, key=sizes.__getitem__, reverse=True)
    layers: dict[int, list[str]] = {}
    for name in chosen:
        if number := re.search(r"\d+", name):
            layers.setdefault(int(number[0]), []).append(name)
    means = {layer: mean(names) for layer, names in layers.items()}
    top = sorted(means, key=means.__getitem__, reverse=True)[:3]
    text = "bits per weight: " + ", ".join(f"{name} {sizes[name]:.2f}" for name in order)
    return f"{text}; most in layers " + ", ".join(f"{layer} ({means[layer]:.2f})" for layer in top)
