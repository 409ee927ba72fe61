"""A stock transformers model to be trained, and one step's loss of it."""

from __future__ import annotations

import warnings

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, LlamaForCausalLM

from qbench.attention.transformers import attend
from qbench.checkpoints.supported import class_names
from qbench.training.recipe import Shape
from qbench.training.shape import llama_settings, own_parameters

NO_LEAF = r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def initial_model(
    shape: Shape,
    *,
    normalizer: str,
    seed: int,
    device: str | torch.device,
    attention: str = "auto",
    tokens: dict[str, int | None] | None = None,
) -> tuple[LlamaForCausalLM, str]:
    """A model in float32 with its initial weights, and what attends, e.g. ``softpick/triton``.

    The weights are drawn on the CPU and depend on ``shape`` and ``seed`` alone: they are the same
    for every normalizer, whose own parameters come after. ``tokens``: ids of bos, eos and pad.
    Raises UnavailableError where the attention cannot be had.
    """
    ids = tokens or {"bos": 1, "eos": 2, "pad": None}
    torch.manual_seed(seed)
    settings = llama_settings(shape, normalizer, **ids)
    model_class = getattr(transformers, class_names()[settings["model_type"]])
    model = model_class(AutoConfig.for_model(**settings))
    for layer in model.model.layers:
        for parameter, asked in own_parameters(shape, normalizer):
            start = parameter.start(shape.heads)
            if asked.start is not None:
                start = [asked.start] * shape.heads
            trained = parameter.trainable if asked.trained is None else asked.trained
            value = nn.Parameter(torch.tensor(start), requires_grad=trained)
            layer.self_attn.register_parameter(parameter.attribute, value)
    model.to(device)
    model.config.qbench_normalizer = normalizer
    return model, attend(model, normalizer=normalizer, implementation=attention)


class Loss(nn.Module):
    """Mean negative log-likelihood of a batch, in nats a token."""

    def __init__(self, model: LlamaForCausalLM, precision: str) -> None:
        super().__init__()
        self.dtype = DTYPES[precision]
        self.embeddings = model.get_input_embeddings()
        self.rest = LossOfEmbedded(model)

    def forward(self, rows: Tensor) -> Tensor:
        """``rows`` [B, T + 1] int64: every token but the first is predicted."""
        # Looked up outside of what is compiled: the gradient by torch's own kernel is the same
        # every time, and quick for tokens that come often; the compiler's is one or the other.
        # Handed over in the passes' dtype, so that the residual stream and the rotary embedding
        # are of it too; from float32 embeddings autocast would make them float32.
        embedded = self.embeddings(rows[:, :-1]).to(self.dtype)
        with warnings.catch_warnings():  # the compiler looks whether it has a gradient already
            warnings.filterwarnings("ignore", message=NO_LEAF)
            return self.rest(embedded, rows[:, 1:])


class LossOfEmbedded(nn.Module):
    """The same from embedded tokens on."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.decoder, self.head = model.get_decoder(), LossOfStates(model)

    def forward(self, embedded: Tensor, targets: Tensor) -> Tensor:
        """``embedded`` [B, T, D], ``targets`` [B, T] int64."""
        half = embedded.dtype != torch.float32
        with torch.autocast(embedded.device.type, embedded.dtype, enabled=half):
            states = self.decoder(inputs_embeds=embedded, use_cache=False).last_hidden_state
            return self.head(states, targets)


class LossOfStates(nn.Module):
    """The same from the last hidden states on."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.matrix = model.get_output_embeddings()

    def forward(self, states: Tensor, targets: Tensor) -> Tensor:
        """``states`` [B, T, D], ``targets`` [B, T] int64."""
        logits = self.matrix(states)
        return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
