"""A checkpoint that somebody quantized, loaded by transformers' own quantizer of its format."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from qbench.checkpoints import fla
from qbench.checkpoints.checks import own_logits, require_causal
from qbench.checkpoints.find import Checkpoint, stamps
from qbench.checkpoints.load import set_attention
from qbench.errors import CheckpointError, UnavailableError, first_line

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def load_prequantized(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: str,
    attention: str,
    dequantize: bool,
) -> PreTrainedModel:
    """The quantized model on ``device``, what is not quantized in ``dtype``, attending with the
    checkpoint's normalizer through ``attention`` (see ``load.load_model``). ``dequantize``: FP8
    weights are, at once; MXFP4 weights always.

    Raises UnavailableError for what this machine cannot load, CheckpointError for broken files.
    """
    stated = checkpoint.config["quantization_config"]
    if stamps(checkpoint.folder) != checkpoint.files:
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: its files changed after this run began; run again"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries warn of what a plan has said already
            model, report = AutoModelForCausalLM.from_pretrained(
                checkpoint.folder,
                dtype=dtype,
                device_map={"": device},
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **_loading(stated, dequantize),
            )
            model = model.eval().requires_grad_(False)
            for module in model.modules():  # bitsandbytes repacks for AVX512-BF16, wrongly
                if hasattr(module, "support_avx512bf16_for_cpu"):
                    module.support_avx512bf16_for_cpu = False
            logits = own_logits(model)  # compressed-tensors decompresses in the first forward
    except Exception as error:  # whatever a library makes of files, devices and versions
        raise UnavailableError(
            f"checkpoint {checkpoint.source}: transformers cannot load this "
            f"{stated.get('quant_method')} checkpoint here: {first_line(error)}"
        ) from error
    if missing := sorted(map(str, report.get("missing_keys") or ())):
        if stated["quant_method"] in ("awq", "gptq") and all(".experts." in n for n in missing):
            raise UnavailableError(
                f"checkpoint {checkpoint.source}: transformers 5 keeps this model's experts as one "
                f"tensor and loads none from {stated['quant_method']} files; compressed-tensors, "
                "fp8 and mxfp4 copies load"
            )
        raise CheckpointError(
            f"checkpoint {checkpoint.source}: its files lack {', '.join(missing[:6])}"
        )
    if not logits.isfinite().all():
        raise CheckpointError(f"checkpoint {checkpoint.source}: its logits are not finite")
    require_causal(model, logits)
    set_attention(model, checkpoint.normalizer, attention)
    return model


def _loading(stated: dict[str, Any], dequantize: bool) -> dict[str, Any]:
    """What transformers is told beside the files. GPTQ's and AWQ's automatic kernels differ by
    machine, and on CPUs some repack weights wrongly, so the one in torch is named."""
    method = stated.get("quant_method")
    if method == "gptq":
        chosen = transformers.GPTQConfig(bits=stated["bits"], backend="gptq_torch")
    elif method == "awq":
        chosen = transformers.AwqConfig(bits=stated["bits"], backend="torch_awq")
    elif method == "fp8" and dequantize:
        chosen = transformers.FineGrainedFP8Config(dequantize=True)
    elif method == "mxfp4":  # it rounds no activations, so that products are the same
        chosen = transformers.Mxfp4Config(dequantize=True)
    else:
        return {}
    return {"quantization_config": chosen}


def without_weights(checkpoint: Checkpoint) -> PreTrainedModel:
    """The checkpoint's class of transformers with its settings, on no device: what says how another
    runtime's model is to be asked."""
    if fla.recognizes(checkpoint.config):
        config = AutoConfig.for_model(**fla.llama_settings(checkpoint.config))
    else:
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if (checkpoint.folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(checkpoint.folder)
    return model.eval()
