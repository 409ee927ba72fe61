"""A quantized KV cache that really is one, in NumPy: tokens are written one by one, whole numbers
and scales are stored, and each query reads what is stored at its step. Shares no code with qbench.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class WrittenCache:
    """Of one key head. ``bits`` 0 is fp8. ``channels`` of a token share a scale, or all of them."""

    bits: int
    channels: int | None = None
    sink_tokens: int = 0
    keys: list = field(default_factory=list)  # arrays, or a token's stored groups
    values: list = field(default_factory=list)

    def write(self, key: np.ndarray, value: np.ndarray) -> None:
        """Store one token's, quantized unless it is one of the first."""
        spared = len(self.keys) < self.sink_tokens
        for stored, x in ((self.keys, key), (self.values, value)):
            x = x.astype(np.float32)
            stored.append(x if spared else self.store_token(x))

    def store_token(self, x):
        size = self.channels or len(x)
        return [self.store(x[i : i + size]) for i in range(0, len(x), size)]

    def store(self, x):
        """Codes of one scale, and the scale."""
        one = np.float32(1)
        if self.bits == 0:
            scale = np.float16(np.abs(x).max() / np.float32(448)).astype(np.float32)
            return np.array([nearest_e4m3(v / (scale or one)) for v in x]), scale
        most, span = 2 ** (self.bits - 1), np.float32((2**self.bits - 1) / 2)
        scale = np.float16(np.abs(x).max() / span).astype(np.float32)
        return np.clip(np.rint(x / (scale or one)), -most, most - 1).astype(np.int8), scale

    @staticmethod
    def load(codes, scale):
        return codes.astype(np.float32) * scale

    def read(self):
        """Keys and values [T, D] as they are in the cache now."""
        return tuple(np.stack([self._token(x) for x in each]) for each in (self.keys, self.values))

    def _token(self, entry):
        if isinstance(entry, np.ndarray):
            return entry
        return np.concatenate([self.load(*part) for part in entry])


def nearest_e4m3(x):
    """The nearest of all e4m3 numbers, the even one of two."""
    numbers = [m / 8 * 2.0**-6 for m in range(8)]
    numbers += [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)][:-1]
    size = min(abs(float(x)), 448.0)
    best = min(range(len(numbers)), key=lambda i: (abs(numbers[i] - size), i % 2))
    return np.float32(np.copysign(numbers[best], x))


def attention_weights(scores: np.ndarray, normalizer: str) -> np.ndarray:
    """Of one query's float64 scores."""
    if normalizer == "softmax":
        e = np.exp(scores - scores.max())
        return e / e.sum()
    d = np.expm1(scores)
    return np.maximum(d, 0) / (np.abs(d).sum() + 1e-6)


def decode(query, key, value, normalizer, window=None, **settings):
    """Attention [Hq, T, D] token by token; ``query`` [Hq, T, D], ``key``, ``value`` [Hkv, T, D]."""
    heads, tokens, width = query.shape
    share = heads // key.shape[0]
    output = np.zeros((heads, tokens, value.shape[2]))
    for h in range(key.shape[0]):
        cache = WrittenCache(**settings)
        for t in range(tokens):
            cache.write(key[h, t], value[h, t])
            keys, values = (x.astype(np.float64) for x in cache.read())
            first = max(0, t + 1 - window) if window else 0
            for q in range(h * share, (h + 1) * share):
                scores = keys[first:] @ query[q, t].astype(np.float64) / width**0.5
                output[q, t] = attention_weights(scores, normalizer) @ values[first:]
    return output
