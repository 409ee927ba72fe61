"""Kernels that are in the code and not in use, for ``qbench bench attention --tiles``: each is
checked, and then timed in turns with the kernel that is in use.

A check runs in a process of its own, which is ended if it hangs: against float64, and over and over
on inputs that give each program many blocks, where a race shows. What fails is refused and named.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from qbench.attention import reference
from qbench.attention.kernels import gluon_backward, lasting, launch, recall, tiles
from qbench.attention.kernels.settings import Parameters, Settings, kernel_modes
from qbench.attention.normalizers import NORMALIZERS
from qbench.bench.attention_timing import captured, given, random_tensor

SHAPES = ((4, 4096, 16), (8, 1024, 16))  # batch, length, heads
SMALL = (2, 640, 4)  # of the check against float64; no multiple of 192
LIMIT = 1e-2  # ‖error‖ / ‖truth‖ in bf16
FAR = 3e-2  # the same of scores ten times as large beside a cap, see tests/gpu
WORST = 1e-2  # of any 64 rows, beside the kernel in use
LEVEL = 2e-2  # of any row's lse in log2 units, beside the kernel in use: its sums may be of bf16
RUNS = 10
PATIENCE_S = 180.0
TURNS, REPLAYS = 15, 3
NONE = {"in use": None, "tried": None, "beside": None}
CAP = 50.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A kernel of softmax, see ``tiles.LASTING_TRIED`` and ``gluon_backward.AHEAD_TRIED``: the
    forward pass, or with ``backward`` the queries' gradients, for heads of ``width``."""

    width: int
    backward: bool
    softcap: float = 0.0
    sloped: bool = False

    def __str__(self) -> str:
        words = ["softmax"]
        words += ["soft cap"] if self.softcap else []
        words += ["ALiBi"] if self.sloped else []
        words += ["queries ahead" if self.backward else "programs that last"]
        return ", ".join(words)

    def settings(self, length: int) -> Settings:
        scale = self.width**-0.5
        return Settings("softmax", scale, self.softcap, True, 0, length, length)

    def parameters(self, heads: int) -> dict[str, Tensor]:
        return given("softmax", heads, sloped=self.sloped)

    def asked(self, parameters: Parameters) -> int:
        """Bits of modes.py."""
        kernels = NORMALIZERS.get("softmax").kernels
        assert kernels is not None
        bits = kernel_modes(kernels, parameters, self.softcap)
        arithmetic = tiles.arithmetic(
            self.width, "softmax", self.softcap, bits, backward=self.backward
        )
        return bits | arithmetic

    def applies(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether it is what computes this, while it is :meth:`used`."""
        heads = query.shape[1]
        asked = self.asked(Parameters.of(self.parameters(heads)))
        plain = (query, key, value, True, 0)
        if self.backward:
            there = (self.width, asked) in gluon_backward.AHEAD
            return there and gluon_backward.fits(*plain, asked)
        kind = tiles.forward_tile(self.width, query.dtype, "softmax", asked).lasting
        return kind is not None and lasting.fits(*plain, "softmax", asked, self.softcap, kind)

    @contextmanager
    def used(self) -> Iterator[None]:
        """While kernels are launched with it, from the shortest length on."""
        kept = dict(tiles.LASTING), dict(gluon_backward.AHEAD), gluon_backward.ENOUGH
        if self.backward:
            gluon_backward.AHEAD.update(gluon_backward.AHEAD_TRIED)
            gluon_backward.ENOUGH = 0
        else:
            tiles.LASTING[self.width] = replace(tiles.LASTING_TRIED[self.width], shortest=0)
        recall.forget()
        try:
            yield
        finally:
            tiles.LASTING.clear()
            tiles.LASTING.update(kept[0])
            gluon_backward.AHEAD.clear()
            gluon_backward.AHEAD.update(kept[1])
            gluon_backward.ENOUGH = kept[2]
            recall.forget()


TRIED = (
    *(Tried(width=width, backward=False, softcap=CAP) for width in tiles.LASTING_TRIED),
    Tried(width=64, backward=True),
    Tried(width=64, backward=True, sloped=True),
    Tried(width=64, backward=True, softcap=CAP),
)


def drawn(tried: Tried, shape: tuple[int, int, int], scores: float = 1.0) -> list[Tensor]:
    """Queries, keys, values and the output's gradient."""
    inputs = [random_tensor(*shape, tried.width) for _ in range(4)]
    inputs[0] *= scores
    return inputs


def run_of(tried: Tried, inputs: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Output and lse, or of a backward pass the gradients of queries, keys and values, by what is
    chosen when it is called."""
    query, key, value, gradient = inputs
    parameters = Parameters.of(tried.parameters(query.shape[1]))
    settings = tried.settings(query.shape[2])
    if not tried.backward:
        return lambda: launch.forward(query, key, value, None, None, parameters, settings)[:2]
    made = launch.forward(query, key, value, None, None, parameters, settings)
    return lambda: launch.backward(
        gradient, query, key, value, *made, None, None, parameters, settings
    )[:3]


def truths(tried: Tried, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """What :func:`run_of` should give, but for lse, in float64."""
    wide = [tensor.double().requires_grad_() for tensor in inputs[:3]]
    parameters = tried.parameters(inputs[0].shape[1])
    truth = reference.attention(
        *wide, normalizer="softmax", causal=True, softcap=tried.softcap or None,
        parameters={name: tensor.double() for name, tensor in parameters.items()},
    )  # fmt: skip
    if not tried.backward:
        return (truth.detach(),)
    return torch.autograd.grad(truth, wide, inputs[3].double())


def relative(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth.double()).norm() / truth.double().norm())


def worst_rows(got: Tensor, truth: Tensor) -> float:
    """The largest relative error of 64 rows of a head; [B, H, T, D] each."""
    blocks = [t.double().reshape(*t.shape[:2], t.shape[2] // 64, -1) for t in (got, truth)]
    off = (blocks[0] - blocks[1]).norm(dim=-1)
    return float((off / blocks[1].norm(dim=-1).clamp(min=1e-30)).max())


def error(tried: Tried) -> str:
    """The largest relative error of what it computes; or what is wrong with it."""
    torch.manual_seed(0)
    largest = 0.0
    for scores in (1.0, 10.0) if tried.softcap else (1.0,):
        inputs = drawn(tried, SMALL, scores)
        with tried.used():
            if not tried.applies(*inputs[:3]):
                return "it is not what computes this"
            got = run_of(tried, inputs)()
        found = max(map(relative, got, truths(tried, inputs)))
        if not found <= (FAR if scores > 1 else LIMIT):
            return f"wrong by {found:.1e}, scores × {scores:g}"
        largest = max(largest, found if scores == 1 else 0.0)
    for shape in SHAPES:
        problem = unsteady(tried, shape)
        if problem:
            return f"{problem}, {shape[1]} tokens"
    return f"{largest:.1e}"


def unsteady(tried: Tried, shape: tuple[int, int, int]) -> str | None:
    """What is wrong where each program has many blocks: another result in another run, or rows that
    are far from those of the kernel in use."""
    inputs = drawn(tried, shape)
    expected = run_of(tried, inputs)()
    with tried.used():
        run = run_of(tried, inputs)
        first = run()
        again = [all(map(torch.equal, run(), first)) for _ in range(RUNS - 1)]
    if not all(again):
        return f"other bits in {again.count(False)} of {len(again)} runs"
    for got, wanted in zip(first, expected, strict=True):
        if wanted.dim() == 4:
            found, limit = worst_rows(got, wanted), WORST
        else:
            found, limit = float((got - wanted).abs().max()), LEVEL
        if not found <= limit:
            return f"rows wrong by {found:.1e}"
    return None


def passed(error: str) -> bool:
    return error[0].isdigit()


def _check(tried: Tried, answer: Connection) -> None:
    try:
        answer.send(error(tried))
    except Exception as problem:  # one that does not compile is a finding
        answer.send(f"{type(problem).__name__}: {problem}".splitlines()[0][:80])


def checked(many: Collection[Tried], seconds: float) -> dict[Tried, str]:
    """:func:`error` of each, all at once."""
    context = get_context("spawn")
    started = []
    for tried in many:
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_check, args=(tried, there))
        process.start()
        there.close()
        started.append((tried, process, here))
    end = time.monotonic() + min(PATIENCE_S, seconds)
    found = {}
    for tried, process, here in started:
        try:
            came = here.poll(max(0.0, end - time.monotonic()))
            found[tried] = here.recv() if came else "it took too long, or hangs"
        except EOFError:
            found[tried] = "its process died"
        process.join(5.0 if came else 0.0)
        if process.is_alive():
            process.kill()
            process.join()
    return found


def tried_rows(many: Collection[Tried], seconds: float) -> Iterator[dict[str, Any]]:
    """TFLOP/s of each and of the kernel in use, a backward pass as a whole; None where it is
    refused."""
    found = checked(many, seconds)
    for shape in SHAPES:
        for tried, problem in found.items():
            rates = timed(tried, shape) if passed(problem) else NONE
            yield {"shape": (*shape, tried.width), "kernel": str(tried), "error": problem, **rates}


def timed(tried: Tried, shape: tuple[int, int, int]) -> dict[str, float]:
    """``beside``: × softmax as it is."""
    batch, length, heads = shape
    work = (5 if tried.backward else 2) * batch * heads * length * length * tried.width
    inputs = drawn(tried, shape)
    plain = Tried(width=tried.width, backward=tried.backward)
    replays = {
        "softmax": captured(lambda: run_of(plain, inputs)),
        "in use": captured(lambda: run_of(tried, inputs)),
    }
    with tried.used():
        replays["tried"] = captured(lambda: run_of(tried, inputs))
    ms = in_turns(replays)
    rates = {name: work / ms[name] / 1e9 for name in ("in use", "tried")}
    return rates | {"beside": ms["softmax"] / ms["tried"]}


def in_turns(replays: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Milliseconds of each, the median of turns in which all are replayed."""
    taken: dict[str, list[float]] = {name: [] for name in replays}
    for turn in range(TURNS):
        events = {}
        for name in list(replays) if turn % 2 else list(replays)[::-1]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(REPLAYS):
                replays[name]()
            end.record()
            events[name] = begin, end
        torch.cuda.synchronize()
        for name, (begin, end) in events.items():
            taken[name].append(begin.elapsed_time(end) / REPLAYS)
    return {name: statistics.median(times) for name, times in taken.items()}
