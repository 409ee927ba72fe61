"""The quantized copy of a checkpoint that a recipe's column names: found, and held against its
original as far as its files can be without loading them. Imports no torch."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from qbench import hub
from qbench.attention.implementation import NATIVE
from qbench.checkpoints import Checkpoint, find
from qbench.checkpoints.find import HUB_ID, SIZES, Shapes, read_headers
from qbench.checkpoints.fla import in_transformers_words
from qbench.errors import CheckpointError, RecipeError, first_line, validation_line
from qbench.files import file_digest
from qbench.quantizers import gguf_file
from qbench.quantizers.config import QuantizationConfig
from qbench.quantizers.prequantized import FORMATS, REFUSED, Prequantized, Published, parents

FLOATS = ("F64", "F32", "F16", "BF16")
EXPERTS = re.compile(r"\.(experts|block_sparse_moe\.(in|out)put_linear)\.")  # and GraniteMoE's
GGUF = "gguf"  # a file that llama.cpp runs, not transformers


def find_copy(
    config: QuantizationConfig,
    name: str,
    original: Checkpoint,
    shapes: Shapes,
    device: str,
) -> tuple[QuantizationConfig, Checkpoint | None]:
    """``config``; where its weights are ``Published``, what the files of the checkpoint ``name``
    say stands in their place, and these files come along. ``original``: the unquantized checkpoint,
    or, where the column has no path, the quantized one itself. Raises QbenchError for what cannot
    be.
    """
    weights = config.weights
    if not isinstance(weights, Published):
        return config, None
    source = weights.source(name)
    if source is not None and source.endswith(".gguf"):
        copy = _gguf(source, original)
    else:
        copy = original if source is None else find(source, quantized=True)
    stated = copy.config.get("quantization_config", {})
    kind = str(stated.get("quant_method", ""))
    if kind not in FORMATS:
        why = REFUSED.get(kind, f"known formats: {', '.join(FORMATS)}")
        raise CheckpointError(f"checkpoint {copy.source}: quant_method {kind!r}: {why}")
    if source is not None:
        copy = replace(copy, normalizer=_normalizer(copy, original))
        _require_sizes(copy, original)
        _require_tokens(copy, original)
    found = Prequantized(
        path=weights.path,
        compute_dtype=weights.compute_dtype,
        format=kind,
        stated=stated,
        digest=copy.digest,
        folder=str(copy.folder),
        device=device,
        ignore=() if kind == GGUF else _unquantized(copy, shapes),
    )
    try:
        _ = found.scheme
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        invalid = isinstance(error, ValidationError)
        why = validation_line(error) if invalid else f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(
            f"checkpoint {copy.source}: its quantization_config is none that {kind} writes ({why})"
        ) from None
    return replace(config, weights=found), copy


def _gguf(source: str, original: Checkpoint) -> Checkpoint:
    """A GGUF file, of a folder or of the hub (owner/name/FILE.gguf). llama.cpp's attention is its
    own, so a model that is not softmax's cannot run there."""
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
        digest=file_digest(path),
        files=((path.name, stat.st_size, stat.st_mtime_ns),),
    )


def _unquantized(copy: Checkpoint, shapes: Shapes) -> tuple[str, ...]:
    """Layers of ``shapes`` that the files hold as they were. Raises CheckpointError for all."""
    headers = read_headers(copy.folder, quantized=True)
    kept: dict[str, list[str]] = {name: [] for name in shapes}
    for full, header in headers.items():
        owner = next((name for name in parents(full) if name in kept), None)
        part = full.removeprefix(f"{owner}.")
        if owner is not None and part != "bias":
            kept[owner].append(part if part == "weight" and header.dtype in FLOATS else "")
    experts = [
        h.dtype in FLOATS for n, h in headers.items() if EXPERTS.search(n) and "bias" not in n
    ]
    plain = tuple(name for name, parts in kept.items() if parts == ["weight"])
    if shapes and len(plain) == len(shapes):
        raise CheckpointError(
            f"checkpoint {copy.source}: its config.json says that it is quantized, but its files "
            "hold unquantized weights"
        )
    return (*plain, "experts") if experts and all(experts) else plain


def _normalizer(copy: Checkpoint, original: Checkpoint) -> str:
    """The original's, which a library's copy of config.json may have lost."""
    own = copy.config.get("qbench_normalizer")
    if own not in (None, original.normalizer):
        raise CheckpointError(
            f"checkpoint {copy.source}: it was trained with {own}, and {original.source} with "
            f"{original.normalizer}: it is another model"
        )
    return original.normalizer


def _require_sizes(copy: Checkpoint, original: Checkpoint) -> None:
    wanted, found = (in_transformers_words(one.config) for one in (original, copy))
    for size in SIZES:
        if None not in (wanted.get(size), found.get(size)) and wanted[size] != found[size]:
            raise RecipeError(
                f"checkpoint {copy.source}: {size} {found[size]}, and {original.source} has "
                f"{wanted[size]}: it is no quantized copy of it"
            )


def _require_tokens(copy: Checkpoint, original: Checkpoint) -> None:
    """Raise RecipeError where the copy has a tokenizer of its own that cuts texts otherwise: it is
    scored with the original's."""
    own, theirs = (one.folder / "tokenizer.json" for one in (copy, original))
    if not own.is_file() or (theirs.is_file() and own.read_bytes() == theirs.read_bytes()):
        return
    from qbench.checkpoints.tokenizer import other_tokens  # imports transformers

    other = other_tokens(copy, original, special=(False,))
    if other is not None:
        text, found, wanted = other
        raise RecipeError(
            f"checkpoint {copy.source}: its tokenizer makes {found} of {text}, and "
            f"{original.source}'s {wanted}: who uses the copy gets other tokens than those that "
            "would be scored; take its tokenizer files out of its folder to score its weights alone"
        )
