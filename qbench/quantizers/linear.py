"""Find a model's weight matrices, which a method must cover, and the linear layers it replaces.

A weight matrix is a floating-point parameter, not a bias, with at least two dimensions longer than
one: of linear layers, Conv1D layers of GPT-2, experts (one by one where a model keeps them as one
parameter), routers and convolutions. Those of embeddings, of normalizing layers and of the LM head
are none. Parameters that no activation is multiplied by (a state space's A) count too, since names
do not tell them apart; they are small.

transformers holds the experts of Mixtral, Qwen MoE, DeepSeek, gpt-oss and others as
``gate_up_proj`` [experts, 2 · inner, hidden] and ``down_proj`` [experts, hidden, inner] (gpt-oss
transposed). A quantizer of linear layers would not see them. ``linearize`` puts in their place a
module that computes the same with ``<expert>.gate_up_proj`` and ``<expert>.down_proj``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from qbench.errors import QuantizationError
from qbench.machine import memory_gib
from qbench.quantizers.config import PackedWeight, WeightSettings, backend, matching
from qbench.streaming import free_gpu_bytes, load_block, stream_of

Tensors = dict[str, Tensor]
KEPT_WEIGHT = "qbench_weight"  # attribute of a layer: its weight, and what it was made of
FREE_GIB = 4.0  # of the host's memory, which kept weights leave to others
KEPT = "kept in float32 by its class"  # in place of a matrix's holder
PRODUCTS = {"FalconLinear"}  # subclasses of transformers whose forward computes nothing else


def linears(model: nn.Module, ignore: tuple[str, ...] = ()) -> dict[str, nn.Linear]:
    """Return every ``nn.Linear`` of ``model`` by name, in the model's order, without the LM head,
    layers that ``ignore`` names and those that the class keeps in float32."""
    head = model.get_output_embeddings()
    layers = {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) and module is not head
    }
    left_out = matching(layers, ignore) | kept_in_float32(model, layers)
    return {name: layer for name, layer in layers.items() if name not in left_out}


def ends(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the LM head and the embeddings by name, the embeddings as a layer [vocabulary, hidden]
    over their matrix. If the LM head shares it, both are one layer under the LM head's name.
    ``model`` is not quantized yet."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    layers = {} if head is None else {names[head]: head}
    if head is None or head.weight is not table.weight:
        layers[names[table]] = linear_layer(table.weight, None)
    return layers


def named_ends(model: nn.Module, chosen: WeightSettings | None) -> dict[str, nn.Linear]:
    """Return, of the ``ends`` of ``model``, those that the settings ``chosen`` quantize."""
    names = () if chosen is None else chosen.end_names
    return {n: layer for n, layer in ends(model).items() if n in names} if names else {}


class QuantizedEmbedding(nn.Module):
    """Looks tokens up as ``embedding`` does, in the weight of ``layer``, which is quantized."""

    def __init__(self, embedding: nn.Embedding, layer: nn.Module) -> None:
        super().__init__()
        # In tuples: the layer may be the LM head, and of the embedding its weight is not used.
        self._embedding, self._layer = (embedding,), (layer,)

    @property
    def layer(self) -> nn.Module:
        """Return the quantized layer that holds the table; it may be the LM head."""
        return self._layer[0]

    @property
    def weight(self) -> Tensor:
        """Return the dequantized table, computed at each access."""
        layer = self.layer
        return layer.dequantize() if hasattr(layer, "dequantize") else layer.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ``weight`` for token ``ids``, by the forward of the embedding."""
        return functional_call(self._embedding[0], {"weight": self.weight}, (ids,))


def layer_of(model: nn.Module, name: str) -> nn.Module:
    """Return the module ``name`` of ``model``; for quantized embeddings their layer."""
    module = model.get_submodule(name)
    return module.layer if isinstance(module, QuantizedEmbedding) else module


