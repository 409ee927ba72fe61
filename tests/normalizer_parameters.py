"""What the normalizers' definitions need beside scores, of some size, for any test."""

import torch

from qbench.attention.normalizers import NORMALIZERS


def parameters(normalizer, heads, *, dtype=torch.float64, slopes=False):
    """Those that it needs, and with ``slopes`` ALiBi's; each head another."""
    given = {}
    for parameter in NORMALIZERS[normalizer].parameters:
        if parameter.name == "slopes" and slopes:
            given["slopes"] = (0.5 ** torch.arange(1, heads + 1)).to(dtype)
        elif parameter.required:
            numbers = torch.linspace(-0.4, 0.4, heads) if heads > 1 else torch.tensor([0.3])
            given[parameter.name] = (numbers + (parameter.name == "s")).to(dtype)
    return given


def attach(model, normalizer, *, slopes=False):
    """Puts them where a model's attention modules keep them."""
    attributes = {p.name: p.attribute for p in NORMALIZERS[normalizer].parameters}
    heads = model.config.num_attention_heads
    given = parameters(normalizer, heads, dtype=model.dtype, slopes=slopes)
    for layer in model.model.layers:
        for name, tensor in given.items():
            device = layer.self_attn.q_proj.weight.device
            parameter = torch.nn.Parameter(tensor.to(device, copy=True))
            layer.self_attn.register_parameter(attributes[name], parameter)
    return model
