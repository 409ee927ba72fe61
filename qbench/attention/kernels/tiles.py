"""Tile sizes, by what was measured on an H200; fixed, so that nothing is tuned while it runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qbench.attention.kernels import FAMILIES, modes


@dataclass(frozen=True, kw_only=True, slots=True)
class Lasting:
    """How :mod:`qbench.attention.kernels.lasting` computes soft-capped softmax for heads of
    ``width``: by ``groups`` of four warps, each of 64 queries, with so many ``registers`` a thread,
    and so many ``slots`` of 128 keys. ``ones``: sums of rows are products of the weights, as bf16,
    with ones. ``shortest``: the length in tokens from which it is used."""

    width: int
    groups: int
    slots: int
    registers: int
    ones: bool = False
    shortest: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """``block_q`` queries by ``block_k`` keys, threads in ``warps`` of 32, loads in ``stages`` of a
    pipeline.
    ``tma``: streamed tiles come through the tensor memory accelerator, where layouts let them.
    ``skip``: values are neither read nor multiplied where no score of a tile is positive. In
    decode it saves single value rows and pays (92 % of the copy's bandwidth became 117 %, 140 %
    where 99 % of the scores are negative). In prefill the branch breaks the pipeline and cost 20 %
    on random scores, more than the 2 to 4 % of empty tiles could give back: off by default.
    ``registers``: at most so many a thread, so that more programs share a multiprocessor. With
    fewer than it would take, the assembler waits for each matrix product before the next.
    ``free``: no running maximum, see :mod:`qbench.attention.kernels.forward`; for bf16 only.
    ``mend``: of ``free``, see :mod:`qbench.attention.kernels.mending`; not with windows or masks,
    where a kernel would take so many registers that fewer programs share a multiprocessor.
    ``gluon``: by :mod:`qbench.attention.kernels.gluon_forward`, for the cases that it fits.
    ``lasting``: by :mod:`qbench.attention.kernels.lasting`, for the cases that it fits."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    tma: bool = False
    skip: bool = False
    registers: int | None = None
    free: bool = False
    mend: bool = False
    gluon: bool = False
    lasting: Lasting | None = None

    @property
    def launch(self) -> dict[str, int | None]:
        """Arguments of a launch that every kernel takes."""
        return {
            "BLOCK_K": self.block_k,
            "STAGES": self.stages,
            "num_warps": self.warps,
            "maxnreg": self.registers,
        }


# By head dimension, of soft-capped softmax. On an H200 as fast × the kernels that would be used
# instead: heads of 128 1.23 at 4096 tokens and 1.12 at 1024; of 64 1.12 at 4096, but 0.97 at 1024.
LASTING = {
    64: Lasting(width=64, groups=3, slots=4, registers=160, ones=True, shortest=4096),
    128: Lasting(width=128, groups=2, slots=3, registers=240),
}

# Modes that take so many registers or instructions that smaller tiles, of which more programs share
# a multiprocessor, are faster.
COSTLY = modes.CAPPED.value | modes.SLOPED.value | modes.BIASED.value


# By family, head dimension and how scores are shaped, the bits of modes.RESHAPED: where rows of
# tiny scores are mended, in bf16. With slopes, whose blocks often have one, 1.24 × as fast at heads
# of 64 and 1.13 × at 128 (H200, 4096 tokens, 16 heads); without it would cost 1 %.
MENDED = {("softpick", width, modes.SLOPED.value) for width in (64, 128)}


def forward_tile(width: int, dtype: torch.dtype, family: str, asked: int = 0) -> Tile:
    """``width``: head dimension rounded up to a power of two; ``asked``: bits of modes.py."""
    if dtype == torch.float32:
        return _exact(width)
    free = dtype == torch.bfloat16
    if width <= 128:
        plain = FAMILIES[family].few_registers and asked & COSTLY == 0
        rows = 128 if plain and width <= 64 else 64
        gluon = width == 128 and asked & modes.CAPPED.value == 0
        lasting = LASTING.get(width) if free and asked & modes.CAPPED.value else None
        return Tile(
            block_q=rows, block_k=64, warps=4, stages=3, tma=True, free=free,
            mend=free and (family, width, asked & modes.RESHAPED.value) in MENDED, gluon=gluon,
            lasting=lasting,
        )  # fmt: skip
    return Tile(block_q=128, block_k=64, warps=8, stages=2, tma=True, free=free)


