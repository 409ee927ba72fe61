"""What the command line, or a caller, puts in place of parts of a recipe, or says without one."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qbench.checkpoints.find import HUB_ID
from qbench.errors import RecipeError, shown
from qbench.files import reason, write_atomically
from qbench.overrides import Overrides
from qbench.quantizers.texts import HUB_FILE
from qbench.recipe_plugins import named_plugins
from qbench.recipe_source import Source, read

UNQUANTIZED = ("bf16", "fp16", "fp32")
NAME_CHARACTERS = 64
FROM_OPTIONS = Path("options")  # where messages say that a problem lies, without a recipe


def source_of(path: Path | None, changed: Overrides) -> Source:
    """The recipe ``path`` with parts of it replaced; None: what ``changed`` says alone.

    Raises RecipeError for what does not fit together.
    """
    if path is None:
        return _override(_one_off(changed), changed)
    return _override(read(path), changed)


def folder_of(path: Path | None) -> Path:
    """What a recipe's relative paths are relative to."""
    return Path.cwd() if path is None else Path(os.path.realpath(path)).parent


def save(path: Path | None, changed: Overrides, to: Path) -> None:
    """Write the recipe ``path`` as it runs with ``changed``, with absolute paths and the plug-in
    files of this process, to the file ``to``. Raises OutputError where that cannot be written."""
    import yaml

    values, folder = source_of(path, changed).values, folder_of(path)
    for what in ("data", "definitions"):
        if values.get(what) is not None:
            values[what] = _absolute(folder, str(values[what]))
    text = values.get("calibration")
    if isinstance(text, dict) and not str(text.get("path", HUB_FILE)).startswith(HUB_FILE):
        values["calibration"] = {**text, "path": _absolute(folder, text["path"])}
    values["checkpoints"] = {
        name: _located(folder, stated) for name, stated in values["checkpoints"].items()
    }
    if files := named_plugins():
        values["plugins"] = files
    said = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
    write_atomically(to, f"# Written by qbench run --save-recipe.\n{said}".encode())


def _absolute(folder: Path, path: str) -> str:
    return os.path.realpath(folder / Path(path).expanduser())


def _located(folder: Path, stated: Any) -> Any:
    """A checkpoint of a recipe: a folder by its absolute path, a hub id as it is."""
    if isinstance(stated, dict):
        return {**stated, "path": _located(folder, stated.get("path"))}
    if isinstance(stated, list):
        return [_located(folder, one) for one in stated]
    if isinstance(stated, str) and "*" in stated:
        return os.path.join(folder, os.path.expanduser(stated))
    there = isinstance(stated, str) and os.path.isdir(_absolute(folder, stated))
    return _absolute(folder, stated) if there else stated


def _one_off(changed: Overrides) -> Source:
    """A recipe of options alone. Raises RecipeError, which names what is missing."""
    given = {
        "--checkpoint NAME=FOLDER_OR_HUB_ID": changed.checkpoints,
        "--quantizers bf16,gptq-4bit": changed.quantizers,
        "--tasks piqa,sciq": changed.tasks,
    }
    if missing := [option for option, value in given.items() if not value]:
        raise RecipeError(f"name a recipe, or say what to run: {', '.join(missing)} missing")
    values = {
        "name": "-".join(changed.checkpoints)[:NAME_CHARACTERS],
        "checkpoints": dict.fromkeys(changed.checkpoints),
    }
    return Source(FROM_OPTIONS, values, {})


def _override(source: Source, changed: Overrides) -> Source:
    """Put what the command line says into the place of what the recipe says."""
    values = source.values
    try:
        found = {name: _found(source.path, path) for name, path in changed.checkpoints.items()}
        _replace_checkpoints(source, found)
        for what, folder in (("data", changed.data), ("definitions", changed.definitions)):
            if folder is not None:
                values[what] = os.path.realpath(folder)
                source.lines[what,] = 0
        if changed.calibration is not None:
            path = str(changed.calibration)
            whole = path if path.startswith(HUB_FILE) else os.path.realpath(path)
            source.replace("calibration", "path", whole)
    except (OSError, ValueError) as error:
        raise RecipeError(f"a path that an option names is none ({reason(error)})") from None
    if changed.quantizers is not None:
        values["quantizers"] = _named(values.get("quantizers"), changed.quantizers, "label")
        source.lines["quantizers",] = 0
    if changed.tasks is not None:
        values["tasks"] = _named(values.get("tasks"), changed.tasks, "name")
        source.lines["tasks",] = 0
    if changed.skip_missing:
        values["skip_missing"] = True
    if changed.limit is not None:
        source.replace("evaluation", "limit", changed.limit)
    if changed.scoring is not None:
        source.replace("evaluation", "scoring", str(changed.scoring))
    if changed.dtype is not None:
        _replace_dtype(source, changed.dtype)
    return source


def _named(stated: Any, names: tuple[str, ...], key: str) -> list[Any]:
    """The entries of a recipe's list that ``names`` pick, by ``key`` or name, with what the recipe
    says of them; others as they are named."""
    known: dict[str, Any] = {}
    for entry in stated if isinstance(stated, list) else []:
        if isinstance(entry, dict):
            known.setdefault(str(entry.get(key) or entry.get("name")), entry)
    return [known.get(name, name) for name in names]


