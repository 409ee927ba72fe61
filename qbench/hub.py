"""Fetch files from the Hugging Face hub; an error is one line with the library's own reason. Every
file returned here is whole: huggingface_hub keeps a download only when it is. Imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import huggingface_hub  # imports its parts when they are used

from qbench.errors import CheckpointError, DataError, first_line

SECONDS = 30.0  # to wait for the commit of a data set
COMMIT = re.compile(r"[0-9a-f]{40}$")
LIBRARIES = ("huggingface_hub", "datasets.exceptions", "httpx", "httpx2", "requests", "hf_xet")
UNREACHABLE = {"OfflineModeIsEnabled", "TimeoutException", "NetworkError"}


def snapshot(hub_id: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Return the folder with the files of the model ``hub_id`` that match ``patterns`` (globs), at
    ``revision`` (None: the newest). Raises CheckpointError with the hub's reason for a failure."""
    try:
        download = huggingface_hub.snapshot_download
        return Path(download(hub_id, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:
        at = f" at revision {revision}" if revision else ""
        raise CheckpointError(
            f"checkpoint {hub_id}: no such folder, and not fetched from the hub{at}: "
            f"{reason(error)}; correct the id, or name a local folder with --checkpoint NAME=FOLDER"
        ) from error


def dataset_file(dataset: str, name: str, revision: str | None = None) -> Path:
    """Return the path of file ``name`` of a data-set repository at ``revision`` (None: the newest).
    Raises DataError if it cannot be fetched."""
    try:
        download = huggingface_hub.hf_hub_download
        return Path(download(dataset, name, repo_type="dataset", revision=revision))
    except Exception as error:
        raise DataError(
            f"{name} of {dataset} cannot be fetched from the hub: {reason(error)}"
        ) from error


def dataset_commit(dataset: str, revision: str | None = None, name: str | None = None) -> str:
    """Return the commit id of a data-set repository at ``revision`` (None: the newest). If the hub
    cannot be reached, return the commit of the copy of configuration ``name`` that ``datasets`` has
    in its cache. Raises DataError if there is none."""
    try:
        about = huggingface_hub.HfApi().dataset_info(dataset, revision=revision, timeout=SECONDS)
        if about.gated:  # its description is public, its files need a permission
            huggingface_hub.HfApi().auth_check(dataset, repo_type="dataset")
    except Exception as error:
        names = {kind.__name__ for cause in _causes(error) for kind in type(cause).__mro__}
        if UNREACHABLE & names and (commit := _cached_commit(dataset, name)):
            return commit
        raise DataError(
            f"the data set {dataset} cannot be fetched from the hub: {reason(error)}"
        ) from error
    assert about.sha is not None, "the hub gives a commit for each repository"
    return about.sha


def is_hub_error(error: BaseException) -> bool:
    """Return whether ``error`` or one of its causes was raised by a library that downloads."""
    return any(type(cause).__module__.startswith(LIBRARIES) for cause in _causes(error))


def reason(error: BaseException) -> str:
    """Return the class and the first line of the download library's error among ``error`` and its
    causes; of ``error`` itself if there is none."""
    of_hub = (c for c in _causes(error) if type(c).__module__.startswith(LIBRARIES))
    cause = next(of_hub, error)
    return f"{type(cause).__name__}: {first_line(cause)}"


def _cached_commit(dataset: str, name: str | None) -> str | None:
    """Return the commit of the newest copy in the cache of ``datasets``, whose folders are named by
    configuration, version and commit; None if there is none."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets")
    copies = (cache / dataset.replace("/", "___")).glob(f"{name or 'default'}*/*/*")
    complete = [path for path in copies if COMMIT.match(path.name)]
    return max(complete, key=lambda path: path.stat().st_mtime).name if complete else None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error`` and the errors that caused it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
