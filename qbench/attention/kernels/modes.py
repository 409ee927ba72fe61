"""What a kernel does beside its family's formula, as bits of a compile-time number: what is not
asked for costs no instruction. Read by the host and by the kernels."""

from __future__ import annotations

import triton.language as tl

SCALED = tl.constexpr(1)  # scores times s · log n
CAPPED = tl.constexpr(2)  # c · tanh(score / c)
SLOPED = tl.constexpr(4)  # minus slope · distance
BIASED = tl.constexpr(8)  # plus a bias a row: sigmoid's
SUMLESS = tl.constexpr(16)  # weights need no sum of their row: sigmoid's
SINK_ONE = tl.constexpr(32)  # 1 in the denominator
SINK_LEARNED = tl.constexpr(64)  # e^sink in the denominator
LEARNING = tl.constexpr(128)  # the backward pass gives the gradient of bias, sinks or s too
NEXT = tl.constexpr(256)  # SCALED by s · log (n + 1)
LEARNING_SLOPES = tl.constexpr(512)  # the backward pass gives the gradient of the slopes too
NEAR = tl.constexpr(1024)  # of CAPPED: so wide a cap that nearly all scores are well inside it
RARE = tl.constexpr(2048)  # of sigmoid's: reciprocals where they are needed, see sigmoid.py
COMPARED = tl.constexpr(4096)  # of softpick's scores the backward pass asks which are positive
SHARED = tl.constexpr(8192)  # of SLOPED: rows of a warp take a key's distance from one place

RESHAPED = tl.constexpr(7)  # SCALED, CAPPED or SLOPED: the score is not the product times a number
SHAPED = tl.constexpr(15)  # or BIASED
SUNK = tl.constexpr(96)