def in_place(model: nn.Module, name: str, layer: nn.Module) -> dict[str, nn.Module]:
    """Return module name → module: what to exchange so that ``layer`` replaces the layer ``name``
    of ``model``. For the LM head these include embeddings that share its matrix."""
    module = model.get_submodule(name)
    if isinstance(module, nn.Embedding):
        return {name: QuantizedEmbedding(module, layer)}
    if module is not model.get_output_embeddings():
        return {name: layer}
    tied = {path: table for path, table in model.named_modules()
            if isinstance(table, nn.Embedding) and table.weight is module.weight}  # fmt: skip
    return {name: layer, **{path: QuantizedEmbedding(tied[path], layer) for path in tied}}


def kept_in_float32(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the modules of ``names`` that the model's class keeps in float32, such as a DeepSeek
    indexer's ``weights_proj``, whose forward reads the dtype of its weight."""
    patterns = [
        pattern
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for pattern in getattr(model, attribute, None) or ()
    ]
    if not patterns:
        return set()
    kept = re.compile("|".join(rf"(?:^|\.){pattern}(?:$|\.)" for pattern in patterns))
    return {name for name in names if kept.search(f"{name}.weight")}


def linearize(model: nn.Module) -> None:
    """Replace every Conv1D (of GPT-2: a linear layer with a transposed weight) and experts that are
    stored as one parameter by linear layers, in place. Raises QuantizationError for these in a
    streamed model."""
    others = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Conv1D) or is_fused(module)
    }
    if others and stream_of(model) is not None:
        raise QuantizationError(
            f"{type(model).__name__} keeps weights outside linear layers, which cannot be "
            "quantized block by block; set evaluation.stream: false"
        )
    for name, module in others.items():
        turned = isinstance(module, Conv1D)
        new = linear_layer(module.weight.T, module.bias) if turned else Experts(module)
        model.set_submodule(name, new)


def bias_of(layer: nn.Linear) -> Tensor | None:
    """Return the layer's bias without gradient; None without a bias."""
    return None if layer.bias is None else layer.bias.detach()


def kept_weight(
    module: nn.Module, stored: Sequence[Tensor], dequantize: Callable[[], Tensor]
) -> Tensor:
    """Return ``dequantize()``, kept as an attribute of ``module`` and computed again only if a
    ``stored`` tensor changed or memory is short (``FREE_GIB`` of the host's must be free, or half
    of a GPU's): it takes several times as long as multiplying by the weight."""
    # an inference tensor has no version, and PyTorch refuses to change it
    now = [(tensor, 0 if tensor.is_inference() else tensor._version) for tensor in stored]
    weight, before = getattr(module, KEPT_WEIGHT, (None, ()))
    same = len(before) == len(now) and all(
        kept is tensor and version == current
        for (kept, version), (tensor, current) in zip(before, now, strict=True)
    )
    if not same:
        weight = dequantize()
        if weight.device.type != "cuda":
            room = memory_gib("cpu") > FREE_GIB
        else:  # while a graph is captured, the weight lies in the graph's memory
            room = not torch.cuda.is_current_stream_capturing() and (
                free_gpu_bytes(weight.device) > torch.cuda.mem_get_info(weight.device)[1] / 2
            )
        setattr(module, KEPT_WEIGHT, (weight, now) if room else (None, ()))
    return weight


