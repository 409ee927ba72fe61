"""Everything that comes from the Hugging Face hub, and one clear line where it does not come.

huggingface_hub shows its progress in a terminal, keeps a download in its cache only when it is
complete, and takes up a broken one where it stopped, so what comes back here is always whole.
Imports no torch.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import huggingface_hub  # which imports what is asked of it when that is

from qbench.errors import CheckpointError, DataError, first_line

SECONDS = 30.0  # to wait for an answer that names a commit
COMMIT = re.compile(r"[0-9a-f]{40}$")
SIGN_IN = "sign in with `hf auth login` or set HF_TOKEN"
# What the hub's libraries raise, by class name, most telling first. Names, because the classes
# come from several libraries, which change between versions (httpx, httpx2).
REASONS = {
    "GatedRepoError": f"its owner grants access one by one: ask on its page, then {SIGN_IN}",
    "RevisionNotFoundError": "it has no such revision",
    "DisabledRepoError": "access to it is disabled",
    "RepositoryNotFoundError": f"there is no such repository, or a private one: {SIGN_IN}",
    "RemoteEntryNotFoundError": "it has no such file",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, so what the cache lacks is not fetched",
    "TimeoutException": "no answer in time; try again, or raise HF_HUB_DOWNLOAD_TIMEOUT (seconds)",
    "ConnectError": "it cannot be reached; check the connection",
    "NetworkError": "the connection broke; run again, it continues where it stopped",
    "RemoteProtocolError": "the connection broke; run again, it continues where it stopped",
    "XetDownloadError": "the download broke; run again, it continues where it stopped",
}
STATUSES = {
    401: f"access was denied (401): {SIGN_IN}",
    403: f"access was denied (403): {SIGN_IN}, with an account that may read it",
    404: "it is not there (404)",
    429: f"it is busy (429, too many requests): try again later, or {SIGN_IN} for a higher limit",
}


def snapshot(hub_id: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Folder with the files of a model repository that match ``patterns``.

    Raises CheckpointError, with the reason in one line, where the hub does not give it.
    """
    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, revision=revision, allow_patterns=list(patterns)
            )
        )
    except Exception as error:
        at = f" at revision {revision}" if revision else ""
        raise CheckpointError(
            f"checkpoint {hub_id}: no such folder, and the hub did not give it{at}: "
            f"{reason(error)}; or name a local folder with --checkpoint NAME=FOLDER"
        ) from error


def dataset_file(dataset: str, name: str, revision: str | None = None) -> Path:
    """One file of a data-set repository. Raises DataError where the hub does not give it."""
    try:
        return Path(
            huggingface_hub.hf_hub_download(dataset, name, repo_type="dataset", revision=revision)
        )
    except Exception as error:
        raise DataError(f"the hub did not give {name} of {dataset}: {reason(error)}") from error


def dataset_commit(dataset: str, revision: str | None = None, name: str | None = None) -> str:
    """The commit that ``revision`` of a data-set repository is at. Where the hub is out of reach,
    that of the copy that ``datasets`` would load, of its configuration ``name``.

    Raises DataError where neither is there.
    """
    try:
        found = huggingface_hub.HfApi().dataset_info(dataset, revision=revision, timeout=SECONDS)
        if found.gated:  # everyone may read what it is, not everyone its files
            huggingface_hub.HfApi().auth_check(dataset, repo_type="dataset")
    except Exception as error:
        if (cached := _cached_dataset(dataset, name)) and _out_of_reach(error):
            return cached
        raise DataError(f"the hub did not give the data set {dataset}: {reason(error)}") from error
    assert found.sha is not None, "the hub names the commit of what it has"
    return found.sha


def _cached_dataset(dataset: str, name: str | None) -> str | None:
    """The commit of the newest prepared copy: datasets keeps them by configuration, version and
    commit."""
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(home) / "datasets")
    folder = cache / dataset.replace("/", "___")
    copies = [path for path in folder.glob(f"{name or 'default'}*/*/*") if COMMIT.match(path.name)]
    newest = max(copies, key=lambda path: path.stat().st_mtime, default=None)
    return newest.name if newest else None


def _out_of_reach(error: BaseException) -> bool:
    kinds = {kind.__name__ for cause in _causes(error) for kind in type(cause).__mro__}
    return bool(kinds & {"OfflineModeIsEnabled", "TimeoutException", "NetworkError"})


def failed(error: BaseException) -> bool:
    """Whether ``error``, or what caused it, came from the hub or the way to it."""
    return _known(error) is not None


def reason(error: BaseException) -> str:
    """One line for what kept the hub from giving something: the cause and what helps."""
    if known := _known(error):
        return known
    return f"{type(error).__name__}: {first_line(error)}"


def _known(error: BaseException) -> str | None:
    causes = list(_causes(error))
    kinds = {kind.__name__ for cause in causes for kind in type(cause).__mro__}
    if "DatasetNotFoundError" in kinds:  # datasets hides the cause, and tells it in words
        gated = any("gated" in str(cause) for cause in causes)
        return REASONS["GatedRepoError" if gated else "RepositoryNotFoundError"]
    for name, text in REASONS.items():
        if name in kinds:
            return text
    if any(isinstance(cause, OSError) and cause.errno == errno.ENOSPC for cause in causes):
        return "no space is left on the disk of its cache (its folder is set by HF_HOME)"
    for cause in causes:
        status = getattr(getattr(cause, "response", None), "status_code", 0)
        if status >= 400:
            return STATUSES.get(status, f"it answers {status}; try again later")
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
