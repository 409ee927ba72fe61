"""Pass inputs and outputs of each attention call of a model to an observer, as scoring runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qbench.attention.normalizers import NORMALIZERS
from qbench.attention.quantized_kv import KV_CACHE, KVTrace
from qbench.attention.transformers import Mask, parameters_of
from qbench.errors import UnavailableError


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One call of a layer's attention: query [B, Hq, T, D], key [B, Hkv, T, D] and settings.
    ``mask``: bool [B or 1, 1, T, T], True = attend, used as it is; None: causal. ``scale``: factor
    of the scores, None: 1/√D. ``softcap`` c: scores x become c · tanh(x / c), see
    ``reference.attention``. ``output``: [B, T, Hq, Dv], before the output projection. ``trace``:
    what a quantized KV cache made of keys and values; None without one."""

    query: Tensor
    key: Tensor
    normalizer: str
    parameters: Mapping[str, Tensor] | None = None
    scale: float | None = None
    softcap: float | None = None
    mask: Tensor | None = None
    output: Tensor | None = None
    trace: KVTrace | None = None


@contextmanager
def attention_observed(
    model: PreTrainedModel, observe: Callable[[nn.Module, Call], None]
) -> Iterator[None]:
    """Call ``observe(attention module, call)`` after each call of qbench's attention in ``model``,
    without padding and cache. Raises UnavailableError for a model whose attention is not qbench's,
    since its weights could differ from those that are computed again by their definition."""
    name = model.config._attn_implementation
    chosen = getattr(model.config, "qbench_normalizer", None)
    if chosen is None or not str(name).startswith(f"qbench-{chosen}-"):
        raise UnavailableError(
            f"its attention is {name}, whose weights cannot be measured; analyze a model that "
            "attends with one of qbench's normalizers"
        )
    function, normalizer = ALL_ATTENTION_FUNCTIONS[name], NORMALIZERS[chosen]
    caches = {getattr(module, KV_CACHE, None) for module in model.modules()} - {None}
    traces: dict[nn.Module, KVTrace] = {}

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        result = function(module, query, key, value, attention_mask, **options)
        trace = traces.pop(module, None)
        call = Call(
            query=query,
            key=key if trace is None else trace.quantized_key,
            normalizer=chosen,
            parameters=parameters_of(normalizer, module, options),
            scale=options.get("scaling"),
            softcap=options.get("softcap"),
            mask=attention_mask.dense() if isinstance(attention_mask, Mask) else attention_mask,
            output=result[0],
            trace=trace,
        )
        observe(module, call)
        return result

    AttentionInterface.register(name, forward)
    for cache in caches:
        cache.watch = traces.__setitem__
    try:
        yield
    finally:
        AttentionInterface.register(name, function)
        for cache in caches:
            cache.watch = None
