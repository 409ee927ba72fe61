"""Attention in float64, written out from the papers, and the cases in which kernels are held to it.

Independent of ``qbench.attention.reference``: whole matrices, plain exponentials, gradients by
autograd. So scores must be of moderate size here.
"""

from dataclasses import dataclass, fields

import torch

NORMALIZERS = (
    "softmax", "softpick", "rectified", "sigmoid", "softmax1", "softmax-sink", "scalable-softmax",
    "scalable-softpick", "scalable-softmax-next", "scalable-softpick-next",
)  # fmt: skip
EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class Case:
    """``shape``: batch, query heads, key heads, queries, keys, head dimension. ``mask``: share of
    keys that each query sees. ``packed``: lengths of sequences in one batch row. ``scores``: factor
    on the queries. ``bias``: sigmoid's, else −log n."""

    normalizer: str
    shape: tuple[int, int, int, int, int, int] = (2, 4, 2, 21, 37, 16)
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    slopes: bool = False
    mask: float | None = None
    packed: tuple[int, ...] | None = None
    scores: float = 1.0
    bias: bool = True
    seed: int = 0

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = [f"{n} {values[n]}" for n in values if values[n] != getattr(Case, n, None)]
        return ", ".join(changed)


def parameters(case: Case) -> dict[str, torch.Tensor]:
    """Float32 [heads], of some size, each head another."""
    heads = case.shape[1]
    steps = torch.arange(heads) / heads
    given = {}
    if case.slopes:
        given["slopes"] = 0.5 ** torch.arange(1.0, heads + 1)
    if case.normalizer == "sigmoid" and case.bias:
        given["bias"] = steps - 2.5
    if case.normalizer in ("softmax-sink", "sunk-scaled"):
        given["sinks"] = 1.5 * steps - 0.5
    if case.normalizer.startswith("scalable") or case.normalizer == "sunk-scaled":
        given["s"] = 0.4 + 0.3 * steps
    return given


def inputs(case: Case, dtype=torch.float32, device="cpu") -> list[torch.Tensor]:
    """Query, key, value and the output's gradient [B, H, T, D], in memory as [B, T, H, D]."""
    batch, heads, kv_heads, queries, keys, width = case.shape
    generator = torch.Generator().manual_seed(case.seed)
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries))
    made = [torch.randn(batch, t, h, width, generator=generator) for h, t in sizes]
    made[0] = made[0] * case.scores
    return [tensor.to(device, dtype).transpose(1, 2) for tensor in made]


def mask_of(case: Case) -> torch.Tensor | None:
    """[B, 1, Tq, Tk], in which one query sees nothing."""
    if case.mask is None:
        return None
    batch, _, _, queries, keys, _ = case.shape
    generator = torch.Generator().manual_seed(case.seed + 1)
    mask = torch.rand(batch, 1, queries, keys, generator=generator) < case.mask
    mask[0, 0, 3] = False
    return mask


def allowed(case: Case) -> torch.Tensor:
    """Who sees whom [B or 1, 1, Tq, Tk]."""
    _, _, _, queries, keys, _ = case.shape
    own = torch.arange(keys - queries, keys)[:, None]
    other = torch.arange(keys)
    band = (other <= own) if case.causal else torch.ones(queries, keys, dtype=torch.bool)
    if case.window:
        band = band & (other > own - case.window)
    if case.packed:
        owner = torch.repeat_interleave(torch.tensor(case.packed))
        band = band & (owner[:, None] == owner)
    mask = mask_of(case)
    return band[None, None] if mask is None else band & mask


