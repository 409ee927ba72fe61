"""What only the loaded weights can show: that they are finite, tied as stated, and causal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qbench.checkpoints.find import Header
from qbench.errors import CheckpointError, QbenchError, UnavailableError, first_line
from qbench.streaming import bring

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE = 16  # tokens; the last half differs between the two rows
# Rounding may differ between two rows of a batch; what a later token does to a trained encoder is
# of the size of its logits.
NOISE = {torch.float32: 1e-4, torch.float64: 1e-4}
NOISE_OF_HALF = 0.03
# Our attention and a class's own round differently in every layer: on a CPU in float32 they agree;
# elsewhere a difference of another function has to stand out.
OURS_OF_HALF, OURS_ON_GPU = 0.1, 0.01


@torch.inference_mode()
def require_finite(model: PreTrainedModel) -> None:
    """Raise CheckpointError naming every weight with a NaN or infinite value.

    One sum a tensor, in its own dtype, which is fastest: it is not finite where a value is not,
    so only such tensors are counted.
    """
    buffers = dict(model.named_buffers())  # of which masks may hold -inf
    weights = {
        n: t
        for n, t in (*model.named_parameters(), *buffers.items())
        if t.is_floating_point() and t.numel()
    }
    if not weights:
        return
    sums = []
    for name, tensor in weights.items():
        bring(model, name)
        sums.append(tensor.sum().float().to(model.device))
    finite = torch.stack(sums).isfinite().tolist()
    suspects = [n for n, ok in zip(weights, finite, strict=True) if not ok]
    found = []
    for name in suspects:
        bring(model, name)
        bad = weights[name].isnan() if name in buffers else ~weights[name].isfinite()
        if count := int(bad.sum()):
            found.append(f"{name} ({count} of {bad.numel()} values)")
    if found:
        more = f" and {len(found) - 3} more tensors" if len(found) > 3 else ""
        raise CheckpointError(
            f"not finite, as {str(model.dtype).removeprefix('torch.')}: "
            f"{', '.join(found[:3])}{more}; the weights are damaged, or too large for this dtype"
        )


def require_tied(name: str, head: torch.Tensor, embeddings: torch.Tensor) -> None:
    """Raise CheckpointError where a stored ``head`` is not the ``embeddings`` it is tied to."""
    if head.shape != embeddings.shape or not torch.equal(head, embeddings):
        raise CheckpointError(
            f"config.json says tie_word_embeddings: true, but {name} differs from the embeddings; "
            "write tie_word_embeddings: false to use it, or remove it"
        )


def read_tensor(path: Path, name: str) -> torch.Tensor:
    """One tensor of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def require_own_head(model: PreTrainedModel, folder: Path, headers: dict[str, Header]) -> None:
    """Raise CheckpointError where a tied model's files hold another output matrix.

    transformers drops it or unties it with a warning only, by version.
    """
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embeddings is None or not model.config.tie_word_embeddings:
        return
    modules = {id(module): name for name, module in model.named_modules()}
    name = f"{modules.get(id(head))}.weight"
    if name not in headers:
        return
    stored = read_tensor(folder / headers[name].file, name)
    require_tied(name, stored.to(embeddings.weight.dtype), embeddings.weight)


@torch.inference_mode()
def own_logits(model: PreTrainedModel) -> torch.Tensor:
    """Logits [2, PROBE, vocabulary] of two rows of token ids that share their first half."""
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(2 * PROBE).reshape(2, PROBE) * 7 % size
    ids[1, : PROBE // 2] = ids[0, : PROBE // 2]
    return model(ids.to(model.device), use_cache=False).logits.float()


def require_causal(model: PreTrainedModel, logits: torch.Tensor) -> None:
    """Raise CheckpointError where later tokens change the logits of earlier ones.

    ``logits`` are those of :func:`own_logits`, through the model's own attention, before ours,
    which is causal by its mask, is set.
    """
    first = logits[:, : PROBE // 2]
    change = float((first[0] - first[1]).abs().max())
    if change > NOISE.get(model.dtype, NOISE_OF_HALF) * float(first.abs().max()):
        raise CheckpointError(
            f"later tokens change the logits of earlier ones (by {change:.3g}): it is not a "
            "causal language model, so it gives no probability of a text"
        )


def require_ours(model: PreTrainedModel, logits: torch.Tensor) -> None:
    """Raise UnavailableError where our attention, set by now, is not what the model runs on, or
    does not compute what its own does, which gave ``logits``."""
    name = type(model).__name__
    remedy = "set attention: native to run it on its own"
    try:
        with counted(model.config._attn_implementation) as calls:
            ours = own_logits(model)
    except QbenchError:
        raise
    except Exception as error:  # whatever a class does with a mask or an output that is not its own
        raise UnavailableError(
            f"{name} fails on qbench's attention ({first_line(error)}); {remedy}"
        ) from error
    if not calls:
        raise UnavailableError(f"{name} does not call the attention that it is given; {remedy}")
    # Of the middle token: rounding that sends one of them to another expert moves it far.
    off = float(((ours - logits).norm(dim=-1) / logits.norm(dim=-1)).median())
    allowed = NOISE.get(model.dtype, OURS_OF_HALF)
    if model.device.type != "cpu":
        allowed = max(allowed, OURS_ON_GPU)
    if off > allowed:
        raise UnavailableError(
            f"qbench's attention changes the logits of {name} by {off:.2g} of their size: its own "
            f"attention has something that qbench's lacks; {remedy}"
        )


@contextmanager
def counted(name: str) -> Iterator[list[None]]:
    """Counts the calls of the attention function that transformers knows as ``name``."""
    function, calls = ALL_ATTENTION_FUNCTIONS[name], []

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return function(*args, **kwargs)

    AttentionInterface.register(name, count)
    try:
        yield calls
    finally:
        AttentionInterface.register(name, function)