class DequantizedLinear(nn.Module):
    """A linear layer that multiplies by its dequantized stored weight, kept as ``kept_weight``
    says. It replaces ``layer``, has its dtype, and ``tensors`` as buffers."""

    def __init__(
        self, layer: nn.Linear, tensors: Mapping[str, Tensor], settings: WeightSettings
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.dtype, self.stored, self.settings = layer.weight.dtype, tuple(tensors), settings
        for name, tensor in {**tensors, "bias": bias_of(layer)}.items():
            self.register_buffer(name, tensor)

    def dequantize(self) -> Tensor:
        """Return the weight, ``dtype`` [out, in]; computed in float32. Unless a subclass overrides
        it, the function of that name in the settings' module does."""
        return backend(self.settings).dequantize(self, self.settings).to(self.dtype)

    def groups(self, weight: Tensor, settings: WeightSettings) -> Tensor:
        """Return a matrix [out, in] as [groups, weights of a group], which share their levels."""
        return weight.reshape(-1, settings.group_length(self.in_features))

    def unpack(self, settings: WeightSettings) -> PackedWeight:
        """Return the stored tensors, for the audit."""
        return PackedWeight(
            tensors={name: getattr(self, name) for name in self.stored},
            dequantize=self.dequantize,
            groups=partial(self.groups, settings=settings),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + bias in the dtype of ``x``, with the dequantized weight."""
        stored = [self._buffers[name] for name in self.stored]
        weight = kept_weight(self, stored, self.dequantize)
        return nn.functional.linear(x, weight.to(x.dtype), self.bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """Holds a weight matrix in the layout of a linear layer, [out, in], or [experts, …].
    ``linear``: a linear layer multiplies by it, after ``linearize``."""

    name: str  # the parameter's, without ".weight"
    weight: Tensor
    linear: bool
    holder: str = "Linear"  # class of the module that holds it; or ``KEPT``


def matrices(model: nn.Module) -> dict[str, Matrix]:
    """Return every weight matrix of ``model`` by name, in the model's order; shared ones once. LM
    head, embeddings, norms and biases are left out."""
    head = model.get_output_embeddings()
    kept = kept_in_float32(model, (name for name, _ in model.named_modules()))
    result: dict[str, Matrix] = {}
    seen: set[int] = set() if head is None else {id(p) for p in head.parameters()}
    for path, module in model.named_modules():
        if is_fused(module):
            for name, weight, _ in expert_parts(module):
                result[f"{path}.{name}"] = Matrix(name=f"{path}.{name}", weight=weight, linear=True)
            seen |= {id(weight) for weight in module._parameters.values()}
        embedding = isinstance(module, nn.Embedding) or "Norm" in type(module).__name__
        for part, weight in module.named_parameters(recurse=False):
            linear = part == "weight" and is_linear(module)
            long = sum(size > 1 for size in weight.shape)
            matrix = weight.is_floating_point() and long >= 2 and "bias" not in part
            if id(weight) in seen or embedding or not (linear or matrix):
                continue
            seen.add(id(weight))
            name = path if part == "weight" else f"{path}.{part}"
            turned = isinstance(module, Conv1D) and part == "weight"  # holds [in, out]
            result[name] = Matrix(
                name=name,
                weight=weight.T if turned else weight,
                linear=(turned or linear) and path not in kept,
                holder=KEPT if linear and path in kept else type(module).__name__,
            )
    return result


def matrices_size(matrices: Iterable[Matrix]) -> int:
    """Return the number of weights in all ``matrices``."""
    return sum(matrix.weight.numel() for matrix in matrices)


def others(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter of ``model`` that is not in its ``matrices``, by name; biases of
    experts are named as ``linearize`` names them. Shared ones are listed once."""
    inside, rest = matrices(model), {}
    fused = {path: module for path, module in model.named_modules() if is_fused(module)}
    for name, parameter in model.named_parameters():
        of_experts = name.rpartition(".")[0] in fused
        if not (of_experts or name in inside or name.removesuffix(".weight") in inside):
            rest[name] = parameter
    for path, module in fused.items():
        biases = ((name, bias) for name, _, bias in expert_parts(module) if bias is not None)
        rest |= {f"{path}.{name}.bias": bias for name, bias in biases}
    return rest


def is_linear(module: nn.Module) -> bool:
    """Return whether ``module`` is a linear layer. Libraries' subclasses are; of transformers'
    subclasses only those that compute nothing else (a router does)."""
    if not isinstance(module, nn.Linear):
        return False
    kind = type(module)
    overridden = kind.forward is not nn.Linear.forward
    of_transformers = kind.__module__.startswith("transformers.")
    return not (overridden and of_transformers) or kind.__name__ in PRODUCTS


def values(weight: Tensor) -> Tensor:
    """Return ``weight`` as a plain tensor; a tensor subclass, such as torchao's, is dequantized."""
    held = weight.data
    return held if type(held) is Tensor else held.dequantize()


def set_parameter(parameter: nn.Parameter, value: Tensor) -> None:
    """Replace the data of ``parameter`` by ``value``, cast to its dtype."""
    parameter.data = value.to(parameter.dtype).contiguous()


def not_finite(model: nn.Module) -> list[str]:
    """Return a line for each parameter of ``model`` with NaN or infinite values; a streamed model's
    quantized layers, which have none, are left out."""
    lines: list[str] = []
    sums: dict[str, Tensor] = {}
    for name, weight in list(model.named_parameters()):
        if not weight.is_floating_point() or weight.is_meta:  # a streamed model's quantized layer
            continue
        load_block(model, name)
        sums[name] = values(weight).sum()  # not finite if a value is not, and fast
    for name in (name for name, total in numbers(sums).items() if not math.isfinite(total)):
        load_block(model, name)
        weight = values(model.get_parameter(name))
        if bad := int((~weight.isfinite()).sum()):
            lines.append(f"{name}: {bad:,} of {weight.numel():,} values are not finite")
    return lines


def numbers(scalars: Mapping[str, Tensor]) -> dict[str, float]:
    """Return scalar tensors as floats, in one transfer: each waits for others on the GPU."""
    device = next(iter(scalars.values())).device
    stacked = torch.stack([scalar.to(device, torch.float64) for scalar in scalars.values()])
    return dict(zip(scalars, stacked.tolist(), strict=True))


# Experts that are kept as one parameter

DOWN = "down_proj"
ROUTED = "qbench_routed"  # attribute of a layer of an expert that was taken apart


def is_fused(module: nn.Module) -> bool:
    """Return whether ``module`` stores experts as transformers' experts interface does, and
    computes only what ``Experts`` computes."""
    first = first_part(module)
    return (
        first is not None
        and not getattr(module, "has_post_expert_norm", False)
        and not isinstance(module, Experts)
        and {first, DOWN} <= set(module._parameters)
        and all(module._parameters[part].dim() == 3 for part in (first, DOWN))
    )


def first_part(module: nn.Module) -> str | None:
    """Return the name of the first parameter that experts multiply by; None without experts."""
    if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed"):
        return None
    return "gate_up_proj" if module.has_gate else "up_proj"


def expert_parts(module: nn.Module) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield ``<expert>.<part>``, weight [out, in] and bias [out] (None without biases) of each
    matrix of fused experts, as views of the module's parameters."""
    first = first_part(module)
    for expert in range(module.down_proj.shape[0]):
        for part in (first, DOWN):
            weight = getattr(module, part)[expert]
            bias = getattr(module, f"{part}_bias")[expert] if module.has_bias else None
            yield f"{expert}.{part}", weight.T if module.is_transposed else weight, bias


class Experts(nn.Module):
    """Compute the same as the ``fused`` experts, expert by expert, with linear layers. The
    parameters of ``fused`` are removed from it."""

    def __init__(self, fused: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that what is left of the fused module (its activation and constants) is no
        # part of the model's tree.
        self._fused = (fused,)
        self.first = first_part(fused)
        self.count = fused.down_proj.shape[0]
        for name, weight, bias in expert_parts(fused):
            expert, part = name.split(".")
            if part != DOWN:
                self.add_module(expert, nn.Module())
            layer = linear_layer(weight, bias)
            setattr(layer, ROUTED, True)
            self.get_submodule(expert).add_module(part, layer)
        for part in (self.first, DOWN):
            for name in (part, f"{part}_bias"):
                fused._parameters.pop(name, None)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the outputs [tokens, hidden] of the ``top_k_index`` [tokens, k] experts for
        ``hidden_states`` [tokens, hidden], weighted by ``top_k_weights`` [tokens, k]."""
        (fused,) = self._fused
        result = torch.zeros_like(hidden_states)
        for expert in range(self.count):
            tokens, place = torch.where(top_k_index == expert)
            module = self.get_submodule(str(expert))
            up, down = getattr(module, self.first), module.down_proj
            # Calibration must see every layer; quantized layers may refuse empty inputs.
            if not len(tokens) and type(up) is not nn.Linear:
                continue
            inner = up(hidden_states[tokens])
            inner = fused._apply_gate(inner) if fused.has_gate else fused.act_fn(inner)
            weighted = down(inner) * top_k_weights[tokens, place, None]
            result.index_add_(0, tokens, weighted.to(result.dtype))
        return result


def linear_layer(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer over ``weight`` [out, in], which is copied only if it is not
    contiguous, and a copy of ``bias`` [out], if there is one."""
    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.out_features, layer.in_features = weight.shape
    layer.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return layer