def definition(
    case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    given: dict[str, torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """The output in the inputs' dtype."""
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    x = query @ key.transpose(2, 3) * query.shape[3] ** -0.5
    device, (queries, keys) = x.device, x.shape[2:]
    seen = allowed(case).to(device)
    n = seen.sum(-1, keepdim=True).to(x.dtype)
    if case.softcap:
        x = case.softcap * torch.tanh(x / case.softcap)
    if case.slopes:
        own = torch.arange(keys - queries, keys, device=device)[:, None]
        distance = (own - torch.arange(keys, device=device)).to(x.dtype)
        x = x - given["slopes"][:, None, None] * distance
    if "s" in given:
        one_more = 1 if case.normalizer.endswith("-next") else 0
        x = x * given["s"][:, None, None] * (n + one_more).clamp(min=1).log()
    if "softpick" in case.normalizer:
        term = torch.where(seen, x.exp() - 1, 0.0)
        largest = torch.where(seen, x, 0.0).amax(-1, keepdim=True)
        largest = largest.where(largest > 0, 0.0)
        weights = term.relu() / (term.abs().sum(-1, keepdim=True) + EPSILON * largest.exp())
    elif case.normalizer == "sigmoid":
        bias = given["bias"][:, None, None] if "bias" in given else -n.clamp(min=1).log()
        weights = torch.where(seen, 1 / (1 + (-x - bias).exp()), 0.0)
    else:
        if case.normalizer == "rectified":
            seen = seen & (x >= 0)
        term = torch.where(seen, x.exp(), 0.0)
        total = term.sum(-1, keepdim=True)
        if case.normalizer == "softmax1":
            total = total + 1
        if "sinks" in given:
            total = total + given["sinks"][:, None, None].exp()
        weights = term / torch.where(total > 0, total, 1.0)
    return weights @ value


def errors(case: Case, attend, dtype=torch.float32, device="cpu") -> dict[str, float]:
    """‖got − truth‖ / ‖truth‖ of the output and of the gradients of inputs and parameters, as
    ``attend(case, query, key, value, parameters)`` gives them; infinite where any is not finite."""
    *tensors, gradient = inputs(case, dtype, device)
    results = []
    for function, wide in ((attend, False), (definition, True)):
        leaves = [t.double() if wide else t.clone() for t in tensors]
        given = {
            name: (t.double() if wide else t).to(device) for name, t in parameters(case).items()
        }
        sources = [tensor.requires_grad_() for tensor in (*leaves, *given.values())]
        output = function(case, *leaves, given)
        results.append((output, *torch.autograd.grad(output, sources, gradient.to(output.dtype))))
    names = ("output", "dq", "dk", "dv", *(f"d{name}" for name in parameters(case)))
    return {
        name: float((got.double() - truth).detach().norm() / truth.detach().norm().clamp(min=1e-30))
        if got.isfinite().all()
        else float("inf")
        for name, got, truth in zip(names, *results, strict=True)
    }


def attended(by, case, query, key, value, given):
    """``attend`` of :func:`errors`, by the module ``by``."""
    from qbench.attention.kernels.varlen import packed_bounds

    settings = {"normalizer": case.normalizer, "parameters": given, "softcap": case.softcap}
    settings |= {"window": case.window, "causal": case.causal}
    if case.packed:
        edges = torch.tensor([0, *case.packed], dtype=torch.int32).cumsum(0).to(query.device)
        settings["seq_bounds"] = packed_bounds(edges, edges)
    mask = mask_of(case)
    mask = None if mask is None else mask.to(query.device)
    return by.attention(query, key, value, mask=mask, **settings)


def by_kernels(case, *tensors):
    from qbench.attention import kernels

    return attended(kernels, case, *tensors)


def weights(query, key, **settings):
    """[B, Hq, Tq, Tk] of the reference, which takes unit vectors for values."""
    from qbench.attention import reference

    keys = key.shape[2]
    value = torch.eye(keys).expand(*key.shape[:2], keys, keys)
    return reference.attention(query, key, value, **settings)


SQUARE, DECODE = (1, 2, 1, 33, 33, 20), (1, 4, 2, 1, 70, 16)
ALL = {"softcap": 2.0, "slopes": True, "window": 9}
PACKED = {"shape": (1, 2, 1, 24, 24, 16), "packed": (5, 19)}
SMALL = (1, 2, 1, 33, 37, 16)  # more rows than are decoded together
OF_GROUPS = ("softmax", "softpick")  # two heads to a key head; others one
# One of each normalizer and kernel; then what else has been wrong.
EACH = (
    *(Case(normalizer=name, shape=SMALL if name in OF_GROUPS else (1, 1, *SMALL[2:]), **ALL)
      for name in NORMALIZERS),
    Case(normalizer="softpick", shape=(1, 2, 1, 34, 40, 16)),
    Case(normalizer="softpick", shape=DECODE, slopes=True),
    Case(normalizer="softmax", softcap=2.0, **PACKED),
)  # fmt: skip
QUICK = (
    *EACH,
    *(Case(normalizer=name) for name in ("softmax", "softpick", "sigmoid")),
    Case(normalizer="softmax-sink", shape=DECODE, slopes=True),
    Case(normalizer="sigmoid", shape=DECODE, bias=False),
    Case(normalizer="softmax", causal=False, shape=(1, 1, 1, 20, 35, 16)),
    Case(normalizer="scalable-softpick", mask=0.5, softcap=2.0, shape=(2, 2, 1, 20, 20, 16)),
    Case(normalizer="sigmoid", mask=0.5, bias=False, shape=(2, 2, 1, 20, 20, 16)),
    Case(normalizer="scalable-softmax-next", **PACKED),
    Case(normalizer="softpick", slopes=True, **PACKED),
    Case(normalizer="softpick", scores=1e-6, shape=SQUARE),
    Case(normalizer="softpick", scores=20.0, shape=SQUARE),
    Case(normalizer="softmax", shape=(1, 1, 1, 1, 1, 16)),
)
WHOLE = tuple(
    Case(normalizer=name, seed=seed, **settings)
    for seed, settings in enumerate((
        {}, {"shape": SQUARE}, {"shape": DECODE}, {"shape": (1, 4, 1, 3, 65, 16)},
        {"causal": False}, {"window": 7}, {"softcap": 2.0}, {"slopes": True}, ALL,
        {"shape": DECODE, **ALL}, {"slopes": True, "window": 11}, {"softcap": 1.0, "slopes": True},
        {"mask": 0.5}, {"mask": 0.4, "slopes": True, "softcap": 2.0}, {"mask": 0.6, "window": 9},
        PACKED, {**PACKED, "slopes": True}, {**PACKED, "softcap": 2.0, "window": 6},
        {"shape": (1, 2, 2, 40, 40, 24)}, {"scores": 5.0}, {"scores": 0.05},
        {"shape": (1, 8, 1, 17, 50, 16), "slopes": True}, {"shape": (3, 2, 2, 1, 1, 16)},
        {"causal": False, "slopes": True}, {"shape": (1, 2, 1, 70, 70, 16), "window": 1},
        {"shape": (1, 3, 1, 33, 64, 40), "softcap": 3.0}, {"shape": (2, 2, 1, 2, 33, 16), **ALL},
        {"scores": 10.0, "softcap": 2.0}, {"bias": False}, {"bias": False, **ALL},
    ))
    for name in NORMALIZERS
    if name == "sigmoid" or "bias" not in settings
)  # fmt: skip
