"""Plan a recipe: find its files, choose settings for each model, give every cell its content key.

Input that would fail in a cell is refused here. The quantized copy that a recipe names is compared
with the original by its files. Imports no torch, loads no model and no task. The same plan goes,
pickled, to cells in other processes and on other hosts.
"""

from __future__ import annotations

import fnmatch
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from qbench import __version__, hub
from qbench.attention import NATIVE
from qbench.attention.normalizers import NORMALIZERS
from qbench.checkpoints import Checkpoint, find
from qbench.checkpoints.find import (
    FLOATS,
    HUB_ID,
    SIZES,
    ChosenAttention,
    Shapes,
    choose_attention,
    end_shapes,
    has_chat_template,
    has_other_matrices,
    linear_shapes,
    model_headers,
    moving_rope,
    require_tokenizer,
)
from qbench.checkpoints.fla import in_transformers_words
from qbench.errors import (
    CheckpointError,
    DataError,
    MissingDataError,
    QuantizationError,
    RecipeError,
    some,
)
from qbench.evaluation.settings import (
    BATCH_SIZE,
    SAMPLE,
    WINDOW_BATCH_SIZE,
    Chat,
    Mode,
    ScoringSettings,
    batch_tokens,
)
from qbench.evaluation.tasks import (
    TaskGroup,
    TaskSpec,
    expand,
    plan_answers,
    plan_task,
    read_definition,
)
from qbench.files import code_digest, content_key, file_digest, kept_digest, short_path
from qbench.machine import hardware, versions
from qbench.metrics import base_metric
from qbench.quantizers import QuantizationConfig, gguf_file
from qbench.quantizers.config import Runtime, require_matches
from qbench.quantizers.methods.library_made import LibraryMade
from qbench.quantizers.published import (
    GGUF,
    Published,
    PublishedCopy,
    loadable_methods,
    number_bits,
    parents,
)
from qbench.quantizers.texts import CalibrationText, find_text, read_texts, require_windows
from qbench.recipe import Evaluation, QuantizerEntry, Recipe, Task
from qbench.records import GIB, GridCell, RunManifest, StoredSize
from qbench.text import group_by_reason

EXPERTS = re.compile(r"\.(experts|block_sparse_moe\.(in|out)put_linear)\.")  # and GraniteMoE's
ENDS = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe|(lm_)?head)\.")
HEADS = ("lm_head", "embed_out", "head")  # in files, the latter two of GPT-NeoX and RWKV


