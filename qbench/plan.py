"""Recipe → Plan: every cell with its content key. Loads tasks and headers, never weights."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qbench import __version__, hub
from qbench.attention.implementation import choose
from qbench.checkpoints import Checkpoint, find
from qbench.code import code_digest
from qbench.errors import DataError, RecipeError
from qbench.evaluation.settings import ScoringSettings, resolve
from qbench.evaluation.tasks import LoadedTask, expand, load_task
from qbench.quantizers import Quantizer
from qbench.recipe import HUB_FILE, CalibrationSource, Column, Recipe, Task
from qbench.record import Grid, GridCell
from qbench.running.environment import versions
from qbench.running.preflight import require_bos, require_room, require_texts


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One checkpoint × one quantizer, all its tasks."""

    checkpoint_name: str
    checkpoint: Checkpoint
    label: str  # of the quantizer in its recipe
    quantizer: Quantizer
    attention: str  # "reference" or "triton"
    scoring: ScoringSettings
    key: str
    key_parts: dict[str, Any]
    base: GridCell | None  # the unquantized cell that damage is taken against

    @property
    def name(self) -> str:
        return f"{self.checkpoint_name}/{self.label}"

    @property
    def place(self) -> GridCell:
        return GridCell(
            checkpoint=self.checkpoint_name,
            quantizer=self.label,
            method=self.quantizer.method,
            title=self.quantizer.title,
            precision=self.quantizer.precision,
            key=self.key,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a run is of: cells in order, unquantized ones first within a checkpoint."""

    recipe: Recipe
    device: str
    tasks: tuple[LoadedTask, ...]
    calibration: CalibrationSource | None  # its path resolved to a local file
    cells: tuple[Cell, ...]

    @property
    def grid(self) -> Grid:
        return Grid(
            name=self.recipe.name,
            checkpoints=tuple(self.recipe.checkpoints),
            quantizers=tuple(column.label for column in self.recipe.quantizers),
            tasks=tuple(task.name for task in self.tasks),
            cells=tuple(cell.place for cell in self.cells),
        )

    def select(self, pattern: str | None) -> tuple[Cell, ...]:
        """Cells whose name matches the glob ``pattern``; RecipeError where none does."""
        chosen = [c for c in self.cells if pattern is None or fnmatch.fnmatch(c.name, pattern)]
        if not chosen:
            known = ", ".join(cell.name for cell in self.cells)
            raise RecipeError(f"--only {pattern!r} matches no cell; the cells are {known}")
        return tuple(chosen)


def plan(recipe: Recipe, *, device: str) -> Plan:
    """Find the checkpoints, load the tasks, and give every cell its key."""
    definitions = recipe.resolve(recipe.definitions) if recipe.definitions else None
    data = recipe.resolve(recipe.data) if recipe.data else None
    checkpoints = {
        name: find(
            source.path,
            revision=source.revision,
            normalizer=source.normalizer,
            base=recipe.folder,
        )
        for name, source in recipe.checkpoints.items()
    }
    tasks = tuple(
        load_task(task, data=data, definitions=definitions)
        for task in _leaf_tasks(recipe.tasks, definitions)
    )
    calibration = _local_calibration(recipe)
    if calibration is not None:
        require_texts(Path(calibration.path))
    shared = {
        "tasks": {task.name: task.digest for task in tasks},
        "few-shot": {task.name: task.task.config.num_fewshot or 0 for task in tasks},
    }
    cells: list[Cell] = []
    for name, checkpoint in checkpoints.items():
        require_bos(name, checkpoint, add_bos=recipe.evaluation.add_bos)
        base = None
        for column in sorted(recipe.quantizers, key=_quantized):
            cell = _cell(name, checkpoint, column, recipe, device, calibration, shared, base)
            cells.append(cell)
            require_room(name, tasks, cell.scoring.max_length)
            if base is None and not _quantized(column) and recipe.evaluation.damage:
                base = cell.place
    return Plan(
        recipe=recipe, device=device, tasks=tasks, calibration=calibration, cells=tuple(cells)
    )


def _quantized(column: Column) -> bool:
    return column.quantizer.precision.quantized


def _cell(
    name: str,
    checkpoint: Checkpoint,
    column: Column,
    recipe: Recipe,
    device: str,
    calibration: CalibrationSource | None,
    shared: dict[str, Any],
    base: GridCell | None,
) -> Cell:
    quantizer = column.quantizer
    wanted = recipe.evaluation.attention
    attention = choose(checkpoint.normalizer, wanted, device)
    scoring = _scoring(recipe, checkpoint, quantizer, device)
    libraries = quantizer.requirements() + (("triton",) if attention == "triton" else ())
    parts: dict[str, Any] = {
        "weights": checkpoint.digest,
        "normalizer": checkpoint.normalizer,
        "quantizer": quantizer.settings,
        **shared,
        "scoring": scoring.key_parts(),
        "attention": attention,
        "device": device,
        "versions": {**versions(libraries), "qbench": __version__},
        "code": code_digest(),
    }
    if quantizer.needs_calibration:
        assert calibration is not None, "Recipe refuses calibrated quantizers without calibration"
        parts["calibration"] = {
            **calibration.model_dump(exclude={"path"}),
            "text": _file_digest(Path(calibration.path)),
        }
    if base is not None:
        parts["damage against"] = base.key
    return Cell(
        base=base,
        checkpoint_name=name,
        checkpoint=checkpoint,
        label=column.label,
        quantizer=quantizer,
        attention=attention,
        scoring=scoring,
        key=content_key(parts),
        key_parts=parts,
    )


def content_key(parts: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON of ``parts``: 64 hexadecimal digits."""
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _scoring(
    recipe: Recipe, checkpoint: Checkpoint, quantizer: Quantizer, device: str
) -> ScoringSettings:
    return resolve(
        recipe.evaluation,
        device=device,
        config=checkpoint.config,
        max_length=checkpoint.max_length,
        mixes_batches=quantizer.mixes_batches,
    )


def _leaf_tasks(tasks: tuple[Task, ...], definitions: Path | None) -> list[Task]:
    """Tasks with groups and tags opened into their members."""
    leaves = [
        task.model_copy(update={"name": leaf})
        for task in tasks
        for leaf in expand(task.name, definitions)
    ]
    names = [leaf.name for leaf in leaves]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RecipeError(f"tasks: {', '.join(twice)} is there twice, once in a group or tag")
    return leaves


def _local_calibration(recipe: Recipe) -> CalibrationSource | None:
    source = recipe.calibration
    if source is None or not any(c.quantizer.needs_calibration for c in recipe.quantizers):
        return None
    if source.path.startswith(HUB_FILE):
        found = _download(source.path) if recipe.data is None else _beside_data(recipe)
        return source.model_copy(update={"path": str(found)})
    return source.model_copy(update={"path": str(recipe.resolve(Path(source.path)))})


def _beside_data(recipe: Recipe) -> Path:
    """The calibration file of a data folder: with local data, the hub is not asked."""
    assert recipe.data is not None
    data = recipe.resolve(recipe.data)
    for folder in (data / "calibration", data.parent / "calibration"):
        files = sorted(folder.glob("*.jsonl"))
        if len(files) == 1:
            return files[0]
        if files:
            names = ", ".join(file.name for file in files)
            raise DataError(f"{folder}: which is the calibration text? say --calibration ({names})")
    raise DataError(
        f"calibration: no *.jsonl in {data}/calibration or {data.parent}/calibration, and with a "
        "data folder the hub is not asked; say --calibration FILE"
    )


def _download(address: str) -> Path:
    """The local copy of ``hf://datasets/<owner>/<name>/<file>``."""
    parts = address.removeprefix(HUB_FILE).split("/", 3)
    if len(parts) != 4 or parts[0] != "datasets" or not all(parts):
        raise RecipeError(f"calibration.path: {address}: write {HUB_FILE}datasets/OWNER/NAME/FILE")
    _, owner, name, file = parts
    try:
        return hub.dataset_file(f"{owner}/{name}", file)
    except DataError as error:
        raise DataError(
            f"calibration.path: {address}: {error}; "
            "or name a local JSON Lines file with --calibration FILE"
        ) from error


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
