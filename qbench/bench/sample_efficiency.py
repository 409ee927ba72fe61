"""``qbench bench sample-efficiency``: figure 1 of "Sigmoid Self-Attention is Better than Softmax
Self-Attention: A Mixture-of-Experts Perspective" (Yan et al. 2025, arXiv 2502.00281; "the paper").

A row of attention is a mixture of experts with a quadratic gate (section 2.3). Data come from a
softmax mixture; mixtures with softmax and with sigmoid gates are fitted by least squares, and the
distance of their parameters from the truth is followed over the sample size. Everything is float64
and done for all repetitions at once.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from matplotlib import pyplot
from torch import Tensor

from qbench import bench
from qbench.bench import Row

FLOAT = torch.float64
SIZES = tuple(500 * 2**power for power in range(7))  # samples
SPREAD, NOISE = 2.0, 0.1  # X uniform on [−2, 2]²; standard deviation of ε
POINTS = 2048  # of a Sobol sequence, which stand for the distribution of X
BOX = 20.0  # parameters lie in [−20, 20]: the compact Θ of the theory
STARTS = 2
FITTED = (2, 3)  # experts: as many as the truth has, and one more
# The paper's appendix with its ground truth is not at hand: these are ours. Gates as (A₁₁, A₁₂,
# A₂₂, b₁, b₂, c), the last one 0, as softmax knows gates up to a common summand; experts as
# (α₁, α₂, β).
GATES = torch.tensor([[1.0, 0.5, -1.0, 1.0, -1.0, 0.5], [0.0] * 6], dtype=FLOAT)
EXPERTS = torch.tensor([[2.0, 1.0, 1.0], [-1.0, 2.0, 0.5]], dtype=FLOAT)
# Printed in section 5.1: the exponent of n.
PRINTED = {
    ("softmax", "ReLU"): -0.24,
    ("sigmoid", "ReLU"): -0.51,
    ("softmax", "linear"): -0.07,
    ("sigmoid", "linear"): -0.46,
}
Gating = Literal["softmax", "sigmoid"]
Expert = Literal["ReLU", "linear"]
MODEL = ["expert", "gating", "fitted"]  # what is fitted, of a row


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """f(x) = Σ_i gate_i(s_1(x), …) · E(x, η_i), the paper's equation (5) and its softmax form, with
    fully quadratic scores s_i(x) = xᵀ A_i x + b_iᵀ x + c_i.

    Parameters [..., 9 N] hold the gates [N, 6], A's off-diagonal entry times √2 so that norms are
    A's Frobenius norms, then the experts η = (α, β) [N, 3].
    """

    gating: Gating
    expert: Expert
    fitted: int  # experts N; the truth has two

    def pack(self, gates: Tensor, experts: Tensor) -> Tensor:
        return torch.cat([gates.flatten(-2), experts.flatten(-2)], -1)

    def unpack(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        gates, experts = parameters.split([6 * self.fitted, 3 * self.fitted], -1)
        return gates.unflatten(-1, (-1, 6)), experts.unflatten(-1, (-1, 3))

    def values(self, x: Tensor, parameters: Tensor) -> Tensor:
        """f at ``x`` [..., n, 2]: [..., n]."""
        return self._parts(x, parameters)[0]

    def jacobian(self, x: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """f [..., n], and its derivatives by the parameters [..., n, 9 N]."""
        f, weights, experts, slopes = self._parts(x, parameters)
        by_score = weights * (1 - weights) * experts
        if self.gating == "softmax":
            by_score = weights * (experts - f[..., None])
        quadratic, affine = _quadratic(x), _affine(x)
        gates = by_score[..., None] * quadratic[..., None, :]
        rest = (weights * slopes)[..., None] * affine[..., None, :]
        return f, torch.cat([gates.flatten(-2), rest.flatten(-2)], -1)

    def _parts(self, x: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gates, eta = self.unpack(parameters)
        scores = _quadratic(x) @ gates.mT
        weights = scores.softmax(-1) if self.gating == "softmax" else scores.sigmoid()
        experts = _affine(x) @ eta.mT
        slopes = torch.ones_like(experts)
        if self.expert == "ReLU":
            slopes, experts = (experts > 0).to(FLOAT), experts.relu()
        return (weights * experts).sum(-1), weights, experts, slopes


def _quadratic(x: Tensor) -> Tensor:
    first, second = x[..., :1], x[..., 1:]
    return torch.cat([first**2, math.sqrt(2) * first * second, second**2, _affine(x)], -1)


def _affine(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def true_gates(gating: Gating) -> Tensor:
    """Return the true gates, [2, 6]. Two softmax gates are sigmoid gates too, softmax(s, 0) =
    (σ(s), σ(−s)), so that both models contain the truth."""
    scaled = GATES * torch.tensor([1, math.sqrt(2), 1, 1, 1, 1], dtype=FLOAT)
    return scaled if gating == "softmax" else torch.stack([scaled[0], -scaled[0]])


def least_squares(
    mixture: Mixture, x: Tensor, y: Tensor, start: Tensor, *, steps: int, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Fit all problems at once by Levenberg–Marquardt within the box, the estimator of section 3.

    ``x`` [R, n, 2], ``y`` [R, n], ``start`` [R, P]; returns parameters [R, P] and mean squared
    residuals [R]. A problem ends when a step reduces its residual by less than the share
    ``tolerance``.
    """
    best, damping = start.clone(), torch.full(start.shape[:1], 1e-2, dtype=FLOAT)
    loss = (y - mixture.values(x, best)).square().mean(-1)
    at = torch.arange(len(best))
    for _ in range(steps):
        f, jacobian = mixture.jacobian(x[at], best[at])
        gradient = (jacobian.mT @ (y[at] - f)[..., None]) / x.shape[1]
        normal = jacobian.mT @ jacobian / x.shape[1]
        scale = normal.diagonal(dim1=-2, dim2=-1) + 1e-8
        damped = normal + torch.diag_embed(damping[at, None] * scale)
        tried = (best[at] + torch.linalg.solve(damped, gradient)[..., 0]).clamp(-BOX, BOX)
        after = (y[at] - mixture.values(x[at], tried)).square().mean(-1)
        better = after < loss[at]
        settled = better & (loss[at] - after < tolerance * loss[at]) & (damping[at] < 1)
        best[at[better]], loss[at[better]] = tried[better], after[better]
        damping[at] = torch.where(better, damping[at] / 3, damping[at] * 4).clamp(min=1e-12)
        at = at[~settled & (damping[at] < 1e7)]
        if not len(at):
            break
    return best, loss


