"""Small checkpoint folders in flash-linear-attention's format."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from qbench.checkpoints.fla import NAMES, llama_settings

CONFIG = {
    "model_type": "transformer", "attn_impl": "parallel_softpick_attn", "hidden_size": 64,
    "num_heads": 2, "num_kv_heads": None, "num_hidden_layers": 1, "vocab_size": 32,
    "intermediate_size": 96, "max_position_embeddings": 128, "norm_eps": 1e-4,
    "rope_theta": 500.0, "hidden_act": "swish", "tie_word_embeddings": False,
}  # fmt: skip


def shapes(config: dict) -> dict[str, list[int]]:
    """By the format's own names, of all that such a checkpoint holds."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**llama_settings(config)))
    parameters = model.named_parameters()  # of which tied ones come once
    return {in_fla(name): list(parameter.shape) for name, parameter in parameters}


def in_fla(name: str) -> str:
    """Return the name in this format of the tensor with this Llama name."""
    for fla, llama in NAMES:
        name = name.replace(llama, fla)
    return name


def random_tensors(config: dict = CONFIG) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator) / 8 + (1 if "norm" in name else 0)
        for name, shape in shapes(config).items()
    }


def write(folder: Path, config: dict = CONFIG, tensors: dict | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_tensors() if tensors is None else tensors, folder / "model.safetensors")
    return folder
