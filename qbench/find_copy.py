"""Find the quantized copy of a checkpoint that a recipe names, and compare its files with the
original's without loading them. Imports no torch."""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from qbench import hub
from qbench.attention.implementation import NATIVE
from qbench.checkpoints import Checkpoint, find
from qbench.checkpoints.find import FLOATS, HUB_ID, SIZES, Shapes
from qbench.checkpoints.fla import in_transformers_words
from qbench.errors import CheckpointError, RecipeError, some
from qbench.files import file_digest, kept_digest
from qbench.quantizers import gguf_file
from qbench.quantizers.config import QuantizationConfig
from qbench.quantizers.published import (
    GGUF,
    Published,
    PublishedCopy,
    loadable_methods,
    number_bits,
    parents,
)

EXPERTS = re.compile(r"\.(experts|block_sparse_moe\.(in|out)put_linear)\.")  # and GraniteMoE's
ENDS = re.compile(r"(^|\.)(\w*embed\w*|wte|lm_head)\.")


def find_copy(
    config: QuantizationConfig,
    name: str,
    original: Checkpoint,
    shapes: Shapes,
    device: str,
) -> tuple[QuantizationConfig, Checkpoint | None]:
    """Return ``config`` with what the files of the copy of checkpoint ``name`` say, and the copy;
    if its weights are not ``Published``, ``config`` as it is, and None.

    ``original``: the unquantized checkpoint, whose linear layers have ``shapes``; if the recipe
    names no path, the quantized one itself. Raises QbenchError if it is no copy of it.
    """
    weights = config.weights
    if not isinstance(weights, Published):
        return config, None
    source = weights.source(name)
    if source is not None and source.endswith(".gguf"):
        copy = _gguf(source, original)
    else:
        copy = original if source is None else find(source, quantized=True)
    quantization = copy.config.get("quantization_config", {})
    method = str(quantization.get("quant_method", ""))
    if method not in loadable_methods():
        raise CheckpointError(
            f"checkpoint {copy.source}: quant_method {method!r}: the installed transformers loads "
            f"{', '.join(loadable_methods())}"
        )
    bits: dict[str, float | None] = {"stored_bits": None, "fewest_bits": None}
    plain: tuple[str, ...] = ()
    if source is not None:
        copy = replace(copy, normalizer=_normalizer(copy, original))
        _require_sizes(copy, original)
        _require_tokens(copy, original)
        if method == GGUF:
            bits = dict(zip(bits, quantization["bits"], strict=True))
        else:
            bits, plain = _stored(copy, original, shapes)
    published = PublishedCopy(
        path=weights.path,
        compute_dtype=weights.compute_dtype,
        format=method,
        config=quantization,
        digest=copy.digest,
        folder=str(copy.folder),
        device=device,
        ignore=plain,
        ends_quantized=method == GGUF or _rounded_ends(copy),
        **bits,
    )
    return replace(config, weights=published), copy


def _gguf(source: str, original: Checkpoint) -> Checkpoint:
    """Return a GGUF file of a folder or of the hub (owner/name/FILE.gguf) as a checkpoint.
    llama.cpp's attention is its own, so only softmax models can run there."""
    path = Path(os.path.realpath(source))
    on_hub = re.fullmatch(rf"({HUB_ID.pattern})/([^/]+)", source)
    if not path.is_file() and on_hub:
        path = hub.snapshot(on_hub[1], None, (on_hub[2],)) / on_hub[2]
    if not path.is_file():
        raise CheckpointError(f"checkpoint {source}: no such file: {path}")
    if original.normalizer not in ("softmax", NATIVE):
        raise CheckpointError(
            f"checkpoint {source}: llama.cpp computes softmax, and {original.source} was trained "
            f"with {original.normalizer}"
        )
    about = gguf_file.describe(str(path))
    stat = path.stat()
    return Checkpoint(
        source=source,
        folder=path,
        normalizer=original.normalizer,
        config={**about["sizes"], "quantization_config": {"quant_method": GGUF, **about}},
        digest=kept_digest(path, file_digest),
        files=((path.name, stat.st_size, stat.st_mtime_ns),),
    )


