"""A recipe before it is checked: YAML, and what the command line puts in place of parts of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from qbench.errors import RecipeError


def read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise RecipeError(f"{path}: no such recipe")
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text ({error})") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise RecipeError(
            f"{path}: a recipe is a mapping with name, checkpoints, quantizers, tasks"
        )
    return raw


def override_checkpoints(path: Path, raw: dict[str, Any], overrides: dict[str, str]) -> None:
    declared = raw.setdefault("checkpoints", {})
    if not isinstance(declared, dict):
        return  # the schema says so, with its place
    for name, source in overrides.items():
        if name not in declared:
            known = ", ".join(declared) or "none"
            raise RecipeError(f"--checkpoint {name}={source}: {path} has no {name}; it has {known}")
        stated = declared[name] if isinstance(declared[name], dict) else {}
        kept = {k: v for k, v in stated.items() if k not in ("path", "revision")}
        declared[name] = {**kept, "path": source}
    empty = [name for name, source in declared.items() if source is None]
    if empty:
        raise RecipeError(
            f"{path}: checkpoints.{empty[0]}: no default is known; "
            f"say --checkpoint {empty[0]}=FOLDER_OR_HUB_ID"
        )


def override_dtype(raw: dict[str, Any], dtype: str) -> None:
    raw["compute_dtype"] = dtype
    unquantized = {"bfloat16": "bf16", "float32": "fp32"}[dtype]
    quantizers = raw.get("quantizers")
    if not isinstance(quantizers, list):
        return  # the schema says so, with its place
    changed: list[Any] = []
    for entry in quantizers:
        name = entry.get("name") if isinstance(entry, dict) else entry
        if name in ("bf16", "fp32"):
            entry = unquantized
        elif isinstance(entry, dict):
            entry = {key: value for key, value in entry.items() if key != "compute_dtype"}
        if entry not in changed:
            changed.append(entry)
    raw["quantizers"] = changed


def put(path: Path, raw: dict[str, Any], part: str, key: str, value: Any) -> None:
    stated = raw.get(part) or {}
    if not isinstance(stated, dict):
        raise RecipeError(f"{path}: {part}: must be a mapping (it is {stated!r})")
    raw[part] = {**stated, key: value}


def is_folder(source: str) -> bool:
    return Path(source).expanduser().is_dir()


class _UniqueKeys(yaml.SafeLoader):
    """YAML without silent overwriting: a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=deep)
            if not isinstance(key, str | int | float | bool | None):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a word", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} stands there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)
