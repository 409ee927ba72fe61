"""Analyze one cell: load, quantize, audit, then one pass over the text, or one per layer alone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from qbench.analysis.analyze_run import AnalysisResult, AnalysisSettings
from qbench.analysis.attention_weights import attention_maps, choose_heads
from qbench.analysis.measure import measure
from qbench.analysis.sensitivity import Baseline, Unit, units
from qbench.cell import as_measured, free, load, load_original, quantized
from qbench.checkpoints.tokenizer import load_tokenizer
from qbench.errors import DataError, UnavailableError
from qbench.files import cache_folder, digest
from qbench.quantizers.linear import linearize, linears
from qbench.records import AnalyzedText, Sensitivity

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAVE_EVERY = 20.0  # seconds between two records of an unfinished sensitivity


def compute(work: AnalysisResult) -> None:
    """Analyze the cell of ``work`` and store the measurements there. If its folder
    ``work.analyses`` holds sensitivities, quantize one layer at a time, else measure at once."""
    (_sensitivity if work.analyses.kind is Sensitivity else _measure)(work)


def _measure(work: AnalysisResult) -> None:
    """Measure everything in one pass over the text."""
    model, tokenizer, ids = _load(work)
    of, plan, settings = work.cell, work.plan, work.settings
    if of.copy is not None and not of.without_baseline:  # whose library may have layers of its own
        model = load_original(of, plan)
    linearize(model)  # GPT-2's Conv1D too; other models stay as they are
    names = list(linears(model))
    if of.quantization.precision.quantized:
        del model
        free(plan.device)
        model = load(of, plan)
        model = quantized(work, model, tokenizer, cache_folder())
    with work.stage("analyze", len(ids)):
        measured = measure(
            model,
            ids,
            tokenizer=tokenizer,
            linears=names,
            batch=settings.batch,
            progress=work.advance,
        )
        maps = attention_maps(model, tokenizer, ids[0], choose_heads(measured))
    work.contents["measured"] = measured.model_copy(update={"maps": maps})


def _sensitivity(work: AnalysisResult) -> None:
    """Quantize one linear layer, or one decoder layer, at a time, and then all."""
    changed, tokenizer, ids = _load(work)
    of, plan, settings = work.cell, work.plan, work.settings
    changed = quantized(work, changed, tokenizer, cache_folder())
    rescaled = work.audit is not None and work.audit.rescaled > 0
    if rescaled and not settings.blocks:
        raise UnavailableError(
            f"{of.label}: its layers cannot be exchanged one at a time, since factors of their "
            "columns were moved into the layer before (as by AWQ); add --blocks"
        )
    model = load_original(of, plan)
    linearize(model)  # as quantizing did: GPT-2's Conv1D, fused experts
    names = list(linears(model, of.quantization.ignore))
    layer_units = units(model, names, blocks=settings.blocks, with_norms=rescaled)
    together = [unit.name for unit in layer_units] if rescaled else names
    done = {unit.name: unit for unit in work.contents.get("units", ())}
    with work.stage("sensitivity", len(layer_units)):
        base = Baseline(model, ids, batch=settings.batch)
        work.contents["perplexity"] = base.perplexity
        saved = time.monotonic()
        for index, unit in enumerate(layer_units):
            if unit.name not in done:
                done[unit.name] = base.against(unit, changed)
                work.contents["units"] = tuple(done.values())
            work.advance(index + 1, len(layer_units))
            if time.monotonic() - saved > SAVE_EVERY:
                work.put("unfinished", None)
                saved = time.monotonic()
        all_units = Unit(name="all", layer=None, modules=tuple(together))
        work.contents["together"] = base.against(all_units, changed)


def _load(work: AnalysisResult) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Tensor]:
    """Return the unquantized model, its tokenizer, and the ids [N, T] of the texts."""
    with work.stage("load"):
        tokenizer = load_tokenizer(work.cell.checkpoint)
        model = load(work.cell, work.plan)
        work.cell = as_measured(work.cell, work.plan, model, [])
        if not hasattr(model, "forward"):
            raise UnavailableError(
                f"{work.cell.label} runs outside transformers, where activations cannot be "
                "measured; leave it out with --only"
            )
        ids, work.contents["text"] = read_tokens(work.settings, tokenizer)
    return model, tokenizer, ids


def read_tokens(
    settings: AnalysisSettings, tokenizer: PreTrainedTokenizerBase
) -> tuple[Tensor, AnalyzedText]:
    """Return ids [N, T] int64 of the first texts that are long enough, at most
    ``settings.samples``, and their description. Each row is BOS, if ``settings.bos``, and the
    text's first tokens. No text is joined with another. Raises DataError if no text is long enough,
    or if the tokenizer lacks the BOS."""
    if settings.bos and tokenizer.bos_token_id is None:
        raise DataError("the tokenizer has no BOS token to begin a text with; add --no-bos")
    begin = [tokenizer.bos_token_id] if settings.bos else []
    room = settings.length - len(begin)
    rows: list[list[int]] = []
    short = longest = 0
    for text in settings.source.texts():
        if len(rows) == settings.samples:
            break
        # verbose=False: texts longer than the model's context are no mistake here
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        longest = max(longest, len(ids))
        if len(ids) >= room:
            rows.append(begin + list(ids[:room]))
        else:
            short += 1
    if not rows:
        raise DataError(
            f"{settings.source.name}: its longest text has {longest} tokens, {room} are needed; "
            "lower --length"
        )
    ids = torch.tensor(rows, dtype=torch.int64)
    return ids, AnalyzedText(
        source=settings.source.name,
        digest=settings.source.digest,
        tokens=digest(ids.numpy().astype("<i8").tobytes()),
        samples=len(rows),
        left_out=short,
        length=settings.length,
        bos=settings.bos,
    )
