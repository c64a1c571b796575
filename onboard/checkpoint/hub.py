"""A model repository on the Hugging Face Hub, pinned to one commit and read through its cache.

`HF_ENDPOINT`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE` and `HF_TOKEN` mean what they mean to
huggingface_hub. It goes on inside a file after a dropped connection, and with the files that are
missing after a killed process (a file cut short by a kill starts again: huggingface_hub 2.4 gives
every process a partial file of its own).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from onboard.errors import EnvironmentFault, InputError

WORKERS = 8
Progress = Callable[[int, int], None]  # bytes done, bytes in total


def endpoint() -> str:
    """Return the Hub's address: `HF_ENDPOINT`, else the public one."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def commit(model: str, revision: str | None) -> str:
    """Return the commit (40 hex digits) of `revision`, the default branch where it is None.

    A full commit needs no network; where the Hub cannot be reached, the cache's own record of the
    branch stands in.
    """
    from huggingface_hub import HfApi

    with hub_faults(model):
        resolved = HfApi(endpoint=endpoint()).resolve_revision(model, revision=revision)
    return resolved.resolved


def listing(model: str, sha: str) -> dict[str, int]:
    """Return the size in bytes of every file at the top of the repository.

    Where the Hub cannot be reached, of those that the cache holds.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    held = snapshot(model, sha)
    try:
        with hub_faults(model):
            tree = HfApi(endpoint=endpoint()).list_repo_tree(model, revision=sha)
            return {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}
    except EnvironmentFault:
        if not held.is_dir():
            raise
        return {path.name: path.stat().st_size for path in held.iterdir() if path.is_file()}


def download(model: str, sha: str, sizes: Mapping[str, int], progress: Progress) -> Path:
    """Bring the files named in `sizes` (name -> bytes) into the cache; return the snapshot folder.

    A file that is there already costs no request.
    """
    from huggingface_hub import hf_hub_download

    counter = _counter(progress, sum(sizes.values()))

    def fetch(name: str) -> None:
        hf_hub_download(model, name, revision=sha, endpoint=endpoint(), tqdm_class=counter)

    with hub_faults(model), ThreadPoolExecutor(WORKERS) as pool:
        _all_or_first_error(pool, fetch, sizes)
    progress(sum(sizes.values()), sum(sizes.values()))
    return snapshot(model, sha)


def snapshot(model: str, sha: str) -> Path:
    """Return the folder of the cache that holds (or will hold) this commit's files."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=model, repo_type="model")
    return Path(constants.HF_HUB_CACHE) / folder / "snapshots" / sha


def known_digest(folder: Path, name: str) -> str | None:
    """Return the sha256 that the Hub gives a large file of a snapshot: its blob's name."""
    blob = (folder / name).resolve()
    in_cache = folder.parent.name == "snapshots" and blob.parent == folder.parent.parent / "blobs"
    return blob.name if in_cache and re.fullmatch(r"[0-9a-f]{64}", blob.name) else None


@contextlib.contextmanager
def hub_faults(model: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into one sentence with the Hub's own reason."""
    import httpx2
    from huggingface_hub import errors

    page = f"{endpoint()}/{model}"
    try:
        yield
    except errors.GatedRepoError as e:
        raise InputError(
            f"{model} is gated: {_reason(e)}",
            f"accept its terms at {page}, then: hf auth login (or set HF_TOKEN)",
        ) from e
    except errors.RevisionNotFoundError as e:
        raise InputError(f"{model} has no such revision: {_reason(e)}", f"see {page}") from e
    except errors.RepositoryNotFoundError as e:
        raise InputError(
            f"{model} is not on the Hub, or is private: {_reason(e)}",
            "check the spelling; for a private model: hf auth login (or set HF_TOKEN)",
        ) from e
    except (errors.HFValidationError, errors.RemoteEntryNotFoundError) as e:
        raise InputError(f"{model}: {_reason(e)}") from e
    except errors.HfHubHTTPError as e:
        fault = InputError if e.response.status_code in (401, 403) else EnvironmentFault
        raise fault(f"{model}: the Hub answered {e.response.status_code}: {_reason(e)}") from e
    except (
        errors.RevisionResolutionError,
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        httpx2.HTTPError,
        ConnectionError,
    ) as e:
        raise EnvironmentFault(
            f"{model}: cannot reach the Hub at {endpoint()}, and its cache lacks what is needed: "
            f"{_reason(e)}",
            "connect and run again (it resumes), or give a local directory instead",
        ) from e


def _reason(error: Exception) -> str:
    said = getattr(error, "server_message", None) or str(error)
    return " ".join(str(said).split())


def _all_or_first_error(
    pool: ThreadPoolExecutor, fetch: Callable[[str], None], names: Iterable[str]
) -> None:
    futures = [pool.submit(fetch, name) for name in names]
    try:
        for future in futures:
            future.result()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _counter(progress: Progress, total: int) -> Any:
    """Return a stand-in for tqdm that adds the bytes of every download to one count."""
    lock, done = Lock(), 0

    def add(count: float) -> None:
        nonlocal done
        with lock:
            done += int(count)
            progress(min(done, total), total)

    class Counter:
        def __init__(self, *_: Any, initial: float = 0, **__: Any) -> None:
            add(initial or 0)

        def update(self, count: float | None = 1) -> None:
            add(count or 0)

        def __enter__(self) -> Counter:
            return self

        def __exit__(self, *_: object) -> None: ...

        def close(self) -> None: ...

        def set_postfix_str(self, *_: object, **__: object) -> None: ...

    return Counter
