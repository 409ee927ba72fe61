"""A plan's files on another host: where they lie there by digest, and what of them is missing.

A file is taken from the path that the plan names where it has the planned content there (a shared
file system), else from this host's cache, else a checkpoint of the hub from the hub. What is left
is wanted from where the plan was made. Imports neither Dask nor torch.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from qbench.checkpoints import Checkpoint, find
from qbench.checkpoints.files import digest as folder_digest
from qbench.checkpoints.files import stamps
from qbench.errors import QbenchError
from qbench.evaluation.definitions import definition_file, read_definition
from qbench.evaluation.tasks import TaskSpec
from qbench.plan import Plan
from qbench.quantizers.texts import CalibrationText, file_digest

WHOLE = ".whole"  # written last into a folder of the cache


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a host lacks: ``target`` is a folder of its cache, ``sources`` are files as the plan's
    host has them, each with its name in that folder."""

    target: str
    sources: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        """In words, for progress."""
        return Path(self.sources[0][1]).parent.name or self.target


def located(
    plan: Plan,
    name: str,
    cache: Path,
    *,
    tasks: Collection[str] | None = None,
    texts: Sequence[tuple[Path, str]] = (),
) -> tuple[Plan, dict[str, Path], list[Wanted]]:
    """``plan`` with the files of the cell ``name`` as they lie here, with ``texts`` by their
    SHA-256, and what is missing. ``tasks``: names of those whose data are read; None: all."""
    cell, missing = plan.cell(name), []
    checkpoint = _checkpoint(cell.checkpoint, cache, missing)
    found_tasks = tuple(
        _task(task, plan, cache, missing) if tasks is None or task.name in tasks else task
        for task in plan.tasks
    )
    text = plan.calibration
    if text is not None and cell.quantization.needs_calibration:
        text = _text(text, cache, missing)
    here = {digest: _file(path, digest, cache, missing) for path, digest in texts}
    cells = tuple(
        dataclasses.replace(one, checkpoint=checkpoint)
        if one.checkpoint_name == cell.checkpoint_name
        else one
        for one in plan.cells
    )
    found = dataclasses.replace(plan, cells=cells, tasks=found_tasks, calibration=text)
    return found, here, list(dict.fromkeys(missing))


def _checkpoint(planned: Checkpoint, cache: Path, missing: list[Wanted]) -> Checkpoint:
    if (found := _at(planned.folder, planned)) is not None:
        return found
    here = cache / _target(planned.digest)
    if (here / WHOLE).is_file():
        return dataclasses.replace(planned, folder=here, files=stamps(here))
    if planned.folder.parent.name == "snapshots":  # of the hub's cache
        at_hub = _from_hub(planned.source, planned.folder.name, planned.normalizer)
        if at_hub is not None and at_hub.digest == planned.digest:
            return at_hub
    names = [name for name, _, _ in planned.files]
    sources = tuple((name, str(planned.folder / name)) for name in names)
    missing.append(Wanted(_target(planned.digest), sources))
    return planned


def _at(folder: Path, planned: Checkpoint) -> Checkpoint | None:
    """The checkpoint, where ``folder`` has it on this host too."""
    try:
        files = stamps(folder)
        same = files == planned.files or _folder_digest(folder, files) == planned.digest
    except (QbenchError, OSError):
        return None
    return dataclasses.replace(planned, folder=folder, files=files) if same else None


@functools.lru_cache(maxsize=64)
def _folder_digest(folder: Path, _: tuple) -> str:
    """Once for each state of the folder."""
    return folder_digest(folder)


@functools.lru_cache(maxsize=64)
def _from_hub(source: str, commit: str, normalizer: str) -> Checkpoint | None:
    """What the hub has under the name and commit, from this host's copy where there is one."""
    try:
        return find(source, revision=commit, normalizer=normalizer)
    except QbenchError:
        return None


def _task(task: TaskSpec, plan: Plan, cache: Path, missing: list[Wanted]) -> TaskSpec:
    files = tuple(
        dataclasses.replace(file, path=_file(file.path, file.digest, cache, missing))
        for file in task.files
    )
    return dataclasses.replace(
        task, files=files, definition=_definition(task, plan, cache, missing)
    )


def _definition(task: TaskSpec, plan: Plan, cache: Path, missing: list[Wanted]) -> Path:
    """lm-eval's own is that of this host's lm-eval; a definition of the user's comes with the
    whole folder, since it may include others and name code beside it."""
    if not task.own:
        return definition_file(task.name, None)
    if _defines(task.definition, task.definition_digest):
        return task.definition
    stated = plan.recipe.definitions
    assert stated is not None, "own definitions have a folder"
    root = plan.recipe.resolve(stated)
    target = f"files/definitions-{task.definition_digest}"
    inside = cache / target / task.definition.relative_to(root)
    if not (cache / target / WHOLE).is_file():
        missing.append(Wanted(target, (("", str(root)),)))
    return inside


def _defines(path: Path, digest: str) -> bool:
    try:
        return path.is_file() and read_definition(path).digest == digest
    except QbenchError:
        return False


def _text(text: CalibrationText, cache: Path, missing: list[Wanted]) -> CalibrationText:
    return dataclasses.replace(text, path=_file(text.path, text.digest, cache, missing))


def _file(path: Path, digest: str, cache: Path, missing: list[Wanted]) -> Path:
    if path.is_file() and _digest_of(path, path.stat().st_size, path.stat().st_mtime_ns) == digest:
        return path
    here = cache / _target(digest) / path.name
    if not (here.parent / WHOLE).is_file():
        missing.append(Wanted(_target(digest), ((path.name, str(path)),)))
    return here


@functools.lru_cache(maxsize=1024)
def _digest_of(path: Path, size: int, changed: int) -> str:
    return file_digest(path)


def _target(digest: str) -> str:
    return f"files/{digest}"


def sources_of(wanted: Wanted) -> list[tuple[str, Path]]:
    """Files to send, on the host of the plan: name in the target, and path here; a folder stands
    for all files in it."""
    found = []
    for name, source in wanted.sources:
        path = Path(source)
        if path.is_dir():
            inside = sorted(one for one in path.rglob("*") if one.is_file())
            found += [(one.relative_to(path).as_posix(), one) for one in inside]
        else:
            found.append((name, path))
    return found


def cache_identity(cache: Path) -> str:
    """The same for every host that sees this very folder."""
    from qbench.files import write_atomically

    mark = cache / ".identity"
    if not mark.is_file():
        import secrets

        write_atomically(mark, secrets.token_hex(16).encode())
    return hashlib.sha256(mark.read_bytes()).hexdigest()[:16]
