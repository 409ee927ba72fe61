"""Build a stock transformers model for training: initial weights, loss, optimizer, FLOP."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch._inductor import config
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, LlamaForCausalLM

from qbench.attention.normalizers import NORMALIZERS
from qbench.attention.transformers import positions_counted, set_attention
from qbench.checkpoints.find import class_names
from qbench.checkpoints.gated import model_class
from qbench.training.training_recipe import (
    Compute,
    Optimizer,
    OwnParameter,
    Schedule,
    Shape,
    split_gate,
)


def model_settings(
    shape: Shape, normalizer: str, *, bos: int | None = 1, eos: int | None = 2,
    pad: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return ``model_type`` and settings of the class of transformers for a model of ``shape``:
    Llama's; with a gate those of ``gated.py``; without a rotary embedding SmolLM 3's.
    ``normalizer`` is named with its gate (``softmax+head-gate``)."""
    kind: dict[str, Any] = {"model_type": "llama"}
    if gate := split_gate(normalizer)[1]:
        kind = {"model_type": "gated-llama", "gate": gate}
    elif shape.rope_theta is None:
        kind = {
            "model_type": "smollm3",
            "layer_types": ["full_attention"] * shape.layers,
            "no_rope_layers": [0] * shape.layers,
        }
    return {
        **kind,
        "attention_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "head_dim": shape.hidden // shape.heads,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": shape.init,
        "intermediate_size": shape.intermediate or 256 * math.ceil(int(shape.hidden * 8 / 3) / 256),
        "max_position_embeddings": shape.positions or shape.context,
        "mlp_bias": False,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads or shape.heads,
        "pad_token_id": pad,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta or 10_000.0},
        "tie_word_embeddings": shape.tied,
        "vocab_size": shape.vocabulary,
    }


def flops_per_token(model: LlamaForCausalLM, context: int) -> float:
    """Return the FLOP per token of a forward and a backward pass: 6 per parameter in matrix
    products (all matrices but the embeddings, which are looked up; the output matrix counts, tied
    or not), and 6 · layers · hidden · context for attention's two products, causal, without
    recomputation and norms (Narayanan et al. 2021, arXiv 2104.04473, equation 3, halved for
    causality)."""
    config = model.config
    products = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 2)
    if not config.tie_word_embeddings:  # of two, one is looked up
        products -= model.get_input_embeddings().weight.numel()
    return 6.0 * products + 6.0 * config.num_hidden_layers * config.hidden_size * context


# FLOP/s of a large bf16 matrix product, as measured, which the data sheet's figure is not.
PEAK = {"H200": 790e12, "H100": 757e12}


def utilization(model: LlamaForCausalLM, context: int, speed: float, hardware: str) -> float | None:
    """Return the share of a GPU's peak FLOP/s at ``speed`` tokens per second and GPU in sequences
    of ``context`` tokens; None if the name ``hardware`` holds no key of PEAK."""
    peak = next((rate for name, rate in PEAK.items() if name in hardware), None)
    return None if peak is None else speed * flops_per_token(model, context) / peak


# Ours (Triton and Gluon), and those that torch's scaled_dot_product_attention may choose. What the
# compiler makes is named triton_… after all that is fused in it, and is no kernel of attention.
ATTENTION = re.compile(
    r"^(?!triton_).*(attn_fwd|attn_bwd|hopper_bwd|attn_decode|flash|fmha|sdpa|attention)"
)


def attention_kernels(step: Callable[[], None], device: torch.device) -> list[str]:
    """Call ``step`` once and return the names of the attention kernels that it launches, sorted;
    ``["none"]`` if it launches none, as on a CPU or with the reference."""
    if device.type != "cuda":
        step()
        return ["none"]
    # Nothing is accumulated in one cycle; without it torch 2.11 warns of events that it clears.
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        step()
        torch.cuda.synchronize()
    names = {event.key for event in seen.key_averages() if event.self_device_time_total > 0}
    return sorted(name[:120] for name in names if ATTENTION.search(name)) or ["none"]


NO_LEAF = r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed"


