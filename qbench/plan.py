"""Recipe → Plan: every cell with its content key. Imports no torch, loads no model and no task.

A plan is made once and can be pickled: whoever runs a cell, in this process or on another host,
gets it as it is.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from qbench import __version__
from qbench.attention.implementation import NATIVE
from qbench.attention.normalizers import NORMALIZERS
from qbench.checkpoints import Checkpoint, find
from qbench.checkpoints.shapes import Shapes, linear_shapes
from qbench.code import code_digest
from qbench.errors import CheckpointError, CheckpointProblems, RecipeError
from qbench.evaluation.settings import ScoringSettings, resolve
from qbench.evaluation.tasks import TaskSpec
from qbench.machine.environment import hardware, versions
from qbench.plugins import Plugin, loaded
from qbench.preflight import (
    model_choices,
    refusal,
    require_bos,
    require_room,
    require_runnable,
    resolved,
)
from qbench.quantizers import QuantizationConfig
from qbench.quantizers.texts import CalibrationText
from qbench.recipe import Column, Recipe
from qbench.recipe_inputs import find_calibration, find_tasks
from qbench.records import Grid, GridCell


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One checkpoint × one quantizer, all its tasks."""

    checkpoint_name: str
    checkpoint: Checkpoint
    label: str  # of the quantizer in its recipe
    quantization: QuantizationConfig
    attention: str  # "reference" or "triton"; of a native checkpoint "sdpa" or "eager"
    scoring: ScoringSettings
    key: str
    key_parts: dict[str, Any]
    base: GridCell | None  # the unquantized cell that damage is taken against
    refusal: str | None = None  # why it can never run
    notes: tuple[str, ...] = ()  # what was chosen for this model that a user would not expect

    @property
    def name(self) -> str:
        return f"{self.checkpoint_name}/{self.label}"

    @property
    def grid_cell(self) -> GridCell:
        return GridCell(
            checkpoint=self.checkpoint_name,
            quantizer=self.label,
            method=self.quantization.method,
            title=self.quantization.title,
            precision=self.quantization.precision,
            key=self.key,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run is of: cells in order, unquantized ones first within a checkpoint."""

    recipe: Recipe
    device: str
    hardware: str | None  # the GPU's name; None on the CPU, where it is in no key
    tasks: tuple[TaskSpec, ...]
    calibration: CalibrationText | None
    cells: tuple[Cell, ...]
    skipped: tuple[str, ...] = ()  # tasks whose data are missing, where that is allowed
    plugins: tuple[Plugin, ...] = ()  # files that whoever unpickles the plan must load first
    _named: dict[str, Cell] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_named", {cell.name: cell for cell in self.cells})

    @property
    def grid(self) -> Grid:
        return Grid(
            name=self.recipe.name,
            checkpoints=self.recipe.compared,
            limit=self.recipe.evaluation.limit,
            quantizers=tuple(column.label for column in self.recipe.quantizers),
            tasks=tuple(task.name for task in self.tasks),
            skipped=self.skipped,
            cells=tuple(cell.grid_cell for cell in self.cells),
            replicates=self.recipe.groups,
        )

    def cell(self, name: str) -> Cell:
        """The cell ``<checkpoint>/<quantizer label>``; KeyError where there is none."""
        return self._named[name]

    def select(self, pattern: str | None) -> tuple[Cell, ...]:
        """Cells whose name matches the glob ``pattern``; RecipeError where none does."""
        chosen = set(select((cell.name for cell in self.cells), pattern))
        return tuple(cell for cell in self.cells if cell.name in chosen)


def cell_names(recipe: Recipe) -> list[str]:
    """What the cells of ``recipe`` will be called, before anything is planned."""
    return [f"{name}/{column.label}" for name in recipe.checkpoints for column in recipe.quantizers]


def select(names: Iterable[str], pattern: str | None) -> list[str]:
    """The ``names`` that match the glob ``pattern``; RecipeError where none does."""
    known = list(names)
    chosen = [name for name in known if pattern is None or fnmatch.fnmatch(name, pattern)]
    if not chosen:
        raise RecipeError(f"--only {pattern!r} matches no cell; the cells are {', '.join(known)}")
    return chosen


def plan(
    recipe: Recipe,
    *,
    device: str,
    gpu: str | None = None,
    only: str | None = None,
    show: bool = False,
) -> Plan:
    """Find the checkpoints, the tasks and their data, and give every cell its key.

    ``device`` is "cpu" or "cuda"; ``gpu`` the name of what other hosts compute on, None that of
    this host's; ``only`` a glob over the names of cells that are to run. Raises a QbenchError for
    what cannot work; for those of the cells that can never run, too, unless it is to ``show`` them.
    """
    checkpoints = _checkpoints(recipe)
    tasks, skipped = find_tasks(recipe, checkpoints.values())
    calibration = find_calibration(recipe)
    shared = {
        "tasks": {task.name: task.digest for task in tasks},
        "few-shot": {task.name: task.num_fewshot for task in tasks},
    }
    if device == "cuda" and gpu is None:
        gpu = hardware(device)
    cells: list[Cell] = []
    for name, checkpoint in checkpoints.items():
        require_bos(name, checkpoint, add_bos=recipe.evaluation.add_bos)
        shapes = linear_shapes(checkpoint)
        base = None
        for column in sorted(recipe.quantizers, key=_quantized):
            cell = _cell(
                name, checkpoint, shapes, column, recipe, device, gpu, calibration, shared, base
            )
            cells.append(cell)
            require_room(name, tasks, cell.scoring.max_length)
            if base is None and not _quantized(column) and recipe.evaluation.damage:
                base = cell.grid_cell
    found = Plan(
        recipe=recipe,
        device=device,
        hardware=gpu,
        tasks=tasks,
        skipped=skipped,
        calibration=calibration,
        cells=tuple(cells),
        plugins=loaded(),
    )
    if not show:
        require_runnable(found.select(only))
    return found


def _checkpoints(recipe: Recipe) -> dict[str, Checkpoint]:
    """Raises CheckpointProblems with all that cannot be read, not the first of them alone."""
    found: dict[str, Checkpoint] = {}
    problems: list[CheckpointError] = []
    for name, source in recipe.checkpoints.items():
        try:
            found[name] = find(
                source.path,
                revision=source.revision,
                normalizer=source.normalizer,
                base=recipe.folder,
            )
        except CheckpointError as error:
            problems.append(error)
            if not (recipe.folder / os.path.expanduser(source.path)).is_dir():
                break  # the hub: what ails one ails the next, after minutes
    if len(problems) > 1:
        raise CheckpointProblems(list(dict.fromkeys(map(str, problems))))
    for problem in problems:
        raise problem
    return found


def _quantized(column: Column) -> bool:
    return column.quantization.precision.quantized


def _cell(
    name: str,
    checkpoint: Checkpoint,
    shapes: Shapes,
    column: Column,
    recipe: Recipe,
    device: str,
    gpu: str | None,
    calibration: CalibrationText | None,
    shared: dict[str, Any],
    base: GridCell | None,
) -> Cell:
    quantization, chosen, reason = resolved(checkpoint, column.quantization, device)
    model = model_choices(name, checkpoint, recipe.evaluation, device)
    checkpoint, attention = model.checkpoint, model.attention
    scoring = resolve(
        recipe.evaluation,
        device=device,
        config=checkpoint.config,
        max_length=checkpoint.max_length,
        mixes_batches=not quantization.batch_invariant,
        amplifies_rounding=quantization.amplifies_rounding,
        fastest=model.fastest,
        slower=f"checkpoints.{name}: {model.slower}",
    )
    compiled = ("triton",) if attention == "triton" or device == "cuda" else ()
    parts: dict[str, Any] = {
        "weights": checkpoint.digest,
        "normalizer": checkpoint.normalizer,
        "quantizer": quantization.to_dict(),
        **shared,
        "scoring": scoring.key_parts(),
        "attention": attention,
        "device": device,
        "versions": {**versions((*quantization.requirements, *compiled)), "qbench": __version__},
        "code": code_digest(),
    }
    if checkpoint.normalizer != NATIVE:
        source = NORMALIZERS.get(checkpoint.normalizer).source
        if source is not None:
            parts["normalizer source"] = source
    if gpu is not None:
        parts["gpu"] = gpu
    if quantization.needs_calibration:
        assert calibration is not None, "Recipe refuses calibrated quantizers without calibration"
        parts["calibration"] = {
            "samples": calibration.samples,
            "length": calibration.length,
            "seed": calibration.seed,
            "text": calibration.digest,
            **({"bos": True} if calibration.bos else {}),
        }
    if base is not None:
        parts["damage against"] = base.key
    return Cell(
        base=base,
        checkpoint_name=name,
        checkpoint=checkpoint,
        label=column.label,
        quantization=quantization,
        attention=attention,
        scoring=scoring,
        key=content_key(parts),
        key_parts=parts,
        refusal=reason or refusal(checkpoint, shapes, quantization),
        notes=(
            *model.notes(scoring.mode, device),
            *([f"{column.label}: {chosen}"] if chosen else []),
        ),
    )


def content_key(parts: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON of ``parts``: 64 hexadecimal digits."""
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
