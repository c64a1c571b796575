"""A Hub model's config.json and safetensors headers, by range requests: no weights are fetched."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from onboard.checkpoint import hub
from onboard.checkpoint.headers import (
    INDEX,
    LENGTH,
    SINGLE,
    Header,
    collect,
    header_length,
    no_weights,
    parse_index,
    parse_shard,
)
from onboard.errors import EnvironmentFault, InputError

_SECONDS = 30  # without an answer, until a request counts as lost


@dataclass(frozen=True)
class Remote:
    """What a repository says about its model at one commit."""

    commit: str
    config: Mapping[str, Any]
    headers: Mapping[str, Header]


def read(model: str, revision: str | None) -> Remote:
    """Return the config and every tensor's header of a Hub model.

    Two requests a shard: 8 bytes for the header's length, then the header. Raises InputError where
    the repository is not as the format demands, EnvironmentFault where the Hub cannot be reached.
    """
    sha = hub.commit(model, revision)
    sizes = hub.listing(model, sha)
    if "config.json" not in sizes:
        raise InputError(f"{model}: expected a config.json, found none")
    with hub.hub_faults(model):
        config = _json(_bytes(model, sha, "config.json", 0, sizes["config.json"]), model)
        index = _index(model, sha, sizes)
        shards = _shards(model, index, sizes)
        with ThreadPoolExecutor(hub.WORKERS) as pool:
            found = pool.map(lambda shard: _shard(model, sha, shard, sizes[shard]), shards)
            headers = collect(model, index, (header for rows in found for header in rows))
    return Remote(sha, config, headers)


def _json(data: bytes, model: str) -> dict[str, Any]:
    try:
        table = json.loads(data)
    except ValueError as e:
        raise InputError(f"{model}/config.json: not valid JSON: {e}") from e
    if not isinstance(table, dict):
        raise InputError(f"{model}/config.json: expected a JSON object")
    return table


def _index(model: str, sha: str, sizes: Mapping[str, int]) -> dict[str, str]:
    if INDEX not in sizes:
        return {}
    return parse_index(_bytes(model, sha, INDEX, 0, sizes[INDEX]), f"{model}/{INDEX}")


def _shards(model: str, index: Mapping[str, str], sizes: Mapping[str, int]) -> list[str]:
    held = [name for name in sizes if name.endswith(".safetensors")]
    wanted: Iterable[str] = set(index.values()) or ([SINGLE] if SINGLE in held else held)
    if not wanted:
        raise no_weights(model, sizes)
    if missing := sorted(set(wanted) - sizes.keys()):
        raise InputError(f"{model}: {INDEX} lists {missing[0]}, which the repository lacks")
    return sorted(wanted)


def _shard(model: str, sha: str, shard: str, size: int) -> list[Header]:
    start = _bytes(model, sha, shard, 0, LENGTH)
    length = header_length(start, size, f"{model}/{shard}")
    return parse_shard(_bytes(model, sha, shard, LENGTH, length), size, shard, model)


def _bytes(model: str, sha: str, name: str, begin: int, count: int) -> bytes:
    """Return `count` bytes of a file from `begin`; a server without ranges is cut off there."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils._http import get_session, hf_raise_for_status

    url = hf_hub_url(model, name, revision=sha, endpoint=hub.endpoint())
    asked = {**build_hf_headers(), "Range": f"bytes={begin}-{begin + count - 1}"}
    with get_session().stream("GET", url, headers=asked, timeout=_SECONDS) as response:
        hf_raise_for_status(response)
        skipped = 0 if response.status_code == 206 else begin
        data = b""
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) >= skipped + count:
                break
    if len(data) < skipped + count:
        raise EnvironmentFault(f"{model}/{name}: the Hub sent {len(data)} bytes of {count}")
    return data[skipped : skipped + count]
