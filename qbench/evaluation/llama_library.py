"""The C functions of llama.cpp that qbench calls, from the wheel of ``xllamacpp``.

The wheel's library exports llama.cpp's C interface. The structures below are those of this very
build (llama.h of b11549), so its version is pinned: another build lays them out differently.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_size_t, c_uint32, c_void_p
from importlib import metadata, util
from pathlib import Path
from typing import Any

from qbench.errors import UnavailableError

VERSION = "2026.10.11549"
INSTALL = "pip install -e '.[llamacpp]'"
GGML_TYPE_F32 = 0
FLASH_ATTN_DISABLED = 0
LOG_LEVEL_ERROR = 4
LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)


class ModelParams(ctypes.Structure):
    """``struct llama_model_params``."""

    _fields_ = (
        ("devices", c_void_p), ("tensor_buft_overrides", c_void_p), ("n_gpu_layers", c_int32),
        ("split_mode", c_int32), ("load_mode", c_int32), ("lazy_mode", c_int32),
        ("main_gpu", c_int32), ("tensor_split", c_void_p), ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p), ("kv_overrides", c_void_p),
        ("vocab_only", c_bool), ("check_tensors", c_bool), ("use_extra_bufts", c_bool),
        ("no_host", c_bool), ("no_alloc", c_bool), ("load_mtp", c_bool),
    )  # fmt: skip


class ContextParams(ctypes.Structure):
    """``struct llama_context_params``."""

    _fields_ = (
        ("n_ctx", c_uint32), ("n_batch", c_uint32), ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32), ("n_rs_seq", c_uint32), ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32), ("n_threads", c_int32), ("n_threads_batch", c_int32),
        ("ctx_type", c_int32), ("rope_scaling_type", c_int32), ("pooling_type", c_int32),
        ("attention_type", c_int32), ("flash_attn_type", c_int32), ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float), ("yarn_ext_factor", c_float), ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float), ("yarn_beta_slow", c_float), ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float), ("cb_eval", c_void_p), ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32), ("type_v", c_int32), ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p), ("abort_callback_data", c_void_p), ("embeddings", c_bool),
        ("offload_kqv", c_bool), ("no_perf", c_bool), ("op_offload", c_bool), ("swa_full", c_bool),
        ("kv_unified", c_bool), ("samplers", c_void_p), ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )  # fmt: skip


class Batch(ctypes.Structure):
    """``struct llama_batch``."""

    _fields_ = (
        ("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)), ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))), ("logits", POINTER(ctypes.c_int8)),
    )  # fmt: skip


SIGNATURES = {  # result, then arguments
    "llama_backend_init": (None,),
    "llama_model_default_params": (ModelParams,),
    "llama_model_load_from_file": (c_void_p, c_char_p, ModelParams),
    "llama_model_free": (None, c_void_p),
    "llama_model_get_vocab": (c_void_p, c_void_p),
    "llama_vocab_n_tokens": (c_int32, c_void_p),
    "llama_context_default_params": (ContextParams,),
    "llama_init_from_model": (c_void_p, c_void_p, ContextParams),
    "llama_free": (None, c_void_p),
    "llama_batch_init": (Batch, c_int32, c_int32, c_int32),
    "llama_batch_free": (None, Batch),
    "llama_get_memory": (c_void_p, c_void_p),
    "llama_memory_clear": (None, c_void_p, c_bool),
    "llama_memory_seq_rm": (c_bool, c_void_p, c_int32, c_int32, c_int32),
    "llama_decode": (c_int32, c_void_p, Batch),
    "llama_get_logits": (POINTER(c_float), c_void_p),
    "llama_log_set": (None, LogCallback, c_void_p),
    "ggml_quantize_chunk": (
        c_size_t, ctypes.c_int, c_void_p, c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64,
        c_void_p,
    ),
}  # fmt: skip


@functools.cache
def load_library() -> Any:
    """Return llama.cpp's library with its functions typed. Raises UnavailableError if the wheel is
    missing or of another version."""
    package = util.find_spec("xllamacpp")
    if package is None or package.origin is None:
        raise UnavailableError(f"llama.cpp: {INSTALL}")
    if (installed := metadata.version("xllamacpp")) != VERSION:
        raise UnavailableError(
            f"xllamacpp {installed}: qbench calls the structures of {VERSION} ({INSTALL})"
        )
    (path,) = Path(package.origin).parent.glob("xllamacpp*.so")
    library = ctypes.CDLL(str(path))
    for name, (result, *arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