def initial_model(
    shape: Shape,
    *,
    normalizer: str,
    seed: int,
    device: str | torch.device,
    attention: str = "auto",
    **tokens: int | None,
) -> tuple[LlamaForCausalLM, str]:
    """Return a float32 model with its initial weights on ``device``, and its attention, such as
    ``softpick/triton``. Seeds torch's global generator. ``normalizer`` may have a gate
    (``softmax+head-gate``); ``attention`` names its implementation. The weights are drawn on the
    CPU and depend only on ``shape`` and ``seed``: they are the same for every attention function,
    whose own parameters come after, and so do gates. Parameters that the attention function can do
    without are there only if ``shape`` names them. ``tokens``: the ids ``bos`` and ``eos``; ``pad``
    is ignored, since rows are never padded. Raises UnavailableError if the attention implementation
    cannot run."""
    torch.manual_seed(seed)
    settings = model_settings(shape, normalizer, **tokens)
    settings["pad_token_id"] = None  # rows are never padded; torch would not train its embedding
    model = model_class(class_names()[settings["model_type"]])(AutoConfig.for_model(**settings))
    normalizer, gate = split_gate(normalizer)
    if gate:
        torch.manual_seed(seed)
        settings.update(model_type="llama", gate=None)
        ungated = LlamaForCausalLM(AutoConfig.for_model(**settings))
        model.load_state_dict(ungated.state_dict(), strict=False)
    for layer in model.model.layers:
        for parameter in NORMALIZERS[normalizer].parameters:
            if not (parameter.required or parameter.attribute in shape.parameters):
                continue
            changed = shape.parameters.get(parameter.attribute, OwnParameter())
            start, trained = parameter.start(shape.heads), parameter.trainable
            if changed.start is not None:
                start = [changed.start] * shape.heads
            if changed.trained is not None:
                trained = changed.trained
            value = nn.Parameter(torch.tensor(start), requires_grad=trained)
            layer.self_attn.register_parameter(parameter.attribute, value)
    model.to(device)
    return model, set_attention(model, normalizer=normalizer, implementation=attention)


class Loss(nn.Module):
    """The mean negative log-likelihood of a batch, in nats per token."""

    def __init__(self, model: LlamaForCausalLM, precision: str) -> None:
        super().__init__()
        self.dtype = getattr(torch, precision)
        self.embeddings, self.decoder = model.get_input_embeddings(), model.get_decoder()
        self.matrix = model.get_output_embeddings()

    def forward(self, rows: Tensor) -> Tensor:
        """Return the loss, a scalar, of ``rows`` [B, T + 1] int64, of all tokens but the first."""
        # Looked up outside of what is compiled: the gradient by torch's own kernel is the same
        # every time, and quick for tokens that come often; the compiler's is one or the other.
        # Handed over in the passes' dtype, so that the residual stream and the rotary embedding
        # are of it too; from float32 embeddings autocast would make them float32.
        embedded = self.embeddings(rows[:, :-1]).to(self.dtype)
        with positions_counted(), warnings.catch_warnings():
            # the compiler looks whether it has a gradient already
            warnings.filterwarnings("ignore", message=NO_LEAF)
            return self.of_embedded(embedded, rows[:, 1:])

    def of_embedded(self, embedded: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of embedded tokens [B, T, D] and ``targets`` [B, T] int64."""
        half = embedded.dtype != torch.float32
        with torch.autocast(embedded.device.type, embedded.dtype, enabled=half):
            states = self.decoder(inputs_embeds=embedded, use_cache=False).last_hidden_state
            logits = self.matrix(states)
            return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def learning_rate(step: int, steps: int, schedule: Schedule) -> float:
    """Return the learning rate of ``step``, from 0, as a share of its peak: linear up to 1, then
    cosine down to the floor at ``steps``, or 1 if the schedule has no decay."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.decay == "none":
        return 1.0
    done = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
    return schedule.floor + (1 - schedule.floor) * 0.5 * (1 + math.cos(math.pi * done))


def adamw(parameters: Iterable[nn.Parameter], settings: Optimizer) -> AdamW:
    """Return AdamW over the trained ``parameters``; vectors decay only if ``settings`` say so."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    decay = settings.weight_decay
    of_vectors = decay if settings.decay_vectors else 0.0
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": of_vectors},
    ]
    rate = settings.learning_rate
    return AdamW(groups, lr=rate, betas=settings.betas, eps=settings.eps, fused=True)


def parallel_loss(
    model: LlamaForCausalLM, compute: Compute, processes: PartialState
) -> Loss | DistributedDataParallel:
    """Return a module that computes the loss of ``model``, which is set to train mode. It is
    compiled as one graph if ``compute`` says so; gradients are averaged over ``processes``."""
    loss = Loss(model.train(), compute.precision)
    if compute.compile:
        # A recipe's models follow one another: the compiler would take each for the same one
        # compiled again, and give up at the eighth.
        torch._dynamo.reset()
        loss.of_embedded = torch.compile(
            loss.of_embedded, mode=compute.compile, fullgraph=True, dynamic=False
        )
    if processes.num_processes == 1:
        return loss
    place = processes.device
    return DistributedDataParallel(
        loss, device_ids=[place.index] if place.type == "cuda" else None,
        gradient_as_bucket_view=True, broadcast_buffers=False,  # the same everywhere
    )  # fmt: skip


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Make torch's operators and compiled kernels deterministic in the body, or raise RuntimeError
    at one that cannot be; with ``enabled`` False let them be as fast as they can."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(enabled)
    torch.utils.deterministic.fill_uninitialized_memory = False  # none is read
    try:
        # The compiler measures kernels against each other; the fastest may sum in another order.
        with config.patch(deterministic=enabled):
            yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filled
