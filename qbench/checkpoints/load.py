"""Load a checkpoint as a stock transformers model with qbench's attention, unquantized or quantized
already, and measure what its class does."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import qbench.checkpoints.gated  # noqa: F401, makes its class known to transformers
from qbench.attention import NATIVE
from qbench.attention.observed import attention_observed
from qbench.attention.transformers import KEEP_OWN, set_attention
from qbench.checkpoints import fla
from qbench.checkpoints.find import (
    CLASS_NORMALIZERS,
    Checkpoint,
    ChosenAttention,
    Header,
    model_headers,
    named,
    parameters_of,
    require_unchanged,
)
from qbench.errors import CheckpointError, QbenchError, UnavailableError, first_line, some
from qbench.machine import kernel_packages
from qbench.streaming import load_block

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PROBE = 16  # tokens; the last half differs between the two rows
# Rounding may differ between two rows of a batch; what a later token does to a trained encoder is
# of the size of its logits.
NOISE = {torch.float32: 1e-4, torch.float64: 1e-4}
NOISE_OF_HALF = 0.03
GPU_ONLY = re.compile("active drivers|accessed from Triton|is_cuda")  # in errors of kernels
# Our attention and a class's own round differently in every layer: on a CPU in float32 they agree;
# elsewhere another function must differ clearly.
OURS_OF_HALF, OURS_ON_GPU, OURS_OF_FEW_BITS = 0.1, 0.01, 0.5
# What GPTQModel loads and transformers does not, with its kernel in torch: two formats, and
# GPTQ with settings by layer
GPTQMODELS_OWN = {"exl3": "exl3_torch", "paroquant": "paroquant_cuda", "gptq": "gptq_torch"}
ROUNDS_ACTIVATIONS = "qbench_rounds_activations"  # attribute of copies that do
# Of from_pretrained. Tensors of another shape are reported, and refused then
SAFELY = {"use_safetensors": True, "trust_remote_code": False, "output_loading_info": True,
          "ignore_mismatched_sizes": True}  # fmt: skip


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: str,
    attention: str,
    fallback: bool = True,
    place: Callable[[PreTrainedModel], PreTrainedModel] | None = None,
    verify: bool = True,
) -> PreTrainedModel:
    """Return the model in ``dtype`` on ``device``, in evaluation mode. It attends with the
    checkpoint's normalizer through ``attention``: reference or triton, or for the normalizer
    ``native``, which is the class's own attention, sdpa or eager. Logits through qbench's attention
    are compared with the class's own, unless qbench or flash-linear-attention wrote the checkpoint.
    If they differ, the model runs on its class's own with ``fallback``, and is refused without;
    ``chosen_attention`` of the model says which. ``place`` moves the model from the host to its
    devices (see :mod:`qbench.streaming`). ``verify=False``: it was measured before. Raises
    CheckpointError if tensors are left over, missing or not finite, if later tokens change earlier
    logits, or if the files changed; UnavailableError if the attention cannot be had."""
    with named(checkpoint.source):
        require_unchanged(checkpoint)
        model = read_model(checkpoint, dtype).eval().requires_grad_(False)
        for parameter in () if place else model.parameters():
            parameter.data = moved(parameter.data, device)
        model = place(model) if place else model.to(device)
        if verify:
            require_finite(model)
        if verify and not fla.recognizes(checkpoint.config):
            chosen = measured_attention(model, checkpoint, attention, fallback)
        else:
            set_ours_or_native(model, checkpoint.normalizer, attention)
            chosen = ChosenAttention(normalizer=checkpoint.normalizer, implementation=attention)
        model.chosen_attention = chosen
    return model


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the host's ``tensor`` on ``device``. A GPU copies it while the host reads the next."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def measured_attention(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    attention: str,
    fallback: bool,
    why: str = "it is not a causal language model and gives no probability of a text; leave it out",
) -> ChosenAttention:
    """Set the checkpoint's attention, or with ``fallback`` the class's own if the logits differ;
    return the one that was set. ``why``: text for the error if later tokens change earlier logits.
    Raises as ``load_model``."""
    try_eager(model)
    logits = probe_logits(model)
    require_causal(model, logits, why)
    normalizer, reason = checkpoint.normalizer, "the recipe says so"
    if normalizer != NATIVE:
        try:
            set_ours_or_native(model, normalizer, attention)
            if "qbench_normalizer" not in checkpoint.config:
                require_ours(model, logits)
            return ChosenAttention(normalizer=normalizer, implementation=attention)
        except UnavailableError as error:
            reason = str(error).removesuffix(KEEP_OWN)
            if not fallback or normalizer not in CLASS_NORMALIZERS:
                raise UnavailableError(f"{reason}{KEEP_OWN}") from error
    implementation, same = "sdpa", False
    with suppress(UnavailableError):
        set_ours_or_native(model, NATIVE, implementation)
        same = difference(probe_logits(model), logits) <= rounding_tolerance(model)
    if not same:  # sdpa of some classes drops what eager has, as Gemma 2's soft cap
        implementation = "eager"
        set_ours_or_native(model, NATIVE, implementation)
    return ChosenAttention(normalizer=NATIVE, implementation=implementation, why=reason)


def try_eager(model: PreTrainedModel) -> None:
    """Set the class's plain attention, ``eager``, if the class has it."""
    with suppress(ValueError, ImportError):
        model.set_attn_implementation("eager")