def softmax_losses(mixture: Mixture, parameters: Tensor) -> tuple[Tensor, Tensor]:
    """Voronoi losses L_1 of section 4.1.1 and L_{2,r} of section 4.1.2 with r = 1, against the
    truth: each [R].

    L_1 = Σ_j |Σ_{i∈A_j} w_i − w_j*| + Σ_{|A_j|>1} Σ_i w_i (‖ΔA‖² + ‖Δb‖² + ‖Δη‖²)
    + Σ_{|A_j|=1} Σ_i w_i (‖ΔA‖ + ‖Δb‖ + ‖Δη‖), and L_{2,1} the same without squares. The paper
    prints them for sigmoid gates, where w = σ(c), and refers to others for softmax: there w = e^c,
    which weighs the differences too (Nguyen et al. 2024, arXiv 2402.02952), so that an expert
    without weight counts nothing, and |Δc| of a single one stands in the first sum. The Voronoi
    cells A_j are those of the atoms (A, b, η). Softmax knows gates up to a common summand: it is
    chosen so that the last cell's mean (A, b) and sum of e^c are the truth's.
    """
    gates, experts = mixture.unpack(parameters)
    true, eta = true_gates("softmax"), EXPERTS
    centres = torch.cat([true[:, :5], eta], -1)
    for _ in range(4):  # cells and summand follow from each other
        atoms = torch.cat([gates[..., :5], experts], -1)
        cell = torch.cdist(atoms, centres.expand(len(atoms), -1, -1)).argmin(-1)  # [R, N]
        last = cell == 1
        last = torch.where(last.any(-1, keepdim=True), last, True)
        logits = torch.where(last, gates[..., 5], -math.inf)
        mean = (logits.softmax(-1)[..., None] * gates).sum(1, keepdim=True)
        mean[..., 5] = logits.logsumexp(-1, keepdim=True)
        gates = gates - mean
    weight = gates[..., 5].exp()
    distances = torch.stack(_distances(gates - true[cell], experts - eta[cell]))  # [3, R, N]
    loss_1, loss_2 = 0.0, 0.0
    for j in range(2):
        inside = (cell == j).to(FLOAT)
        mass = ((inside * weight).sum(-1) - true[j, 5].exp()).abs()
        single = inside.sum(-1, keepdim=True) <= 1
        first_order = distances.sum(0)
        mixed = torch.where(single, first_order, distances.square().sum(0))
        loss_1 = loss_1 + mass + (inside * weight * mixed).sum(-1)
        loss_2 = loss_2 + mass + (inside * weight * first_order).sum(-1)
    return loss_1, loss_2