# By whether heads are at most 64 wide, and whether the pass is the backward one: how sigmoid's
# reciprocals are saved, see sigmoid.py, and whether tanh of soft caps is a polynomial, softcap.py.
RECIPROCALS = {
    (True, False): modes.RARE.value,
    (True, True): modes.RARE.value,
    (False, False): modes.RARE.value,
    (False, True): modes.RARE.value,
}
# Of heads at most 64 wide the forward pass alone: 362 instead of 309 TFLOP/s (softmax, H200). In
# their backward pass it gains 0.7 % and has the larger error (2.9e-3, not 2.6e-3); of heads of 128
# it gains nothing forward (442 both) and loses 9 % backward.
POLYNOMIALS: set[tuple[bool, bool]] = {(True, False)}
# Soft caps that suit it: from the first on nearly all scores of standard deviation 1 to 3 are
# within a third of them; beyond the second the coefficients' powers would leave float32.
WIDE_CAPS = (15.0, 1e4)

# By head dimension: where softmax's forward pass takes slopes from places that rows share: 1.02 ×
# as fast at heads of 64, 1.04 × at 128 (H200).
SHARED = {64, 128}


def arithmetic(width: int, family: str, softcap: float, asked: int, *, backward: bool) -> int:
    """Bits of modes.py that change how numbers are computed, not which; ``softcap``: 0 for none;
    ``asked``: the bits that say what is computed."""
    place = (width <= 64, backward)
    sumless = FAMILIES[family].modes & modes.SUMLESS.value
    bits = RECIPROCALS[place] if sumless else 0
    if softcap and asked & (modes.SCALED.value | modes.SLOPED.value) == 0:
        near_zero = backward and FAMILIES[family].near_zero  # its series wants the scores
        if place in POLYNOMIALS and WIDE_CAPS[0] <= softcap <= WIDE_CAPS[1] and not near_zero:
            bits |= modes.NEAR.value
    reshaped = asked & modes.RESHAPED.value
    if not backward and family == "softmax" and reshaped == modes.SLOPED.value and width in SHARED:
        bits |= modes.SHARED.value
    alone = reshaped in (modes.SCALED.value, modes.SLOPED.value)
    if backward and family == "softpick" and alone:  # the Gluon kernels compare with its formula
        bits |= modes.COMPARED.value
    return bits


def key_tile(width: int, dtype: torch.dtype) -> Tile:
    """For the keys' and values' gradients."""
    if dtype == torch.float32:
        return _exact(width)
    if width <= 64:
        return Tile(block_q=32, block_k=128, warps=4, stages=3)
    if width == 128:
        return Tile(block_q=64, block_k=64, warps=4, stages=2, tma=True)
    return Tile(block_q=32, block_k=64, warps=8, stages=1, tma=True)


def query_tile(width: int, dtype: torch.dtype) -> Tile:
    """For the queries' gradients."""
    if dtype == torch.float32:
        return _exact(width)
    if width <= 64:
        return Tile(block_q=64, block_k=64, warps=4, stages=3)
    if width == 128:
        return Tile(block_q=128, block_k=64, warps=8, stages=3, tma=True)
    return Tile(block_q=64, block_k=32, warps=8, stages=1, tma=True)


def decode_tile(width: int, dtype: torch.dtype) -> Tile:
    """``block_q`` is set by the group's queries."""
    if dtype == torch.float32 or width > 128:
        return Tile(block_q=16, block_k=32, warps=4, stages=2, skip=True)
    if width == 128:
        return Tile(block_q=16, block_k=32, warps=2, stages=3, skip=True)
    return Tile(block_q=16, block_k=32, warps=1, stages=3, skip=True)


def _exact(width: int) -> Tile:
    """float32 without tensor cores: small tiles, as registers bound it."""
    return Tile(block_q=32, block_k=32 if width <= 128 else 16, warps=4, stages=1)
