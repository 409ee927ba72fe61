"""Load the model of a finished cell again, on the machine that measured it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from qbench.cache import find_sources
from qbench.cell import calibration_of, load_copy
from qbench.checkpoints import find
from qbench.checkpoints.load import load_model
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import ResultsError
from qbench.made_copy import with_made_copy
from qbench.plan import Cell
from qbench.quantizers.audit.weights import digest
from qbench.quantizers.methods.library_made import LibraryMade
from qbench.quantizers.quantize import evidence_of, quantize
from qbench.quantizers.registry import config_of_record
from qbench.quantizers.texts import CalibrationText
from qbench.records import Record
from qbench.store import Store, run_id

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class MeasuredCell:
    """A finished cell and its model. ``how``: how the quantized weights were obtained."""

    record: Record
    cell: Cell
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    how: str


def load_measured(store: Store, record: Record, cache: Path, device: str) -> MeasuredCell:
    """Return the finished cell of ``record`` with its model on ``device``.

    Quantized weights come from the cache, or are computed again; either way those of layers must be
    the ones that were audited. Raises ResultsError if this machine did not run the cell, or if
    checkpoint, calibration text or weights are others now.
    """
    name, parts = record.cell, record.key_parts
    sources = find_sources(cache, run_id(store.manifest()))
    if record.checkpoint not in sources.checkpoints:
        raise ResultsError(f"{name}: this machine did not run it, so where its checkpoint lies is "
                           "not known; run it here")  # fmt: skip
    checkpoint = find(str(sources.checkpoints[record.checkpoint]))
    if checkpoint.digest != parts["weights"]:
        raise ResultsError(f"{name}: {checkpoint.folder} holds other weights now")
    text = parts.get("calibration")
    cell = Cell(
        checkpoint_name=record.checkpoint,
        checkpoint=replace(checkpoint, normalizer=record.normalizer),
        label=record.quantizer,
        quantization=config_of_record(parts["quantizer"]),
        attention=parts["attention"],
        calibration=text and _text(sources.calibration, text),
        key=record.key,
        key_parts=parts,
        scoring=None,  # nothing is scored
        base=None,
    )
    if cell.runtime != "transformers":
        raise ResultsError(f"{name}: {cell.runtime} runs it, not transformers")
    tokenizer = load_tokenizer(checkpoint)
    calibration = calibration_of(cell, tokenizer)
    if isinstance(cell.quantization.weights, LibraryMade):
        cell, how = with_made_copy(cell, calibration, cache, device)
        model = load_copy(cell, device, fallback=True)
    elif cell.quantization.weights is not None and cell.quantization.weights.prequantized:
        raise ResultsError(f"{name}: it is a published copy already")
    else:
        model = load_model(
            cell.checkpoint,
            dtype=getattr(torch, cell.quantization.compute_dtype),
            device=device,
            attention=cell.attention,
        )
        model, how = quantize(
            model,
            cell.quantization,
            calibration=calibration,
            digest=checkpoint.digest,
            artifacts=cache / "artifacts",
            normalizer_source=parts.get("normalizer source"),
        )
        _require_audited(record, model, cell.quantization)
    return MeasuredCell(record=record, cell=cell, model=model, tokenizer=tokenizer, how=how)


def _text(path: Path | None, text: dict[str, Any]) -> CalibrationText:
    assert path is not None, "a run with calibrated cells keeps the path of their text"
    return CalibrationText(
        path=path, digest=text["text"], samples=text["samples"], length=text["length"],
        seed=text["seed"], bos=text.get("bos", False),
    )  # fmt: skip


def _require_audited(record: Record, model: PreTrainedModel, config: Any) -> None:
    """Raise ResultsError if the weights of ``model`` are not those that ``record`` audited."""
    audited = (
        {module.name: module.digest for module in record.audit.modules} if record.audit else {}
    )
    stored = evidence_of(model, config, "weights")
    other = [name for name in audited if digest(stored[name]().tensors) != audited[name]]
    if other:
        raise ResultsError(f"{record.cell}: {len(other)} layers are not the audited ones, such as "
                           f"{other[0]}: libraries or code changed; run it again")  # fmt: skip