def set_ours_or_native(model: PreTrainedModel, normalizer: str, implementation: str) -> None:
    """Set the attention of ``model``: ours with ``normalizer``, or its class's own for ``native``.
    Raises UnavailableError if the class lacks the ``implementation``."""
    if normalizer != NATIVE:
        set_attention(model, normalizer=normalizer, implementation=implementation)
        return
    model.config.qbench_normalizer = NATIVE
    reason = "transformers keeps another"
    try:
        model.set_attn_implementation(implementation)
    except (ValueError, ImportError) as error:
        reason = first_line(error)
    if model.config._attn_implementation != implementation:
        raise UnavailableError(
            f"{type(model).__name__} has no {implementation} attention ({reason}), which "
            "normalizer native needs; leave this checkpoint out, or give it another normalizer"
        )


@contextmanager
def _arange_on_cpu() -> Iterator[None]:
    """Have ``torch.arange`` make numbers on the CPU within the body: a rotary embedding's on the
    meta device, which are made again later, import SymPy, which takes a second."""
    with torch.device("meta"):
        torch.empty(0)  # PyTorch notes which functions its context is for: not the one below
    with patch.object(torch, "arange", partial(torch.arange, device="cpu")):
        yield


def _from_pretrained(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """Return transformers' model, and its report of what did not fit."""
    return AutoModelForCausalLM.from_pretrained(
        checkpoint.folder,
        config=_config(checkpoint),
        generation_config=generation_settings(checkpoint),
        key_mapping=fla.KEY_MAPPING if fla.recognizes(checkpoint.config) else None,
        dtype=dtype,
        **SAFELY,
    )


def read_model(checkpoint: Checkpoint, dtype: torch.dtype) -> PreTrainedModel:
    """Return the checkpoint's weights in its class of transformers, or in the one that computes the
    same. Raises CheckpointError if they do not fit it."""
    ours = fla.recognizes(checkpoint.config)
    try:
        # initial weights are overwritten, so their random state does not matter
        unset = {"reset_parameters": lambda layer: None}  # embeddings' imports torch's compiler
        with patch.multiple(nn.Linear, **unset), patch.multiple(nn.Embedding, **unset):
            try:
                with _arange_on_cpu():
                    model, report = _from_pretrained(checkpoint, dtype)
            except RuntimeError as error:
                if "expected device" not in str(error):
                    raise
                # a rotary embedding joins such numbers with others, as Gemma 4's does
                model, report = _from_pretrained(checkpoint, dtype)
    except CheckpointError:
        raise
    except Exception as error:  # an odd configuration may raise anything in transformers
        why = f"transformers cannot load it: {first_line(error)}"
        if "above report" in str(error):  # which is not shown
            why = "the tensors do not fit the configuration: transformers cannot join those of a "
            why += "layer, as of its experts, of which one may be missing or of another shape"
        raise CheckpointError(f"{why}{FIT}") from error
    headers, extra = model_headers(checkpoint), set(report["unexpected_keys"])
    if ours:
        extra = {name for name in extra if not name.endswith(fla.TABLE)}
    attributes = [parameter.attribute for parameter in parameters_of(checkpoint.normalizer)]
    parameters = {n for n in extra & headers.keys() if n.rpartition(".")[2] in attributes}
    require_fit(report, extra - parameters)
    tensors = {name: read_tensor(checkpoint.folder, headers[name]) for name in sorted(parameters)}
    for name, tensor in tensors.items() if ours else ():  # its s is [H, 1]
        if name.endswith(".self_attn.s") and tensor.shape[1:] == (1,):
            tensors[name] = tensor[:, 0]
    if tensors:
        attach(model, tensors)
    require_stored_head(model, checkpoint.folder, headers)
    return model


FIT = "; correct config.json, or fetch the weights again"


def require_fit(report: dict[str, Any], left_over: Iterable[str] = ()) -> None:
    """Raise CheckpointError naming tensors, the first eight of a kind, that transformers'
    ``report`` calls missing or of another shape, or that are ``left_over``."""
    misshapen = (
        f"{name} {list(shape)} instead of {list(expected)}"
        for name, shape, expected in report["mismatched_keys"]
    )
    kinds = {"missing": report["missing_keys"], "left over": left_over, "misshapen": misshapen}
    problems = [f"{kind}: {some(names)}" for kind, of in kinds.items() if (names := sorted(of))]
    if problems:
        raise CheckpointError(
            f"the tensors do not fit the configuration; {'; '.join(problems)}{FIT}"
        )


def _config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the checkpoint's configuration of transformers; no remote code runs."""
    if fla.recognizes(checkpoint.config):
        return AutoConfig.for_model(**fla.llama_settings(checkpoint.config))
    return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)