def group_checkpoints(source: Source, folder: Path) -> None:
    """Take apart checkpoints that stand for several trainings of one kind, a list or a path
    with ``*`` (relative to ``folder``): ``softmax`` becomes ``softmax.1``, ``softmax.2``, …,
    and a group of ``replicates``. Raises RecipeError where fewer than two are found."""
    declared = source.values.get("checkpoints")
    if not isinstance(declared, dict):
        return  # the schema says so, with its location
    made: dict[str, Any] = {}
    groups: dict[str, list[str]] = {}
    for name, entry in declared.items():
        members = _members(entry, folder)
        if members is None:
            made[name] = entry
            continue
        location = source.at(("checkpoints", name))
        if len(members) < 2:
            raise RecipeError(
                f"{location}: checkpoints.{name}: {shown(entry)} gives {len(members)} "
                "checkpoints; seeds of one kind are two or more"
            )
        groups[name] = [f"{name}.{number}" for number in range(1, len(members) + 1)]
        for member, one in zip(groups[name], members, strict=True):
            made[member] = one
            source.lines["checkpoints", member] = source.lines.get(("checkpoints", name), 0)
    if groups:
        source.values["checkpoints"] = made
        stated = source.values.get("replicates") or {}
        source.values["replicates"] = {**stated, **groups} if isinstance(stated, dict) else stated


def _found(recipe: Path, source: str) -> str:
    """An absolute path for a folder, and for what is no hub id either: a command line's paths
    are relative to where it is given, not to the recipe. A hub id as it is."""
    path = os.path.expanduser(source)
    if os.path.isdir(path) or not HUB_ID.fullmatch(source):
        return os.path.realpath(path)
    if os.path.isdir(os.path.join(os.path.dirname(os.path.realpath(recipe)), source)):
        raise RecipeError(
            f"--checkpoint {source}: no such folder here, but one beside {recipe}; name it "
            "by its path from here"
        )
    return source


def _replace_checkpoints(source: Source, sources: Mapping[str, str]) -> None:
    """Other paths for checkpoints of the recipe; what else it says of them stays, but the
    revision. Raises RecipeError for one that it does not have, or has no path for."""
    declared = source.values.get("checkpoints", {})
    if not isinstance(declared, dict):
        return  # the schema says so, with its location
    for name, path in sources.items():
        if name not in declared:
            known = ", ".join(map(str, declared)) or "none"
            raise RecipeError(
                f"--checkpoint {name}={path}: {source.path} has no {name}; it has {known}"
            )
        stated = declared[name] if isinstance(declared[name], dict) else {}
        kept = {k: v for k, v in stated.items() if k not in ("path", "revision")}
        declared[name] = {**kept, "path": path}
        source.lines["checkpoints", name, "path"] = 0
    for name, stated in declared.items():
        if stated is None:
            raise RecipeError(
                f"{source.at(('checkpoints', name))}: checkpoints.{name}: no default is known; "
                f"say --checkpoint {name}=FOLDER_OR_HUB_ID"
            )


def _replace_dtype(source: Source, dtype: str) -> None:
    """Compute in ``dtype`` everywhere. Unquantized columns become those of that dtype, each
    with its label."""
    source.values["compute_dtype"] = dtype
    unquantized = {"bfloat16": "bf16", "float32": "fp32"}[dtype]
    quantizers = source.values.get("quantizers")
    if not isinstance(quantizers, list):
        return  # the schema says so, with its location
    changed: list[Any] = []
    for entry in quantizers:
        entry = _in_dtype(entry, unquantized)
        if isinstance(entry, dict) and "weights" in entry:
            entry["weights"] = _in_dtype(entry["weights"], unquantized)
        changed.append(entry)
    if changed.count(unquantized) > 1:
        raise RecipeError(
            f"--dtype {dtype}: {source.at(('quantizers',))}: quantizers: bf16 and fp32 would "
            f"both be {unquantized}; take one out, or give each a label"
        )
    source.values["quantizers"] = changed


def _in_dtype(entry: Any, unquantized: str) -> Any:
    """A quantizer of a recipe without a dtype of its own, or ``unquantized``."""
    if isinstance(entry, dict):
        entry = {k: v for k, v in entry.items() if k not in ("compute_dtype", "dtype")}
        if entry.get("name") in UNQUANTIZED:
            entry["name"] = unquantized
        return entry
    return unquantized if entry in UNQUANTIZED else entry


def _members(entry: Any, folder: Path) -> list[Any] | None:
    """The checkpoints that one entry stands for; None for an entry of a single one."""
    if isinstance(entry, list):
        return entry
    path = entry.get("path") if isinstance(entry, dict) else entry
    if not isinstance(path, str) or "*" not in path:
        return None
    found = sorted(glob.glob(os.path.expanduser(path), root_dir=folder))
    found = [one for one in found if os.path.isdir(folder / one)]
    return [{**entry, "path": one} if isinstance(entry, dict) else one for one in found]