def find_copy(
    config: QuantizationConfig, name: str, original: Checkpoint, shapes: Shapes, device: str
) -> tuple[QuantizationConfig, Checkpoint]:
    """Return ``config``, whose weights are ``Published``, completed by the files of the quantized
    copy of checkpoint ``name``, and the copy.

    ``original``: the unquantized checkpoint, whose linear layers have ``shapes``; if the recipe
    names no path, the quantized checkpoint itself. ``device``: "cpu" or "cuda". Raises QbenchError
    if the copy is of another model, is not quantized, or no library here loads its format.
    """
    weights = config.weights
    source = weights.source(name)
    if source is not None and source.endswith(".gguf"):
        copy = _gguf(source, original)
    else:
        copy = original if source is None else find(source, quantized=True)
    quantization = copy.config.get("quantization_config", {})
    method = str(quantization.get("quant_method", ""))
    if method not in loadable_methods():
        raise CheckpointError(
            f"checkpoint {copy.source}: quant_method {method!r} cannot be loaded; the installed "
            f"transformers and GPTQModel load {', '.join(loadable_methods())}"
        )
    counted: dict[str, Any] = {}
    if source is not None:
        if (difference := _difference(copy, original)) is not None:
            raise RecipeError(f"checkpoint {copy.source}: {difference}")
        copy = replace(copy, normalizer=original.normalizer)  # its library may have lost it
        counted = quantization["counted"] if method == GGUF else _count(copy, original, shapes)
    published = PublishedCopy(
        path=weights.path,
        compute_dtype=weights.compute_dtype,
        format=method,
        config=quantization,
        digest=copy.digest,
        folder=str(copy.folder),
        device=device,
        ends_quantized=method == GGUF
        or any(  # embeddings or LM head
            ENDS.search(name) and "bias" not in name and header.dtype not in FLOATS
            for name, header in copy.headers.items()
        ),
        **counted,
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
        raise CheckpointError(
            f"checkpoint {source}: no such file: {path}; name DIR/FILE.gguf or OWNER/NAME/FILE.gguf"
        )
    if original.normalizer not in ("softmax", NATIVE):
        raise CheckpointError(
            f"checkpoint {source}: llama.cpp computes softmax attention, but {original.source} was "
            f"trained with {original.normalizer}; leave the file out"
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


def _count(copy: Checkpoint, original: Checkpoint, shapes: Shapes) -> dict[str, Any]:
    """Return fields of PublishedCopy counted from the files of ``copy``: bits per weight, layers
    that are stored unquantized. Raises CheckpointError if no layer is quantized."""
    sizes: Counter[str] = Counter()  # weights of each matrix, of all experts together
    whole = model_headers(original)
    for full, header in whole.items():
        name = full.removesuffix(".weight")
        long = sum(size > 1 for size in header.shape)
        if long > 1 and "bias" not in full and not ENDS.search(full):
            sizes["experts" if EXPERTS.search(full) else name] += math.prod(header.shape)
    bits: Counter[str] = Counter()
    rounded: set[str] = set()
    for full, header in copy.headers.items():
        owner = next((name for name in (full, *parents(full)) if name in sizes), None)
        if owner is None:
            owner = "experts" if EXPERTS.search(full) else full.partition(".")[0]
        bias = full.endswith("bias")
        bits["biases" if bias else owner] += math.prod(header.shape) * number_bits(header.dtype)
        as_before = header.dtype in FLOATS and (full.endswith("weight") or full in whole)
        if not bias and not as_before:
            rounded.add(owner)
    layers = bits.keys() & sizes.keys()
    if layers and not rounded & layers:
        raise CheckpointError(
            f"checkpoint {copy.source}: its config.json says that it is quantized, but its files "
            "hold unquantized weights; make the copy again, or take another"
        )
    each = {name: bits[name] / sizes[name] for name in rounded & layers}
    heads = [math.prod(s) for n, s in end_shapes(original).items() if n in HEADS]
    of_head = sum(bits[name] for name in HEADS)
    return {
        "stored_bits": sum(map(bits.get, each)) / sum(map(sizes.get, each)) if each else None,
        "fewest_bits": min(each.values(), default=None),
        "ignore": tuple(sorted((layers - rounded) & {*shapes, "experts"})),
        "size": StoredSize(
            bits_per_weight=sum(map(bits.get, layers)) / sizes.total(),
            head_bits_per_weight=of_head / heads[0] if of_head and heads else None,
            gib=bits.total() / GIB,
        ),
    }


def _difference(copy: Checkpoint, original: Checkpoint) -> str | None:
    """Return why ``copy`` is no quantized copy of ``original`` with the same tokenizer, or None."""
    trained_with = copy.config.get("qbench_normalizer")
    if trained_with not in (None, original.normalizer):
        return (
            f"this copy was trained with {trained_with}, and {original.source} with "
            f"{original.normalizer}; name the model that it was made from under checkpoints"
        )
    sizes, copied = (in_transformers_words(checkpoint.config) for checkpoint in (original, copy))
    for size in SIZES:
        if None not in (sizes.get(size), copied.get(size)) and sizes[size] != copied[size]:
            return (
                f"{size} is {copied[size]}, and {original.source} has {sizes[size]}: this is no "
                "copy of that model; name the model that it was made from under checkpoints"
            )
    theirs, ours = (checkpoint.folder / "tokenizer.json" for checkpoint in (copy, original))
    if not theirs.is_file() or (ours.is_file() and theirs.read_bytes() == ours.read_bytes()):
        return None
    from qbench.checkpoints.tokenizer import tokenizer_difference  # imports transformers

    if (difference := tokenizer_difference(copy, original)) is None:
        return None
    return (
        f"its tokenizer {difference}, so users of this copy get other tokens than qbench would "
        "score; to score only its weights, remove its tokenizer files"
    )


ONE_WAY: dict[Runtime, Mode] = {  # to score, whatever the recipe says
    "llama.cpp": "exact",
    "lm-eval": "lm-eval",
}
CALIBRATION_LINES = 1_000  # read of a calibration text; a hub shard has hundreds of thousands


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Holds what one cell computes: one checkpoint with one quantizer, on all tasks."""

    checkpoint_name: str
    checkpoint: Checkpoint
    label: str  # of the quantizer in its recipe
    quantization: QuantizationConfig
    attention: str  # "reference" or "triton"; of a native checkpoint "sdpa" or "eager"
    scoring: ScoringSettings
    key: str
    key_parts: dict[str, Any]
    base: GridCell | None  # the unquantized cell that damage is taken against
    calibration: CalibrationText | None = None  # None: no part of it is calibrated
    copy: Checkpoint | None = None  # the quantized files of a checkpoint that is published so
    unsupported_reason: str | None = None  # why it can never run
    notes: tuple[str, ...] = ()  # settings that were chosen for this model and may surprise

    @property
    def name(self) -> str:
        """Return ``checkpoint/column``, which names the cell in results and messages."""
        return f"{self.checkpoint_name}/{self.label}"

    @property
    def without_baseline(self) -> bool:
        """Return whether the checkpoint is quantized already and its original is not known."""
        return self.copy is not None and self.copy.folder == self.checkpoint.folder

    @property
    def grid_cell(self) -> GridCell:
        """Return the cell's entry in a run's manifest."""
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
    """Holds all cells of a run, a checkpoint's unquantized ones first, and what they share."""

    recipe: Recipe
    device: str
    hardware: str | None  # the GPU's name; None on the CPU, where it is in no key
    tasks: tuple[TaskSpec, ...]
    calibration: CalibrationText | None
    cells: tuple[Cell, ...]
    groups: tuple[TaskGroup, ...] = ()  # groups of these tasks that have scores of their own
    skipped: tuple[str, ...] = ()  # tasks whose data are missing, with skip_missing

    def manifest(self, names: Collection[str] | None = None) -> RunManifest:
        """Return the manifest of a run of the cells ``names`` (None: of all), with their
        checkpoints and quantizers."""
        recipe = self.recipe
        cells = tuple(c.grid_cell for c in self.cells if names is None or c.name in names)
        checkpoints = tuple(dict.fromkeys(cell.checkpoint for cell in cells))
        labels = {cell.quantizer for cell in cells}
        groups = {
            group: tuple(name for name in members if name in checkpoints)
            for group, members in recipe.replicates.items()
        }
        return RunManifest(
            name=recipe.name,
            checkpoints=checkpoints,
            limit=recipe.evaluation.limit,
            primary=recipe.primary,
            hub_ids={
                name: source.path
                for name, source in recipe.checkpoints.items()
                if not os.path.isabs(source.path)  # the recipe makes folders absolute
            },
            sources={name: self.source(name) for name in recipe.checkpoints},
            data=self.data,
            quantizers=tuple(c.label for c in recipe.quantizers if c.label in labels),
            tasks=tuple(task.name for task in self.tasks),
            skipped=self.skipped,
            cells=cells,
            replicates={group: members for group, members in groups.items() if members},
        )

    @property
    def data(self) -> str:
        """Return the folder of the tasks' documents, or "the hub"."""
        return "the hub" if self.recipe.data is None else short_path(self.recipe.data)

    def source(self, name: str) -> str:
        """Return, for a reader, where a checkpoint came from: its folder as ``short_path`` writes
        it, or its hub id and the commit's first 12 digits (else the revision, if given) as ``ID @
        COMMIT``."""
        source = self.recipe.checkpoints[name]
        folders = [cell.checkpoint.folder for cell in self.cells if cell.checkpoint_name == name]
        commits = [folder.name[:12] for folder in folders if folder.parent.name == "snapshots"]
        revision = next(iter(commits), source.revision)
        return f"{short_path(source.path)}{f' @ {revision}' if revision else ''}"

    def cell(self, name: str) -> Cell:
        """Return the cell called ``<checkpoint>/<quantizer label>``, which the plan must have."""
        return next(cell for cell in self.cells if cell.name == name)

    def select(self, pattern: str | None) -> tuple[Cell, ...]:
        """Return the cells whose names match one of the globs in ``pattern``, which commas
        separate; None: all. Raises RecipeError for a glob without a match."""
        chosen = set(select((cell.name for cell in self.cells), pattern))
        return tuple(cell for cell in self.cells if cell.name in chosen)


def cell_names(recipe: Recipe) -> list[str]:
    """Return the names that the cells of ``recipe`` will have."""
    return [f"{name}/{column.label}" for name in recipe.checkpoints for column in recipe.quantizers]


def select(names: Iterable[str], pattern: str | None) -> list[str]:
    """Return the ``names`` that match one of the globs in ``pattern``, which commas separate; None
    matches all. Raises RecipeError for a glob without a match."""
    cells = list(names)
    globs = ["*"] if pattern is None else pattern.split(",")
    for glob in globs:
        if not fnmatch.filter(cells, glob):
            raise RecipeError(f"--only {glob!r} matches no cell; the cells are {', '.join(cells)}")
    return [name for name in cells if any(fnmatch.fnmatch(name, glob) for glob in globs)]


def plan(
    recipe: Recipe,
    *,
    device: str,
    gpu: str | None = None,
    only: str | None = None,
    show: bool = False,
) -> Plan:
    """Return the plan of ``recipe``: find its checkpoints, tasks and data, and give every cell its
    key.

    ``device`` is "cpu" or "cuda". ``gpu`` is the name of the GPU of other hosts, None for this
    host's. ``only``: globs over names of cells, separated by commas (None: all). Raises a
    QbenchError for what cannot work, also if a matching cell can never run, unless ``show``.
    """
    checkpoints = _checkpoints(recipe)
    tasks, groups, skipped = find_tasks(recipe)
    if recipe.primary is not None:
        scores = [f"{group.name}/{metric.metric}" for group in groups for metric in group.metrics]
        for task in tasks:
            listed = read_definition(task.definition).get("metric_list") or ()
            scores += [f"{task.name}/{entry['metric']}" for entry in listed]
        if base_metric(recipe.primary) not in scores:
            names = ", ".join(scores)
            raise RecipeError(f"primary: no task has {recipe.primary}; possible: {names}")
    calibration = find_calibration(recipe)
    if device == "cuda" and gpu is None:
        gpu = hardware(device)
    planned = Plan(
        recipe=recipe,
        device=device,
        hardware=gpu,
        tasks=tasks,
        groups=groups,
        skipped=skipped,
        calibration=calibration,
        cells=(),
    )
    cells: list[Cell] = []
    for name, checkpoint in checkpoints.items():
        shapes = {} if recipe.without_baseline else linear_shapes(checkpoint)
        cells += _cells(planned, name, checkpoint, shapes)
    planned = replace(planned, cells=tuple(cells))
    chosen = planned.select(only)
    folders = {cell.checkpoint.folder for cell in chosen if cell.calibration is not None}
    paths = (folder / "tokenizer.json" for folder in sorted(folders))
    for path in {file_digest(path): path for path in paths if path.is_file()}.values():
        require_windows(calibration, path)
    if not show:
        require_runnable(chosen)
    return planned


def _checkpoints(recipe: Recipe) -> dict[str, Checkpoint]:
    """Return the recipe's checkpoints by name. Raises CheckpointError with all problems."""
    checkpoints: dict[str, Checkpoint] = {}
    problems: list[CheckpointError] = []
    for name, source in recipe.checkpoints.items():
        try:
            checkpoints[name] = find(
                source.path,
                revision=source.revision,
                normalizer=source.normalizer,
                quantized=recipe.without_baseline,
            )
            require_tokenizer(checkpoints[name])
        except CheckpointError as error:
            problems.append(error)
            if not os.path.isdir(source.path):
                break  # the hub: the next one would fail for the same reason, after minutes
    if problems:
        raise CheckpointError(*dict.fromkeys(map(str, problems)))
    return checkpoints


def _cells(plan: Plan, name: str, checkpoint: Checkpoint, shapes: Shapes) -> Iterator[Cell]:
    """Yield the cells of one checkpoint, unquantized ones first; ``plan`` has no cells yet."""
    evaluation = plan.recipe.evaluation
    if evaluation.add_bos:
        from qbench.checkpoints.tokenizer import load_tokenizer, puts_bos  # imports transformers

        if not puts_bos(load_tokenizer(checkpoint)):
            raise RecipeError(
                f"checkpoints.{name}: evaluation.add_bos: true, but the tokenizer puts no BOS "
                "before a text; set add_bos: false, or give the tokenizer a post-processor that "
                "puts one"
            )
    if evaluation.apply_chat_template and not has_chat_template(checkpoint.folder):
        raise RecipeError(
            f"evaluation.apply_chat_template: checkpoints.{name} has no chat template; add its "
            "chat_template.jinja, or set false if it was not trained on conversations"
        )
    bases: dict[str, GridCell] = {}  # unquantized cells by the dtype that they compute in
    for column in sorted(plan.recipe.quantizers, key=lambda c: c.quantization.precision.quantized):
        dtype, base, notes = column.quantization.compute_dtype, None, ()
        if bases and evaluation.damage and column.quantization.precision.quantized:
            base = bases.get(dtype) or next(iter(bases.values()))
            if dtype not in bases:
                notes = (
                    f"damage is measured against {base.quantizer}: no unquantized column computes "
                    f"in {dtype}",
                )
        cell = _cell(plan, name, checkpoint, shapes, column, base)
        if not column.quantization.precision.quantized:
            bases.setdefault(dtype, cell.grid_cell)
        yield replace(cell, notes=(*cell.notes, *notes))
    for task in plan.tasks:
        if (task.max_length or 0) > (checkpoint.positions or math.inf):
            raise RecipeError(
                f"tasks: {task.name}: its prompts and answers take {task.max_length} tokens, and "
                f"{checkpoint.class_name} of checkpoints.{name} has {checkpoint.max_length} "
                "positions; take a shorter task"
            )
        generates = task.answers or task.output_type == "generate_until"
        if generates and task.max_gen_toks >= cell.scoring.max_length:
            raise RecipeError(
                f"tasks: {task.name} generates up to {task.max_gen_toks} tokens, which leaves no "
                f"room for a prompt in evaluation.max_length {cell.scoring.max_length} of "
                f"checkpoints.{name}; "
                + (
                    "lower answers.max_new_tokens (--save-recipe writes the recipe that has it)"
                    if task.answers
                    else "raise evaluation.max_length or leave the task out"
                )
            )


def _cell(
    plan: Plan,
    name: str,
    checkpoint: Checkpoint,
    shapes: Shapes,
    column: QuantizerEntry,
    base: GridCell | None,
) -> Cell:
    """Return the cell of one checkpoint and one ``column``. ``base`` is the unquantized cell that
    damage is measured against."""
    evaluation, device = plan.recipe.evaluation, plan.device
    quantization, copy = column.quantization, None
    if isinstance(quantization.weights, Published):
        quantization, copy = find_copy(quantization, name, checkpoint, shapes, device)
    config = in_transformers_words(checkpoint.config)
    reasons = []
    if shapes and quantization.weights is not None and (names := quantization.weights.end_names):
        shapes = shapes | {n: s for n, s in end_shapes(checkpoint).items() if n in names}
    try:
        quantization = quantization.fitted(shapes)
        for part in quantization.parts.values():
            part.check(config, device)
    except RecipeError as error:
        reasons.append(str(error))
    requested = evaluation.attention
    attention = choose_attention(
        name, checkpoint.class_name, checkpoint.normalizer, requested, device
    )
    checkpoint = replace(checkpoint, normalizer=attention.normalizer)
    scoring = scoring_settings(evaluation, checkpoint, quantization, device=device)
    calibration, seed = None, column.calibration_seed
    if quantization.needs_calibration:
        assert plan.calibration, "Recipe refuses calibrated quantizers without calibration"
        text = plan.calibration
        calibration = text if seed is None else replace(text, seed=seed)
    reasons += unsupported_reasons(plan.recipe, checkpoint, shapes, quantization, copy)
    cell = Cell(
        base=base,
        calibration=calibration,
        copy=copy and replace(copy, normalizer=attention.normalizer),
        checkpoint_name=name,
        checkpoint=checkpoint,
        label=column.label,
        quantization=quantization,
        attention=attention.implementation,
        scoring=scoring,
        key="",
        key_parts={},
        unsupported_reason=next(iter(reasons), None),
        notes=tuple(_notes(checkpoint, attention, scoring, plan.recipe)),
    )
    parts = _key_parts(plan, cell)
    return replace(cell, key=content_key(parts), key_parts=parts)


def _key_parts(plan: Plan, cell: Cell) -> dict[str, Any]:
    """Return everything that can change the scores of ``cell``, by name; parts that it lacks are
    left out."""
    compiled = ("triton",) if cell.attention == "triton" or plan.device == "cuda" else ()
    normalizer, calibration = cell.checkpoint.normalizer, cell.calibration
    text = None
    if calibration is not None:
        text = {
            "samples": calibration.samples,
            "length": calibration.length,
            "seed": calibration.seed,
            "text": calibration.digest,
            **({} if calibration.bos is False else {"bos": calibration.bos}),
        }
    parts = {
        "weights": cell.checkpoint.digest,
        "checkpoint": cell.checkpoint.digests or None,
        "normalizer": normalizer,
        "normalizer source": None if normalizer == NATIVE else NORMALIZERS[normalizer].source,
        "quantizer": cell.quantization.to_dict(),
        "calibration": text,
        "tasks": {task.name: task.digest for task in plan.tasks},
        "few-shot": {task.name: task.num_fewshot for task in plan.tasks},
        "groups": {group.name: asdict(group) for group in plan.groups} or None,
        "scoring": cell.scoring.key_parts(),
        "attention": cell.attention,
        "device": plan.device,
        "gpu": plan.hardware,
        "versions": {
            **versions((*cell.quantization.requirements, *compiled)),
            "qbench": __version__,
        },
        "code": code_digest(),
        "damage against": cell.base.key if cell.base is not None else None,
    }
    return {name: part for name, part in parts.items() if part is not None}


WORKSPACE = 4 * 2**30  # bytes


def streams(cell: Cell, plan: Plan, weights: float, room: Callable[[], float]) -> bool:
    """Return whether the weights of ``cell``, ``weights`` bytes, are copied to the device block by
    block: if the recipe says so, or leaves it open, on a GPU without ``device_map``, if
    ``streamable`` and if they and a workspace of at most 4 GiB exceed ``room()`` bytes."""
    evaluation = plan.recipe.evaluation
    if evaluation.stream != "auto":
        return evaluation.stream
    if evaluation.device_map is not None or plan.device != "cuda":
        return False
    able = streamable(cell.quantization, cell.copy, cell.checkpoint.config)
    return able and weights + min(weights, WORKSPACE) > room()


def streamable(
    quantization: QuantizationConfig, copy: Checkpoint | None, config: Mapping[str, Any]
) -> bool:
    """Return whether a cell with these settings can run with its weights copied block by block: the
    files are unquantized, nothing but weights is quantized, and rotary angles do not depend on the
    length (``config``: the checkpoint's)."""
    weights = quantization.weights
    unquantized_files = copy is None and (weights is None or not weights.prequantized)
    return unquantized_files and not quantization.beside_weights and not moving_rope(config)


# --- tasks and calibration text


def find_tasks(
    recipe: Recipe,
) -> tuple[tuple[TaskSpec, ...], tuple[TaskGroup, ...], tuple[str, ...]]:
    """Return the recipe's tasks, that of its ``answers`` last; the groups that have scores of their
    own, and data for all of their tasks; and with ``skip_missing`` the names of tasks without data.
    Raises RecipeError for a task that is listed twice; DataError for the problems of the tasks'
    data (of the hub's the first alone), also if all tasks would be skipped."""
    tasks, skipped, missing, problems = [], [], [], []
    leaves, groups = list[Task](), dict[str, TaskGroup]()
    for task in recipe.tasks:
        members, within = expand(task.name, recipe.definitions)
        leaves += [task.model_copy(update={"name": name}) for name in members]
        groups |= {group.name: group for group in within}
    names = [leaf.name for leaf in leaves]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise RecipeError(
            f"tasks: listed twice, once by a group or tag: {', '.join(twice)}; list each only once"
        )
    for task in leaves:
        try:
            tasks.append(
                plan_task(
                    task.name,
                    data=recipe.data,
                    definitions=recipe.definitions,
                    files=task.files.evaluation,
                    fewshot_files=task.files.fewshot,
                    num_fewshot=task.num_fewshot,
                )
            )
        except DataError as error:
            if recipe.skip_missing and isinstance(error, MissingDataError):
                skipped.append(task.name)
                missing.append(error)
            else:
                problems.append(error)
                if recipe.data is None:  # the hub: what ails one task ails the next, after minutes
                    break
    if problems or (missing and not tasks):  # without a task there is nothing to run
        lines = [str(error) for error in problems or missing]
        if len(lines) > MOST_LINES + 1:  # as of mmlu's 57
            names = [line.partition(":")[0] for line in lines[MOST_LINES:]]
            lines[MOST_LINES:] = [f"{len(names)} more tasks have such problems: {some(names)}"]
        raise DataError(*lines)
    if recipe.answers is not None:
        answers = recipe.answers
        task = plan_answers(
            answers.prompts, answers.settings, data=recipe.data, definitions=recipe.definitions
        )
        tasks.append(task)
    complete = (group for group in groups.values() if not {*skipped} & {*group.tasks})
    return tuple(tasks), tuple(complete), tuple(skipped)


MOST_LINES = 3


def find_calibration(recipe: Recipe, *, needed: bool = False) -> CalibrationText | None:
    """Return the calibration text; None if the recipe names none, or if no quantizer needs it and
    ``needed`` is false. Raises QbenchError if the file is missing or its beginning is malformed."""
    source = recipe.calibration
    needed = needed or any(c.quantization.needs_calibration for c in recipe.quantizers)
    if source is None or not needed:
        return None
    path = find_text(source.path, data=recipe.data)
    read_texts(path, most=CALIBRATION_LINES)  # raises for a malformed beginning
    return CalibrationText(
        path=path,
        digest=file_digest(path),
        samples=source.samples,
        length=source.length,
        seed=source.seed,
        bos=recipe.evaluation.add_bos,
    )


# --- what is chosen for a model, and what can never run


def _notes(
    checkpoint: Checkpoint, attention: ChosenAttention, scoring: ScoringSettings, recipe: Recipe
) -> Iterator[str]:
    """Yield a line per setting of this model that differs from the recipe's or the usual one."""
    max_length = recipe.evaluation.max_length
    if attention.why:
        yield f"attention native/{attention.implementation}: {attention.why}"
    if max_length is not None and max_length > scoring.max_length:
        yield (
            f"scored in windows of {scoring.max_length:,} tokens, its context, instead of "
            f"evaluation.max_length {max_length:,}"
        )
    chat = recipe.evaluation.apply_chat_template or not has_chat_template(checkpoint.folder)
    if recipe.tasks and not chat:
        yield (
            "a chat model, but prompts do not use its chat template, as by default in lm-eval; set "
            "evaluation.apply_chat_template: true to use it"
        )


def scoring_settings(
    evaluation: Evaluation, checkpoint: Checkpoint, quantization: QuantizationConfig, *, device: str
) -> ScoringSettings:
    """Return the settings that ``evaluation`` of a recipe gives one checkpoint and quantizer.
    ``scoring: auto`` is fast on a GPU, exact on a CPU; other runtimes have one mode.

    The checkpoint's context bounds ``max_length``: later positions were never trained. Whether the
    model can be scored so is measured when it is loaded. Raises RecipeError if no length is known.
    """
    lengths = [n for n in (evaluation.max_length, checkpoint.max_length) if n is not None]
    if not lengths:
        raise RecipeError(
            f"evaluation.max_length: {checkpoint.source} states no context length; set max_length, "
            "in tokens (evaluation: {max_length: 2048})"
        )
    mode = ONE_WAY.get(quantization.runtime, evaluation.scoring)
    if mode == "auto":
        mode = "fast" if device == "cuda" else "exact"
    shares_scales = not quantization.batch_invariant
    tokens = batch_tokens(device, checkpoint.config, shares_scales=shares_scales)
    automatic = evaluation.batch_size == "auto"
    chat = None
    if evaluation.apply_chat_template or evaluation.system_instruction is not None:
        chat = Chat(
            apply_chat_template=evaluation.apply_chat_template,
            fewshot_as_multiturn=evaluation.fewshot_as_multiturn,
            system_instruction=evaluation.system_instruction,
        )
    return ScoringSettings(
        mode=mode,
        max_length=min(lengths),
        batch_size=BATCH_SIZE[device] if automatic else evaluation.batch_size,
        window_batch_size=WINDOW_BATCH_SIZE[device] if automatic else evaluation.batch_size,
        batch_tokens=tokens if mode == "fast" else None,
        add_bos=evaluation.add_bos,
        softmax_dtype=evaluation.softmax_dtype,
        sample=SAMPLE[device] if mode == "fast" else 0,
        tolerance=evaluation.tolerance,
        limit=evaluation.limit,
        seed=evaluation.seed,
        fewshot_seed=evaluation.fewshot_seed,
        amplifies_rounding=quantization.amplifies_rounding,
        shares_scales=shares_scales,
        fallback=evaluation.scoring == "auto",
        chat=chat,
    )


def unsupported_reasons(
    recipe: Recipe,
    checkpoint: Checkpoint,
    shapes: Shapes,
    quantization: QuantizationConfig,
    copy: Checkpoint | None,
) -> Iterator[str]:
    """Yield each reason why a quantizer can never run with this checkpoint of these ``shapes``."""
    try:
        for part in quantization.parts.values():
            part.check_layers(shapes)
            words = tuple(p.rpartition(".")[2] for p in part.ignore if not set(p) & set("*?["))
            if words and shapes and not has_other_matrices(checkpoint):
                # ``shapes`` are all matrices; their names' ends are the model's
                require_matches(shapes, words, part.name)
    except QuantizationError as error:
        yield str(error)
    weights, evaluation, text = quantization.weights, recipe.evaluation, recipe.calibration
    other = checkpoint.normalizer not in ("softmax", NATIVE)
    if isinstance(weights, LibraryMade) and weights.softmax_only and other:
        yield (
            f"{weights.name}: {weights.package} computes softmax, but {checkpoint.source} was "
            f"trained with {checkpoint.normalizer}; leave this quantizer out"
        )
    if checkpoint.normalizer == NATIVE and quantization.kv_cache is not None:
        yield (
            f"{checkpoint.class_name} runs on its own attention, but the KV cache is quantized in "
            "qbench's; leave kv out"
        )
    moved = "device_map" if evaluation.device_map else "stream" if evaluation.stream is True else ""
    if moved and not streamable(quantization, copy, checkpoint.config):
        yield (
            f"evaluation.{moved}: block by block, only weights can be quantized (rtn, bnb, hqq, "
            "gptq and the like), and rotary angles must not depend on the length; leave "
            f"{moved} or the quantizer out"
        )
    most = checkpoint.positions or math.inf
    if quantization.needs_calibration and text is not None and text.length > most:
        yield (
            f"calibration.length {text.length}: {checkpoint.class_name} has {most} positions; set "
            f"length: {most}, or --calibration-length {most}"
        )


def require_runnable(cells: Iterable[Cell]) -> None:
    """Raise RecipeError for cells that can never run, one line per reason."""
    if lines := group_by_reason(
        (cell.name, cell.unsupported_reason) for cell in cells if cell.unsupported_reason
    ):
        raise RecipeError(*lines, "these cells can never run; choose others with --only PATTERN")