def _stored(
    copy: Checkpoint, original: Checkpoint, shapes: Shapes
) -> tuple[dict[str, float | None], tuple[str, ...]]:
    """Return bits per weight of the quantized layers of ``copy``, over all and of the one with the
    fewest, and the layers that its files hold unquantized. Raises CheckpointError if they hold all
    unquantized."""
    bits: defaultdict[str, int] = defaultdict(int)
    rounded: set[str] = set()
    for full, header in copy.headers.items():
        if full.endswith("bias"):
            continue
        owner = next((name for name in parents(full) if name in shapes), None)
        if owner is None and EXPERTS.search(full):
            owner = "experts"
        if owner is not None:
            bits[owner] += math.prod(header.shape) * number_bits(header.dtype)
            plain = full.endswith("weight") and header.dtype in FLOATS
            rounded |= set() if plain else {owner}
    sizes = {name: rows * columns for name, (rows, columns) in shapes.items()}
    experts = [h for n, h in original.headers.items() if EXPERTS.search(n) and "bias" not in n]
    sizes["experts"] = sum(math.prod(header.shape) for header in experts)
    if bits and not rounded:
        raise CheckpointError(
            f"checkpoint {copy.source}: its config.json says that it is quantized, but its files "
            "hold unquantized weights"
        )
    each = {name: bits[name] / sizes[name] for name in rounded if sizes.get(name)}
    total = sum(sizes[name] for name in each)
    mean = sum(bits[name] for name in each) / total if total else None
    counted = {"stored_bits": mean, "fewest_bits": min(each.values(), default=None)}
    return counted, tuple(sorted(bits.keys() - rounded))


def _rounded_ends(copy: Checkpoint) -> bool:
    """Return whether embeddings or LM head are stored in other than floating-point numbers."""
    ends = [h for name, h in copy.headers.items() if ENDS.search(name) and "bias" not in name]
    return any(header.dtype not in FLOATS for header in ends)


def _normalizer(copy: Checkpoint, original: Checkpoint) -> str:
    """Return the original's normalizer, which a library's config.json may have lost."""
    by_copy = copy.config.get("qbench_normalizer")
    if by_copy not in (None, original.normalizer):
        raise CheckpointError(
            f"checkpoint {copy.source}: it was trained with {by_copy}, and {original.source} with "
            f"{original.normalizer}: it is another model"
        )
    return original.normalizer


def _require_sizes(copy: Checkpoint, original: Checkpoint) -> None:
    sizes, copied = (in_transformers_words(checkpoint.config) for checkpoint in (original, copy))
    for size in SIZES:
        if None not in (sizes.get(size), copied.get(size)) and sizes[size] != copied[size]:
            raise RecipeError(
                f"checkpoint {copy.source}: {size} {copied[size]}, and {original.source} has "
                f"{sizes[size]}: it is no quantized copy of it"
            )


def _require_tokens(copy: Checkpoint, original: Checkpoint) -> None:
    """Raise RecipeError if the copy has a tokenizer that may cut texts otherwise: it is scored with
    the original's."""
    theirs, ours = (checkpoint.folder / "tokenizer.json" for checkpoint in (copy, original))
    if not theirs.is_file() or (ours.is_file() and theirs.read_bytes() == ours.read_bytes()):
        return
    from qbench.checkpoints.tokenizer import other_rules, other_tokens  # imports transformers

    remedy = (
        "who uses the copy gets other tokens than those that would be scored; take its tokenizer "
        "files out of its folder to score its weights alone"
    )
    rules = other_rules(theirs, ours) if ours.is_file() else []
    if rules:
        raise RecipeError(
            f"checkpoint {copy.source}: its tokenizer has other {some(rules)} than "
            f"{original.source}'s: {remedy}"
        )
    other = other_tokens(copy, original)
    if other is not None:
        text, ids, expected = other
        raise RecipeError(
            f"checkpoint {copy.source}: its tokenizer makes {ids} of {text}, and "
            f"{original.source}'s {expected}: {remedy}"
        )
