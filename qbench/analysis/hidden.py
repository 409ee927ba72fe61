"""Measure hidden states (kurtosis, extremes, massive activations, quantiles) and the size of linear
layers' inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qbench.errors import UnavailableError
from qbench.records import Hidden, LinearInput
from qbench.streaming import decoder_blocks

MASSIVE_VALUE = 100.0  # Sun et al. 2024, section 2
MASSIVE_TO_MEDIAN = 1000.0
MASSIVE_KEPT = 100  # listed in a record; all are counted


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the decoder's layers in order. Raises UnavailableError if there is no such list."""
    count = model.config.get_text_config().num_hidden_layers
    _, blocks = decoder_blocks(model)
    if len(blocks) != count:
        raise UnavailableError(
            f"{type(model).__name__}: its {count} decoder layers cannot be found; analyze a model "
            "that holds them in one list, such as LlamaForCausalLM"
        )
    return blocks


class Massive(NamedTuple):
    """A massive activation. ``to_median``: its magnitude over the median magnitude."""

    value: float
    to_median: float
    layer: int
    sample: int
    position: int
    channel: int


@dataclass(kw_only=True, eq=False)
class States:
    """Statistics of one layer's hidden states. ``rows`` [N, 7], one per text of T · D values: Σ x,
    Σ x², Σ x³, Σ x⁴, lowest, highest, median magnitude; float64, on the model's device. ``counts``:
    see :func:`counts`."""

    values: int = 0  # of one text
    rows: list[Tensor] = field(default_factory=list)
    counts: Tensor | int = 0
    dtype: torch.dtype = torch.float32
    massive: int = 0

    @torch.no_grad()
    def add(self, states: Tensor, *, layer: int, first: int) -> list[Massive]:
        """Add the hidden states [B, T, D] of texts ``first``, ``first`` + 1, …; return the massive
        activations among them, the largest ``MASSIVE_KEPT`` at most. Sun et al. 2024 (arXiv
        2402.17762, section 2): a value is massive if its magnitude "surpasses 100 and is at least
        or around 1,000 times larger than the median magnitude of its hidden state". Here: 1,000
        times or more, and the hidden state of one layer and text, [T, D]."""
        wide = states.double()
        squares = wide.square()
        cubes = (squares * wide).flatten(1).sum(1)
        self.values, self.dtype = wide[0].numel(), states.dtype
        second = squares.flatten(1).sum(1)
        fourth = squares.square_().flatten(1).sum(1)
        self.counts = self.counts + counts(states)
        magnitudes = states.abs()
        medians = magnitudes.flatten(1).median(1).values.double()
        lowest, highest = (end.double() for end in states.flatten(1).aminmax(dim=1))
        powers = [wide.flatten(1).sum(1), second, cubes, fourth]
        self.rows.append(torch.stack([*powers, lowest, highest, medians], 1))
        limits = (medians * MASSIVE_TO_MEDIAN).clamp(min=MASSIVE_VALUE)
        if not (torch.maximum(-lowest, highest) >= limits).any():
            return []
        limits = limits[:, None, None]
        indices = ((magnitudes > MASSIVE_VALUE) & (magnitudes.double() >= limits)).nonzero()
        self.massive += len(indices)
        magnitude = magnitudes[indices.unbind(1)]
        indices = indices[magnitude.topk(min(len(indices), MASSIVE_KEPT)).indices]
        values = states[indices.unbind(1)].double()
        ratios = values.abs() / medians[indices[:, 0]]
        return [
            Massive(value, ratio, layer, first + sample, position, channel)
            for value, ratio, (sample, position, channel) in zip(
                values.tolist(), ratios.tolist(), indices.tolist(), strict=True
            )
        ]


def pooled_kurtosis(powers: Tensor, values: int) -> float:
    """Return μ4 / σ⁴ of all values at once, 3 for a normal distribution; NaN if all are equal.
    ``powers`` [N, 4]: see :class:`States`, each row over ``values`` values. The softpick paper
    (section 6.3, table 4) takes the outputs of every decoder layer, before the final norm; it does
    not say whether 3 is subtracted."""
    # Float64 is precise enough, since means of hidden states are small.
    first, second, third, fourth = (powers.sum(0) / (values * len(powers))).unbind(-1)
    moment = (fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4).item()
    variance = (second - first**2).item()
    return moment / variance**2 if variance > 0 else float("nan")


def summary(layers: list[States]) -> Hidden:
    """Return the statistics of one layer's hidden states, or of several layers' together."""
    rows = torch.cat([row for layer in layers for row in layer.rows]).cpu()
    powers, (lowest, highest, medians) = rows[:, :4], rows[:, 4:].unbind(1)
    values = layers[0].values
    largest = torch.maximum(lowest.abs(), highest.abs())
    every = sum(layer.counts for layer in layers)
    return Hidden(
        kurtosis=pooled_kurtosis(powers, values),
        minimum=lowest.min().item(),
        maximum=highest.max().item(),
        median=medians.median().item(),
        largest_to_median=(largest / medians).max().item(),
        massive=sum(layer.massive for layer in layers),
        quantiles=quantiles(every, exact=layers[0].dtype == torch.bfloat16),
    )


LEVELS = (0.001, 0.01, 0.25, 0.5, 0.75, 0.99, 0.999)
BINS = 1 << 16


def counts(values: Tensor) -> Tensor:
    """Return how many of ``values`` begin with each pattern of 16 bits of a float32, int64 [BINS].
    These are the values of bfloat16: those with sign 0 by magnitude, then the negative."""
    patterns = values.detach().float().contiguous().view(torch.int32) >> 16
    return torch.bincount((patterns & (BINS - 1)).flatten(), minlength=BINS)


def quantiles(pattern_counts: Tensor, *, exact: bool) -> dict[str, float]:
    """Return the quantiles, by level as text, at LEVELS from ``pattern_counts``, the int64 [BINS]
    of :func:`counts`. ``exact``: the values were bfloat16, so that each pattern is one value.
    Otherwise it is a range of values, and its middle is returned, at most 0.4 % off."""
    patterns = torch.arange(BINS, dtype=torch.int32) << 16
    values = (patterns + (0 if exact else 1 << 15)).view(torch.float32)
    values[patterns << 1 == 0] = 0.0  # of either sign
    values, order = values.sort(stable=True)
    below = pattern_counts.cpu()[order].cumsum(0)
    total = int(below[-1])
    ranks = [min(total, max(1, -int(-level * total // 1))) for level in LEVELS]
    places = torch.searchsorted(below, torch.tensor(ranks))
    return dict(zip(map(str, LEVELS), values[places].tolist(), strict=True))


def input_sizes(batch: Tensor) -> Tensor:
    """Return the number of values, the largest |x| and Σ x² of the inputs ``batch`` [B, T, D] of a
    linear layer: float64 [3] on their device."""
    wide = batch.float()
    squares = wide.square().sum(-1).sum(dtype=torch.float64)
    return torch.stack([torch.full_like(squares, wide.numel()), wide.abs().max().double(), squares])


def input_summary(name: str, sizes: list[Tensor]) -> LinearInput:
    """Return a part of the record: the layer ``name`` with the ``input_sizes`` of all batches."""
    numbers, largest, squares = zip(*(each.tolist() for each in sizes), strict=True)
    return LinearInput(name=name, largest=max(largest), rms=(sum(squares) / sum(numbers)) ** 0.5)