def sigmoid_loss(mixture: Mixture, parameters: Tensor, best: Tensor) -> Tensor:
    """Voronoi loss L_3 of section 4.2 (Theorem 3): Σ_i ‖A_i − Ā_i‖ + ‖b_i − b̄_i‖ + |c_i − c̄_i| +
    ‖η_i − η̄_i‖ [R], against ``best``, a Ḡ of N atoms with f_Ḡ = f_G*."""
    (gates, experts), (true, eta) = mixture.unpack(parameters), mixture.unpack(best)
    offsets = (gates - true)[..., 5].abs()
    return (sum(_distances(gates - true, experts - eta)) + offsets).sum(-1)


def _distances(gates: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ‖ΔA‖, ‖Δb‖, ‖Δη‖, [..., N] each."""
    return gates[..., :3].norm(dim=-1), gates[..., 3:5].norm(dim=-1), experts.norm(dim=-1)


def bench_sample_efficiency(repetitions: int, *, log: Callable[[str], None]) -> dict[str, Any]:
    """Fit both models with both kinds of experts, with as many experts as the truth and with one
    more, for each of ``SIZES``; return the rows.

    ``log`` is called with a line per size. Rows have lists with one number per repetition: ``loss``
    is L_3 for sigmoid gates and L_{2,1} for softmax gates, ``loss_1`` L_1 for softmax gates,
    ``error`` the distance ‖f_Ĝ − f_G*‖ in L²(μ).
    """
    rows = []
    models = product(("ReLU", "linear"), ("softmax", "sigmoid"), FITTED)
    for (expert, gating, fitted), size in product(models, SIZES):
        mixture = Mixture(gating=gating, expert=expert, fitted=fitted)
        rows.append(_measured(mixture, size, repetitions))
        loss = np.mean(rows[-1]["loss"])
        log(f"{gating}, {fitted} {expert} experts, n = {size:,}: loss {loss:.3g}")
    return {"printed": [[*key, value] for key, value in PRINTED.items()], "rows": rows}


def _measured(mixture: Mixture, size: int, repetitions: int) -> Row:
    generator = torch.Generator().manual_seed(size)  # every model is fitted to the same data
    truth = Mixture(gating="softmax", expert=mixture.expert, fitted=2)
    true = truth.pack(true_gates("softmax"), EXPERTS)
    x = SPREAD * (2 * torch.rand(repetitions, size, 2, generator=generator, dtype=FLOAT) - 1)
    noise = torch.randn(repetitions, size, generator=generator, dtype=FLOAT)
    y = truth.values(x, true.expand(repetitions, -1)) + NOISE * noise
    best_fit, loss = None, torch.full((repetitions,), math.inf, dtype=FLOAT)
    for start in _starts(mixture, repetitions, generator):
        tried, after = least_squares(mixture, x, y, start, steps=150, tolerance=1e-8)
        best_fit = (
            tried if best_fit is None else torch.where((after < loss)[:, None], tried, best_fit)
        )
        loss = torch.minimum(loss, after)
    sobol = torch.quasirandom.SobolEngine(2, scramble=True, seed=0).draw(POINTS).to(FLOAT)
    points = (SPREAD * (2 * sobol - 1)).expand(repetitions, -1, -1)
    exact = truth.values(points, true.expand(repetitions, -1))
    error = (mixture.values(points, best_fit) - exact).square().mean(-1).sqrt()
    if mixture.gating == "softmax":
        loss_1, main = softmax_losses(mixture, best_fit)
    else:
        # f_Ḡ = f_G* for a whole set of Ḡ, and the loss is the smallest over it: one close to the
        # estimate is found by going on from it on noiseless data.
        best, _ = least_squares(mixture, points, exact, best_fit, steps=200, tolerance=1e-6)
        loss_1, main = torch.zeros(0), sigmoid_loss(mixture, best_fit, best)
    given = asdict(mixture) | {"size": size}
    return given | {"loss": main.tolist(), "loss_1": loss_1.tolist(), "error": error.tolist()}


def _starts(mixture: Mixture, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Return starting points [count, P] near the truth; a third expert shares the weight of one of
    the two (with sigmoid gates: the expert)."""
    for shared in range(STARTS):
        chosen = [0, 1, shared % 2][: mixture.fitted]
        gates, experts = true_gates(mixture.gating)[chosen].clone(), EXPERTS[chosen].clone()
        if mixture.fitted == 3:
            for i in (shared % 2, 2):
                if mixture.gating == "softmax":
                    gates[i, 5] -= math.log(2)
                else:
                    experts[i] /= 2
        exact = mixture.pack(gates, experts).expand(count, -1)
        yield exact + 0.1 * torch.randn(exact.shape, generator=generator, dtype=FLOAT)


def rate(sizes: list[int], values: list[list[float]]) -> tuple[float, float, float]:
    """Return the exponent of n in ``values`` [sizes, repetitions]: the slope of log mean loss over
    log n by least squares, and its 2.5th and 97.5th percentiles over 1,000 draws of the
    repetitions."""
    losses, draws = np.array(values), np.random.default_rng(0)
    drawn = draws.integers(0, losses.shape[1], (1000, *losses.shape))
    means = np.take_along_axis(losses[None], drawn, axis=2).mean(2)  # [draws, sizes]
    slopes = np.polyfit(np.log(sizes), np.log(means).T, 1)[0]
    value = np.polyfit(np.log(sizes), np.log(losses.mean(1)), 1)[0]
    return value, np.quantile(slopes, 0.025), np.quantile(slopes, 0.975)


def table(result: dict[str, Any]) -> str:
    """Return the rates beside those that the paper prints, in Markdown."""
    rows, lines = pd.DataFrame(result["rows"]), []
    for (expert, gating, fitted), group in rows.groupby(MODEL, sort=False):
        line = {"expert": expert, "gating": gating, "fitted": fitted}
        for of in ("loss", "loss_1", "error") if gating == "softmax" else ("loss", "error"):
            value, low, high = rate([*group["size"]], [*group[of]])
            line[of] = f"{value:.2f} [{low:.2f}, {high:.2f}]"
        line["printed"] = PRINTED[gating, expert]
        line["ends"] = " → ".join(f"{np.mean(group['loss'].iloc[i]):.3g}" for i in (0, -1))
        lines.append(line)
    columns = {
        "experts": ("expert", ""), "gates": ("gating", ""), "fitted": ("fitted", "d"),
        "rate of the loss": ("loss", "s"), "printed": ("printed", ".2f"),
        "mean loss": ("ends", "s"), "rate of L_1": ("loss_1", "s"),
        "rate of ‖f_Ĝ − f_G*‖": ("error", "s"),
    }  # fmt: skip
    sizes = sorted(rows["size"].unique())
    return (
        f"{len(rows['loss'][0])} repetitions at each of {len(sizes)} sample sizes from "
        f"{sizes[0]:,} to {sizes[-1]:,}; the truth has 2 experts.\n\n"
        + bench.table(lines, columns)
        + "\n\nLoss: L_3 for sigmoid gates, L_{2,1} for softmax gates. Rates: exponents of n, in "
        "brackets 95 % over repetitions."
    )


def figure(result: dict[str, Any]) -> bytes:
    """Return the paper's figure 1 as SVG: mean loss over n on logarithmic axes, bars from the
    smallest to the largest repetition, and the fitted lines."""
    pyplot.switch_backend("Agg")
    by_expert = pd.DataFrame(result["rows"]).groupby("expert", sort=False)
    colours = {"softmax": "#0072B2", "sigmoid": "#D55E00"}
    with pyplot.rc_context({"svg.hashsalt": "qbench", "font.size": 9}):
        drawn, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
        for axis, (expert, rows) in zip(axes, by_expert, strict=True):
            for (gating, fitted), group in rows.groupby(MODEL[1:], sort=False):
                sizes, losses = group["size"].to_numpy(), np.stack(group["loss"])
                mean = losses.mean(1)
                slope, offset = np.polyfit(np.log(sizes), np.log(mean), 1)
                axis.errorbar(
                    sizes, mean, [mean - losses.min(1), losses.max(1) - mean],
                    color=colours[gating], marker="o" if fitted == 3 else "s", markersize=4,
                    linestyle="none", capsize=2, linewidth=0.8,
                )  # fmt: skip
                axis.plot(
                    sizes, np.exp(offset) * sizes**slope, color=colours[gating],
                    linestyle="-" if fitted == 3 else ":",
                    label=f"{gating}, {fitted} experts: n^{slope:.2f}",
                )  # fmt: skip
            axis.set(xscale="log", yscale="log", xlabel="samples n", title=f"{expert} experts")
            axis.legend(fontsize=7)
        axes[0].set_ylabel("Voronoi loss (mean, smallest to largest)")
        written = io.BytesIO()
        drawn.savefig(written, format="svg", metadata={"Date": None})
        pyplot.close(drawn)
    return written.getvalue()
