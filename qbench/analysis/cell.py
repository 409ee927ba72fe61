"""One cell's analysis → its record: load, quantize, audit, then one pass over the text, or over it
with one linear layer quantized at a time."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from qbench.analysis.attention import attention_maps, choose
from qbench.analysis.measure import measure
from qbench.analysis.run import AnalysisCell
from qbench.analysis.sensitivity import Baseline, Unit, units
from qbench.analysis.text import read_tokens
from qbench.cache import cache_folder
from qbench.cell import free, load, load_original, one_line, quantized
from qbench.cell_result import CellResult
from qbench.errors import UnavailableError
from qbench.machine import environment, measured, redirected
from qbench.plan import Plan
from qbench.progress import Progress
from qbench.quantizers.linear import linearize, linears
from qbench.records import Analysis, AnalyzedText, Measured, Sensitivity, UnitSensitivity
from qbench.store import Analyses

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAVE_EVERY = 20.0  # seconds between two records of an unfinished sensitivity
TOGETHER = "all"


def analyze(
    cell: AnalysisCell,
    plan: Plan,
    analyses: Analyses,
    progress: Progress,
    before: Analysis | Sensitivity | None = None,
) -> Analysis | Sensitivity:
    """Analyze one cell and put the record into its place, whether it worked or not. A sensitivity
    goes on from the units that the record ``before`` has."""
    work = Work(cell=cell, plan=plan, analyses=analyses, progress=progress)
    if isinstance(before, Sensitivity):
        done = [*before.units, *([before.together] if before.together else [])]
        work.units = {one.name: one for one in done}
    log, error = analyses.log(cell.grid_cell), None
    with redirected(log):
        try:
            (work.sensitivity if analyses.kind is Sensitivity else work.measure)()
        except Exception as problem:
            traceback.print_exc()
            error = one_line(problem, log)
        finally:
            free(plan.device)
    return work.put("failed" if error else "ok", error)


@dataclass(kw_only=True, slots=True)
class Work:
    """What is known so far of a cell that is analyzed."""

    cell: AnalysisCell
    plan: Plan
    analyses: Analyses
    progress: Progress
    result: CellResult = field(default_factory=lambda: CellResult(started=datetime.now(UTC)))
    text: AnalyzedText | None = None
    measured: Measured | None = None
    perplexity: float | None = None
    units: dict[str, UnitSensitivity] = field(default_factory=dict)

    def measure(self) -> None:
        """One pass over the text."""
        of, plan, settings, name = self.cell.cell, self.plan, self.cell.settings, self.cell.name
        model, tokenizer, ids = self._load()
        if of.copy is not None and not of.alone:  # whose library may have layers of its own
            model = load_original(of, plan)
        linearize(model)  # GPT-2's Conv1D too; other models stay as they are
        names = list(linears(model))
        if of.quantization.precision.quantized:
            del model
            free(plan.device)
            model, tokenizer = load(of, plan)
            model = quantized(
                of, plan, model, tokenizer, self.result, self.progress, cache_folder()
            )
        self.progress.stage(name, "analyze", total=len(ids))
        with measured("analyze", plan.device, self.result.stages):
            found = measure(
                model,
                ids,
                tokenizer=tokenizer,
                linears=names,
                batch=settings.batch,
                progress=lambda done, total: self.progress.advance(name, done, total),
            )
            heads = choose(found) if settings.heads is None else settings.heads
            maps = attention_maps(model, tokenizer, ids[0], heads)
        self.measured = found.model_copy(update={"maps": maps})

    def sensitivity(self) -> None:
        """One linear layer, or decoder layer, quantized at a time, and then all."""
        of, plan, settings, name = self.cell.cell, self.plan, self.cell.settings, self.cell.name
        changed, tokenizer, ids = self._load()
        changed = quantized(
            of, plan, changed, tokenizer, self.result, self.progress, cache_folder()
        )
        rescaled = self.result.audit is not None and self.result.audit.rescaled > 0
        if rescaled and not settings.blocks:
            raise UnavailableError(
                f"{of.label}: factors of its columns are in the layer before (as AWQ puts them), "
                "so no linear layer can be put into the original alone; add --blocks"
            )
        model = load_original(of, plan)
        linearize(model)  # as quantizing did: GPT-2's Conv1D, fused experts
        names = list(linears(model, of.quantization.ignore))
        wanted = units(model, names, blocks=settings.blocks, whole=rescaled)
        together = [unit.name for unit in wanted] if rescaled else names
        wanted.append(Unit(name=TOGETHER, layer=None, modules=tuple(together)))
        self.progress.stage(name, "sensitivity", total=len(wanted))
        with measured("sensitivity", plan.device, self.result.stages):
            base = Baseline(model, ids, batch=settings.batch)
            self.perplexity = base.perplexity
            saved = time.monotonic()
            for index, unit in enumerate(wanted):
                if unit.name not in self.units:
                    self.units[unit.name] = base.against(unit, changed)
                self.progress.advance(name, index + 1, len(wanted))
                if time.monotonic() - saved > SAVE_EVERY:
                    self.put("unfinished", None)
                    saved = time.monotonic()

    def put(
        self, status: Literal["ok", "unfinished", "failed"], error: str | None
    ) -> Analysis | Sensitivity:
        """Write the record of what is known."""
        cell, of = self.cell, self.cell.cell
        stated: dict[str, Any] = {
            "key": cell.key,
            "key_parts": cell.key_parts,
            "checkpoint": of.checkpoint_name,
            "quantizer": of.label,
            "method": of.quantization.method,
            "title": of.quantization.title,
            "precision": of.quantization.precision,
            "normalizer": of.checkpoint.normalizer,
            "status": status,
            "error": error,
            "text": self.text,
            "stages": tuple(self.result.stages),
            "environment": environment(
                self.plan.device, of.quantization.requirements, self.plan.hardware
            ),
            "started": self.result.started,
            "finished": datetime.now(UTC),
        }
        record: Analysis | Sensitivity
        if self.analyses.kind is Sensitivity:
            record = Sensitivity(
                **stated,
                unit="block" if cell.settings.blocks else "linear",
                perplexity=self.perplexity,
                together=self.units.get(TOGETHER),
                units=tuple(one for name, one in self.units.items() if name != TOGETHER),
            )
        else:
            attention = f"{of.checkpoint.normalizer}/{of.attention}"
            record = Analysis(**stated, attention=attention, measured=self.measured)
        self.analyses.put(record)
        return record

    def _load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Tensor]:
        """The unquantized model, its tokenizer, and the ids [N, T] of the texts."""
        self.progress.stage(self.cell.name, "load")
        with measured("load", self.plan.device, self.result.stages):
            model, tokenizer = load(self.cell.cell, self.plan)
            if not hasattr(model, "forward"):
                raise UnavailableError(
                    f"{self.cell.cell.label} runs outside transformers, where a model's inside "
                    "cannot be measured; leave it out with --only"
                )
            ids, self.text = read_tokens(self.cell.settings, tokenizer)
        return model, tokenizer, ids
