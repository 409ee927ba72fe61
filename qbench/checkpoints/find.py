"""From what the user named to a Checkpoint that can be loaded. Imports no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from qbench import hub
from qbench.attention.implementation import NATIVE
from qbench.attention.normalizers import NORMALIZERS
from qbench.checkpoints import flash_linear_attention as fla
from qbench.checkpoints.checkpoint import Checkpoint
from qbench.checkpoints.classes import class_normalizer
from qbench.checkpoints.config import read_config, read_json, require_sizes
from qbench.checkpoints.files import READ, digest, stamps
from qbench.checkpoints.parameters import parameter_shapes, require_present
from qbench.checkpoints.weights import (
    INDEX,
    SINGLE,
    Header,
    compare_shapes,
    elements,
    read_headers,
)
from qbench.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
FROM_HUB = ("model*.safetensors", *READ)


def find(
    source: str,
    *,
    revision: str | None = None,
    normalizer: str | None = None,
    base: Path | None = None,
) -> Checkpoint:
    """Resolve ``source``, a folder (relative to ``base``) or a hub id, and check its headers.

    ``normalizer`` is what the recipe states; it must agree with the checkpoint's own.
    Raises CheckpointError, naming left-over, missing and misshapen tensors.
    """
    folder = _folder(source, revision, base or Path())
    try:
        return _found(source, folder, normalizer)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {source}: {error}") from None


def _found(source: str, folder: Path, normalizer: str | None) -> Checkpoint:
    config = read_config(folder)
    headers = read_headers(folder)
    require_sizes(config, tensors=len(headers), elements=elements(headers))
    stated = _normalizer(config, normalizer)
    if fla.recognizes(config):
        _require_tensors(config, headers, stated)
    else:
        require_present(stated, headers)
        if files := sorted({h.file for h in headers.values()} - {SINGLE}):
            _require_shards(folder, files)
    if (folder / "generation_config.json").exists():
        read_json(folder / "generation_config.json")
    return Checkpoint(
        source=source,
        folder=folder,
        format="flash-linear-attention" if fla.recognizes(config) else "transformers",
        normalizer=stated,
        config=config,
        digest=digest(folder),
        files=stamps(folder),
    )


def _require_tensors(config: dict[str, Any], headers: dict[str, Header], normalizer: str) -> None:
    settings = fla.llama_settings(config)
    found = fla.llama_shapes({name: header.shape for name, header in headers.items()})
    expected = fla.expected_shapes(settings)
    expected |= parameter_shapes(
        normalizer, fla.attention_modules(settings), settings["num_attention_heads"], found
    )
    if settings["tie_word_embeddings"] and fla.HEAD in found:
        # a second copy of the embeddings; that it is one is checked when the weights are read
        expected[fla.HEAD] = expected[fla.EMBEDDINGS]
    compare_shapes(found, expected)


def _require_shards(folder: Path, files: list[str]) -> None:
    if not (folder / INDEX).exists():
        raise CheckpointError(
            f"{files[0]}: transformers reads {SINGLE}, or the files that {INDEX} lists; rename it "
            "or move it out of the folder"
        )


def _folder(source: str, revision: str | None, base: Path) -> Path:
    try:
        path = (base / Path(source).expanduser()).resolve()
        is_folder = path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"checkpoint {_shown(source)}: it names no folder ({_shown(str(reason))}), and it is "
            "no hub id (owner/name)"
        ) from None
    if is_folder and revision is not None:
        raise CheckpointError(
            f"checkpoint {source}: a folder has no revisions, and the recipe says revision: "
            f"{revision}; leave it out, or name a hub id"
        )
    if is_folder:
        return path
    if HUB_ID.fullmatch(source):
        return hub.snapshot(source, revision, FROM_HUB)
    raise CheckpointError(
        f"checkpoint {_shown(source)}: no such folder ({_shown(str(path))}), and not a hub id "
        "(owner/name)"
    )


def _shown(text: str, at_most: int = 200) -> str:
    """``text`` as a terminal can show it: escaped where it is not printable, and not endless."""
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= at_most else f"{text[:at_most]}…"


def _normalizer(config: dict[str, Any], stated: str | None) -> str:
    own = config.get("qbench_normalizer")
    if own is not None and not (isinstance(own, str) and own in NORMALIZERS):
        known = ", ".join(NORMALIZERS)
        raise CheckpointError(f"qbench_normalizer {own!r} is not known; known: {known}")
    if fla.recognizes(config):
        own = _of_attention(config, own, stated)
    by_class = class_normalizer(config)
    own = own or by_class
    if stated == NATIVE and own == by_class:
        return NATIVE
    if stated not in (None, own):
        raise CheckpointError(
            f"it was trained with {own}, the recipe says normalizer: {stated}; "
            "leave normalizer out, or name the right checkpoint; qbench_normalizer in its "
            "config.json says how it was trained"
        )
    return own


def _of_attention(config: dict[str, Any], own: str | None, stated: str | None) -> str:
    """The normalizer that ``attn_impl`` names; without it, what the config or recipe states."""
    if config.get("attn_impl") is None:
        if own is None and stated not in ("softmax", NATIVE):
            raise CheckpointError(
                "config.json has no attn_impl, so it does not say its normalizer; if it was "
                "trained with softmax, let the recipe say normalizer: softmax; else write "
                "qbench_normalizer into its config.json"
            )
        return own or "softmax"
    by_format = fla.normalizer(config)
    if own not in (None, by_format):
        raise CheckpointError(
            f"its config contradicts itself: attn_impl {config['attn_impl']!r} is {by_format}, "
            f"qbench_normalizer is {own!r}"
        )
    return by_format
