"""Read the stored tensors of each layer of a loaded model from the files of a published copy."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from qbench.errors import CheckpointError
from qbench.quantizers import gguf_file
from qbench.quantizers.config import PackedWeight
from qbench.quantizers.linear import Experts, linears
from qbench.quantizers.published import GGUF, PublishedCopy, parents

WORDS = {
    "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
    "input_linear": "experts.gate_up_proj", "output_linear": "experts.down_proj",
}  # fmt: skip
PLAIN = (torch.float32, torch.float16, torch.bfloat16)


def evidence(model: nn.Module, settings: PublishedCopy) -> dict[str, Callable[[], PackedWeight]]:
    """Return, by layer's name in ``model``, a function that reads the stored tensors of the layer,
    for the layers that the files quantize."""
    if settings.format == GGUF:
        layers = linears(model)
        count = model.config.get_text_config().num_hidden_layers
        by_layer = {}
        for name, tensor in gguf_file.tensors(settings.folder, list(layers), count).items():
            module, _, part = name.rpartition(".")
            if part == "weight":
                layer = layers[module]
                by_layer[module] = partial(
                    PackedWeight,
                    tensors={"data": torch.from_numpy(tensor.data.copy().view("uint8"))},
                    dequantize=partial(getattr, layer.weight, "data"),
                    groups=partial(torch.reshape, shape=(-1, layer.in_features)),
                )
        return by_layer
    modules, by_layer = dict(model.named_modules()), {}
    for name, tensors in _by_module(settings.folder, modules).items():
        plain = all(n.endswith("weight") and t.dtype in PLAIN for n, t in tensors.items())
        columns = getattr(modules[name], "in_features", getattr(modules[name], "infeatures", None))
        if not plain and name not in settings.ignore and columns is not None:
            by_row = partial(torch.reshape, shape=(-1, int(columns)))
            by_layer[name] = partial(PackedWeight, tensors=tensors, dequantize=None, groups=by_row)
    return by_layer


def _by_module(folder: str, modules: Mapping[str, object]) -> dict[str, dict[str, Tensor]]:
    """Return module → its tensors in the files, biases left out."""
    by_module: dict[str, dict[str, Tensor]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118  no mapping
                name = _in_model(stored, modules)
                module = next((m for m in parents(name) if m in modules), None)
                part = name.removeprefix(f"{module}.")
                if module is None or part.endswith("bias"):
                    continue
                tensor = file.get_tensor(stored)
                for owner, part_name, owned in _owners(modules, module, part, tensor):
                    by_module.setdefault(owner, {})[part_name] = owned
    return by_module


def _in_model(name: str, modules: Collection[str]) -> str:
    """Return the model's name of the tensor ``name`` in its files: Mixtral, PhiMoE and GraniteMoE
    name experts otherwise than transformers 5."""
    block, moe, rest = name.partition(".block_sparse_moe.")
    if not moe:
        return name
    inner = "block_sparse_moe" if f"{block}.block_sparse_moe" in modules else "mlp"
    return ".".join([block, inner, *(WORDS.get(part, part) for part in rest.split("."))])


def _owners(
    modules: Mapping[str, object], module: str, part: str, tensor: Tensor
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield (module, name in it, tensor) for each module that a tensor belongs to. Files may hold a
    matrix of all experts as one (gpt-oss: ``experts.down_proj_blocks``), or the halves of an
    expert's ``gate_up_proj`` apart."""
    if isinstance(modules[module], Experts):
        matrix = part[: part.index("_proj") + len("_proj")]
        part_name = part.removeprefix(matrix).lstrip("_") or "weight"
        for expert, rows in enumerate(tensor):
            yield f"{module}.{expert}.{matrix}", part_name, rows
    elif part.startswith(("gate_proj.", "up_proj.")) and f"{module}.gate_up_proj" in modules:
        yield f"{module}.gate_up_proj", part, tensor
    else:
        yield module, part, tensor


def write_gguf_into(model: nn.Module, path: str) -> None:
    """Replace the weights of ``model``, the original, by those of the GGUF file ``path``,
    dequantized; parameters that it lacks stay. Raises CheckpointError for other shapes."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    modules = [name for name, _ in model.named_modules() if name]
    parameters = dict(model.named_parameters())
    for name, tensor in gguf_file.tensors(path, modules, config.num_hidden_layers).items():
        if name not in parameters:
            continue
        values = gguf_file.dequantized(path, name, tensor, (heads, kv_heads))
        if values.shape != tuple(parameters[name].shape):
            raise CheckpointError(
                f"{path}: {tensor.name} is {list(values.shape)} and the original's {name} "
                f"{list(parameters[name].shape)}: the file is no copy of this model; name the "
                "model that it was made from under checkpoints"
            )
        parameters[name].data.copy_(torch.from_numpy(values.copy()))