def generation_settings(checkpoint: Checkpoint) -> GenerationConfig:
    """Return the checkpoint's generation settings, or those that follow from its config.json.
    Raises CheckpointError if generation_config.json cannot be read."""
    if not (checkpoint.folder / "generation_config.json").is_file():
        return GenerationConfig.from_model_config(_config(checkpoint))
    try:
        return GenerationConfig.from_pretrained(checkpoint.folder)
    except Exception as error:  # odd values may raise anything in transformers
        raise CheckpointError(
            f"generation_config.json: transformers cannot read it: {first_line(error)}; correct or "
            "remove it"
        ) from error


def attach(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Put ``tensors`` [heads] by name into the attention modules of ``model``, in its dtype. Raises
    CheckpointError for a missing module, for a shape that is not the parameter's, and for a module
    that lacks what others of its class have."""
    heads = model.config.num_attention_heads
    for name, tensor in tensors.items():
        path, _, attribute = name.rpartition(".")
        try:
            module = model.get_submodule(path)
        except AttributeError:
            raise CheckpointError(f"left over: {name}; the model has no {path}{FIT}") from None
        if list(tensor.shape) != [heads]:
            raise CheckpointError(f"misshapen: {name} {[*tensor.shape]} instead of {[heads]}{FIT}")
        value = nn.Parameter(tensor.to(model.dtype), requires_grad=False)
        module.register_parameter(attribute, value)
    for attribute in {name.rpartition(".")[2] for name in tensors}:
        of = {type(m) for m in model.modules() if attribute in m._parameters}
        without = [
            f"{path}.{attribute}"
            for path, m in model.named_modules()
            if type(m) in of and attribute not in m._parameters
        ]
        if without:
            raise CheckpointError(f"missing: {some(without)}{FIT}")


# --- quantized by somebody, loaded by transformers' own quantizer of its format


def load_prequantized(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: str,
    attention: str,
    dequantize: bool,
    rounds_activations: bool = False,
    fallback: bool = True,
) -> PreTrainedModel:
    """Return the quantized model on ``device``, its unquantized parameters in ``dtype``, attending
    as :func:`load_model` says. ``dequantize``: FP8 weights are dequantized at once, as MXFP4
    weights always are. ``rounds_activations``: activations or a KV cache are rounded to few bits.
    Raises UnavailableError with transformers' reason if it cannot load the checkpoint here,
    CheckpointError for broken files."""
    quantization = checkpoint.config["quantization_config"]
    method = str(quantization.get("quant_method"))
    by_gptqmodel = method in GPTQMODELS_OWN and (method != "gptq" or quantization.get("dynamic"))
    with named(checkpoint.source):
        require_unchanged(checkpoint)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # libraries repeat the plan's warnings
                model = _read_quantized(checkpoint, dtype, device, dequantize, by_gptqmodel)
                setattr(model, ROUNDS_ACTIVATIONS, rounds_activations)
                model = model.eval().requires_grad_(False)
                for module in model.modules():  # bitsandbytes repacks for AVX512-BF16, wrongly
                    if hasattr(module, "support_avx512bf16_for_cpu"):
                        module.support_avx512bf16_for_cpu = False
                try_eager(model)
                logits = probe_logits(model)  # compressed-tensors decompresses in the first forward
        except QbenchError:
            raise
        except Exception as error:  # libraries may raise anything
            why = f"{first_line(error)}; install the package that this names, or"
            if "above report" in why:  # which is not shown
                why = "its tensors do not fit its quantization_config;"
            raise UnavailableError(
                f"{'GPTQModel' if by_gptqmodel else 'transformers'} cannot load this "
                f"{method} checkpoint here: {why} take another copy"
            ) from error
        headers = checkpoint.headers
        require_stored_head(model, checkpoint.folder, headers)
        if not logits.isfinite().all():
            raise CheckpointError(
                "its logits are NaN or infinite: its weights may be damaged; fetch them again"
            )
        rounds = "its library rounds activations of several tokens together; take another format"
        model.chosen_attention = measured_attention(model, checkpoint, attention, fallback, rounds)
    return model


def _read_quantized(
    checkpoint: Checkpoint, dtype: torch.dtype, device: str, dequantize: bool, by_gptqmodel: bool
) -> PreTrainedModel:
    """Return the quantized model as transformers loads it, or GPTQModel. Raises CheckpointError for
    tensors that are missing or of another shape, UnavailableError for experts in such files."""
    quantization = checkpoint.config["quantization_config"]
    method, folder = quantization["quant_method"], checkpoint.folder
    if by_gptqmodel:
        from gptqmodel import BACKEND, GPTQModel
        from gptqmodel.utils import paroquant

        # its kernel takes groups of 128; others it rotates one after the other, 100 times as slow
        paroquant.apply_paroquant_rotation_reference = rotate_pairs
        backend = BACKEND(GPTQMODELS_OWN[method])
        model = GPTQModel.load(str(folder), backend=backend, dtype=dtype, device=device).model
        if method == "exl3":  # transformers does not support it
            del model.config.quantization_config
        missing = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
        report = {"missing_keys": missing, "mismatched_keys": []}
    else:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map={"": device},
            **SAFELY,
            **_loading(quantization, dequantize),
        )
        missing = report["missing_keys"]
    if method in ("awq", "gptq") and missing and all(".experts." in name for name in missing):
        raise UnavailableError(
            "transformers 5 keeps this model's experts as one tensor and loads none from "
            f"{method} files; take a compressed-tensors, fp8 or mxfp4 copy"
        )
    require_fit(report)  # before kernels read missing tensors
    return model


def rotate_pairs(
    x: Tensor, pairs: Tensor, theta: Tensor, scales: Tensor | None = None, group_size: int = 128
) -> Tensor:
    """Return ``x`` [..., channels] times ``scales`` [channels] (None: 1) with pairs of its channels
    rotated, as by ParoQuant, to the bit, in all groups of ``group_size`` channels at once (0 or
    less: one group). ``pairs`` [K, channels]: of each of K rotations, one after the other, the
    channels within their group, two and two; ``theta`` [K, channels / 2]: the angles."""
    out = x.clone() if scales is None else x * scales.reshape(-1).to(x)
    size = group_size if group_size > 0 else x.shape[-1]
    inside = pairs.long().unflatten(1, (-1, size))  # [K, groups, size]
    starts = torch.arange(inside.shape[1], device=x.device)[:, None] * size
    firsts, seconds = (inside + starts).flatten(1).unflatten(1, (-1, 2)).unbind(2)
    angles = theta.float()
    cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    for i, j, cos, sin in zip(firsts, seconds, cosines, sines, strict=True):
        first, second = out[..., i], out[..., j]
        out[..., i], out[..., j] = first * cos + second * sin, -first * sin + second * cos
    return out


def _loading(quantization: dict[str, Any], dequantize: bool) -> dict[str, Any]:
    """Return options of ``from_pretrained`` for a quantized checkpoint. They name torch's kernels:
    automatic ones of GPTQ, AWQ and AutoRound differ by machine, some are compiled for minutes, and
    on CPUs some repack weights wrongly."""
    method = quantization.get("quant_method")
    if method == "gptq":
        chosen = transformers.GPTQConfig(bits=quantization["bits"], backend="gptq_torch")
    elif method == "awq":
        chosen = transformers.AwqConfig(bits=quantization["bits"], backend="torch_awq")
    elif method == "auto-round" and quantization.get("data_type") == "int":
        chosen = transformers.AutoRoundConfig(bits=quantization["bits"], backend="torch")
    elif method in ("fp8", "mxfp8") and dequantize:
        chosen = transformers.FineGrainedFP8Config(dequantize=True)
    elif method == "compressed-tensors" and _one_scheme_of_weights(quantization):
        chosen = transformers.CompressedTensorsConfig(dequantize=True)
    elif method == "mxfp4":  # it rounds no activations, so that products are the same
        chosen = transformers.Mxfp4Config(dequantize=True)
    else:
        return {}
    return {"quantization_config": chosen}


def _one_scheme_of_weights(quantization: dict[str, Any]) -> bool:
    """Return whether only weights are quantized, all alike: they can be dequantized at once.
    compressed-tensors 0.20 would dequantize them in the first forward pass, to the same numbers,
    but cannot load zero points and codes in whole bytes, which it expects in other layouts."""
    groups = list((quantization.get("config_groups") or {}).values())
    inputs = any(group.get("input_activations") for group in groups)
    return len(groups) == 1 and not inputs and not quantization.get("kv_cache_scheme")


def without_weights(checkpoint: Checkpoint) -> PreTrainedModel:
    """Return the checkpoint's model on the meta device, without weights: lm-eval takes settings
    from it while another runtime computes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(_config(checkpoint))
    model.generation_config = generation_settings(checkpoint)
    return model.eval()


# --- what only the loaded weights can show


@torch.inference_mode()
def require_finite(model: PreTrainedModel) -> None:
    """Raise CheckpointError naming the first three weights with a NaN or infinite value; of buffers
    NaN alone counts, since masks may hold −∞. The sum of a tensor, which is fast, is not finite
    where a value is not: only then they are counted."""
    buffers = dict(model.named_buffers())  # of which masks may hold -inf
    lines = []
    for name, tensor in (*model.named_parameters(), *buffers.items()):
        if not tensor.is_floating_point():
            continue
        load_block(model, name)
        if not tensor.sum().isfinite():
            bad = int((tensor.isnan() if name in buffers else ~tensor.isfinite()).sum())
            lines += [f"{name} ({bad} of {tensor.numel()} values)"] * (bad > 0)
    if lines:
        remedy = "the weights are damaged; fetch them again"
        if model.dtype != torch.float32:
            remedy += ", or, if they are too large for this dtype, use --dtype float32"
        dtype = str(model.dtype).removeprefix("torch.")
        raise CheckpointError(f"NaN or infinite in {dtype}: {some(lines, most=3)}; {remedy}")


def read_tensor(folder: Path, header: Header) -> torch.Tensor:
    """Return one tensor of the files in ``folder``."""
    with safe_open(folder / header.file, framework="pt") as file:
        return file.get_tensor(header.name)


@torch.inference_mode()
def unlike_files(model: PreTrainedModel, checkpoint: Checkpoint) -> list[str]:
    """Return a line per parameter of ``model`` that differs from the tensor of its name in the
    files, cast to its dtype. Parameters without such a tensor, or of another shape, are skipped:
    transformers joins some, such as experts, from several."""
    headers, same = model_headers(checkpoint), dict[str, Tensor]()
    for name, parameter in list(model.named_parameters()):
        header = headers.get(name)
        if header is None or list(parameter.shape) != header.shape:
            continue
        load_block(model, name)
        parameter = model.get_parameter(name)
        stored = moved(read_tensor(checkpoint.folder, header), parameter.device)
        same[name] = (parameter == stored.to(parameter.dtype)).all()
    equal = torch.stack([each.to(model.device) for each in same.values()]).tolist() if same else []
    return [
        f"{name}: differs from the tensor in {headers[name].file}"
        for name, alike in zip(same, equal, strict=True)
        if not alike
    ]


def require_stored_head(model: PreTrainedModel, folder: Path, headers: dict[str, Header]) -> None:
    """Raise CheckpointError if a tied model's files hold another output matrix than the embeddings.
    transformers drops it or unties it with a warning only, by version, and lm-eval ties it anew."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embeddings is None or not model.config.tie_word_embeddings:
        return
    modules = {id(module): name for name, module in model.named_modules()}
    name = f"{modules.get(id(head))}.weight"
    if name not in headers:
        return
    stored = read_tensor(folder, headers[name]).to(embeddings.weight.dtype)
    if not torch.equal(stored, embeddings.weight):  # False also for another shape
        raise CheckpointError(
            f"config.json says tie_word_embeddings: true, but {name} differs from the embeddings; "
            f"write tie_word_embeddings: false to use {name}, or remove {name} from its file"
        )


@torch.inference_mode()
def probe_logits(model: PreTrainedModel, length: int = PROBE) -> torch.Tensor:
    """Return logits [2, length, vocabulary] of two rows of token ids that share their first half;
    those of a shorter ``length`` are the beginnings of those of ``PROBE`` tokens. Raises
    UnavailableError on a CPU if an installed package computes parts of the class on a GPU alone."""
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(2 * PROBE).reshape(2, PROBE) * 7 % size
    ids[1, : PROBE // 2] = ids[0, : PROBE // 2]
    try:
        return model(ids[:, :length].to(model.device), use_cache=False).logits.float()
    except Exception as error:
        there = ", ".join(kernel_packages())
        if there and model.device.type == "cpu" and GPU_ONLY.search(str(error)):
            raise UnavailableError(
                f"{type(model).__name__}: transformers computes parts of it by packages that need "
                f"a GPU ({there}); uninstall them, or use a GPU"
            ) from error
        raise


def require_causal(model: PreTrainedModel, logits: torch.Tensor, why: str) -> None:
    """Raise CheckpointError, ending in ``why``, if later tokens, or more of them, change the logits
    of earlier ones by more than rounding. ``logits``: those of :func:`probe_logits`."""
    first = logits[:, : PROBE // 2]
    change = float((first[0] - first[1]).abs().max())
    if change > NOISE.get(model.dtype, NOISE_OF_HALF) * float(first.abs().max()):
        raise CheckpointError(
            f"later tokens change the logits of earlier ones (by {change:.3g}): {why}"
        )
    cut = probe_logits(model, PROBE // 2)
    off = difference(cut, first)
    if model.dtype in NOISE and not getattr(model, ROUNDS_ACTIVATIONS, False):
        off = float(((cut - first).norm(dim=-1) / first.norm(dim=-1)).max())
    if off > rounding_tolerance(model):
        raise CheckpointError(
            f"adding {PROBE // 2} tokens at the end changes the logits of the {PROBE // 2} before "
            f"them (by {off:.2g} of their size): {why}"
        )


def require_ours(model: PreTrainedModel, logits: torch.Tensor) -> None:
    """Raise UnavailableError if the model fails on the attention function that qbench set or does
    not call it, or if its logits through it differ from ``logits`` [2, T, V], those of its class's
    attention, by more than rounding."""
    name = type(model).__name__
    calls: list[nn.Module] = []
    try:
        with attention_observed(model, lambda module, _: calls.append(module)):
            ours = probe_logits(model)
    except QbenchError:
        raise
    except Exception as error:  # a class may need a mask or an output that is not qbench's
        raise UnavailableError(
            f"{name} fails on qbench's attention ({first_line(error)})"
        ) from error
    if not calls:
        raise UnavailableError(f"{name} ignores the attention that qbench sets")
    off = difference(ours, logits)
    if off > rounding_tolerance(model):
        raise UnavailableError(
            f"qbench's attention changes the logits of {name} by {off:.2g} of their size: its own "
            f"attention computes something that qbench's does not"
        )


def difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖logits − expected‖ / ‖expected‖ of the median token of [B, T, V]: rounding that sends
    single tokens to another expert moves those far."""
    return float(((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def rounding_tolerance(model: PreTrainedModel) -> float:
    """Return the ``difference`` that rounding makes between two ways to compute ``model``: large if
    it rounds activations to few bits, where a value near the border of two codes moves by one."""
    if getattr(model, ROUNDS_ACTIVATIONS, False):
        return OURS_OF_FEW_BITS
    most = NOISE.get(model.dtype, OURS_OF_HALF)
    return most if model.device.type == "cpu" else max(most, OURS_ON_GPU)
