"""Training of one demo checkpoint, and writing it in flash-linear-attention's on-disk format."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from qbench.attention import reference
from qbench.attention.interface import attend

ATTENTION_NAMES = {"softmax": "parallel_attn", "softpick": "parallel_softpick_attn"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The model's shape, about 1.3 M parameters."""

    vocabulary: int = 1024
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    intermediate: int = 512  # what flash-linear-attention derives from the hidden size
    context: int = 256  # tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """AdamW with a linear warm-up and a cosine down to a tenth of the peak."""

    steps: int
    rows: int = 64  # a step, each of ``Shape.context`` tokens
    learning_rate: float = 3e-3
    warmup_steps: int = 200
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0

    def factor(self, step: int) -> float:
        """Learning rate at ``step`` over its peak."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A trained model (float32, on the training device) and its loss: (step, nats a token)."""

    model: LlamaForCausalLM
    attention: str  # what ran, e.g. "softpick/reference"
    loss: tuple[tuple[int, float], ...]  # means over a fiftieth of the steps each


def train(
    tokens: torch.Tensor, *, normalizer: str, shape: Shape, schedule: Schedule, seed: int
) -> Trained:
    """Train on ``tokens`` [N] (long, on the device to use).

    Initial weights and the order of rows depend on ``seed`` alone, so models of different
    normalizers see the same rows at the same step.
    """
    if tokens.is_cuda:
        # One large chunk of queries beats many small ones, which are made for a CPU's cache.
        reference.CHUNK_SCORES = schedule.rows * shape.heads * shape.context**2
    torch.manual_seed(seed)
    model = LlamaForCausalLM(_llama_config(shape))
    attention = attend(model, normalizer=normalizer, implementation="reference")
    model.to(tokens.device).train()
    decayed = [p for p in model.parameters() if p.ndim == 2]
    kept = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": kept, "weight_decay": 0.0}],
        lr=schedule.learning_rate,
        betas=schedule.betas,
        weight_decay=schedule.weight_decay,
    )
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor)
    rows = tokens[: (len(tokens) - 1) // shape.context * shape.context + 1]
    rows = rows.unfold(0, shape.context + 1, shape.context)  # [rows, context + 1]
    order = _row_order(len(rows), schedule, seed).to(tokens.device)  # [steps, rows a step]
    losses = torch.zeros(schedule.steps, device=tokens.device)
    for step in range(schedule.steps):
        batch = rows[order[step]]
        logits = model(batch[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.clip)
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
        if step % 500 == 0:
            print(f"  {normalizer} step {step} of {schedule.steps}: loss {loss.item():.3f}")
    return Trained(model=model.eval(), attention=attention, loss=_thin(losses))


def save_checkpoint(
    model: LlamaForCausalLM, folder: Path, *, normalizer: str, shape: Shape
) -> None:
    """``config.json`` and ``model.safetensors`` (bfloat16) with flash-linear-attention's names."""
    tensors = {
        _upstream_name(name): tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(sorted(tensors.items())), folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["TransformerForCausalLM"],
        "attn_impl": ATTENTION_NAMES[normalizer],
        "bos_token_id": 1,
        "elementwise_affine": True,
        "eos_token_id": 2,
        "fuse_cross_entropy": True,
        "fuse_norm": True,
        "fuse_swiglu": True,
        "hidden_act": "swish",
        "hidden_ratio": 4,
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": None,
        "max_position_embeddings": shape.context,
        "model_type": "transformer",
        "norm_eps": 1e-06,
        "num_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_kv_heads": None,
        "qkv_bias": False,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocabulary,
        "window_size": None,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def save_history(
    trained: Trained, folder: Path, *, schedule: Schedule, seed: int, command: str, corpus: dict
) -> None:
    """``training.json``: how the checkpoint came about."""
    settings = asdict(schedule)
    history = {
        "command": command,
        "seed": seed,
        "attention": trained.attention,
        "device": str(next(trained.model.parameters()).device.type),
        "torch": torch.__version__,
        "schedule": settings,
        **corpus,
        "loss": trained.loss,
    }
    text = json.dumps(history, separators=(",", ":")) + "\n"
    (folder / "training.json").write_text(text, encoding="utf-8")


def _llama_config(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=shape.context,
        rms_norm_eps=1e-6,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )


def _row_order(rows: int, schedule: Schedule, seed: int) -> torch.Tensor:
    """Row numbers [steps, rows a step]: epoch after epoch, each in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    needed = schedule.steps * schedule.rows
    epochs = [torch.randperm(rows, generator=generator) for _ in range(-(-needed // rows))]
    return torch.cat(epochs)[:needed].view(schedule.steps, schedule.rows)


def _thin(losses: torch.Tensor) -> tuple[tuple[int, float], ...]:
    size = max(1, len(losses) // 50)
    means = [
        (end, losses[end - size : end].mean().item()) for end in range(size, len(losses) + 1, size)
    ]
    return tuple((end, round(mean, 4)) for end, mean in means)


def _upstream_name(name: str) -> str:
    """A Llama tensor's name in flash-linear-attention."""
    for ours, theirs in (
        ("embed_tokens", "embeddings"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "mlp_norm"),
        ("self_attn", "attn"),
    ):
        name = name.replace(f".{ours}.", f".{theirs}.")
    return name
