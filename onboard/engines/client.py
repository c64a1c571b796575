"""Requests to an OpenAI-compatible server that keep what was asked and what came back."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from onboard.engines.server import DIRECT

TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class Exchange:
    """One request and its answer: status 0 where there was none, `body` as received."""

    path: str
    request: Mapping[str, Any]
    status: int
    body: str
    seconds: float

    @property
    def json(self) -> Any:
        """Return the parsed answer; raises ValueError where the server refused or sent no JSON."""
        if self.status != 200:
            raise ValueError(f"{self.path} answered {self.status or 'nothing'}: {self.body[:500]}")
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Return the documents of a streamed answer (server-sent events)."""
        if self.status != 200:
            raise ValueError(f"{self.path} answered {self.status or 'nothing'}: {self.body[:500]}")
        data = [line[6:] for line in self.body.splitlines() if line.startswith("data: ")]
        if not data or data[-1] != "[DONE]":
            raise ValueError(
                f"{self.path}: the stream does not end with [DONE]: {self.body[-300:]}"
            )
        return [json.loads(document) for document in data[:-1]]


@dataclass(frozen=True)
class Client:
    url: str

    def post(self, path: str, request: Mapping[str, Any]) -> Exchange:
        """Send one request; what goes wrong is in the exchange, never raised."""
        headers = {"Content-Type": "application/json"}
        call = urllib.request.Request(self.url + path, json.dumps(request).encode(), headers)
        began = time.monotonic()
        status, body = 0, ""
        try:
            with DIRECT.open(call, timeout=TIMEOUT_SECONDS) as response:
                status, body = response.status, response.read().decode()
        except urllib.error.HTTPError as e:
            status, body = e.code, e.read().decode(errors="replace")
        except OSError as e:
            body = repr(e)
        return Exchange(path, request, status, body, time.monotonic() - began)

    def get(self, path: str) -> str:
        with DIRECT.open(self.url + path, timeout=TIMEOUT_SECONDS) as response:
            return str(response.read().decode())

    def post_all(
        self,
        path: str,
        requests: Sequence[Mapping[str, Any]],
        concurrency: int,
        finished: Callable[[int], None] = lambda count: None,
    ) -> list[Exchange]:
        """Send the requests, `concurrency` at a time; return the exchanges in their order."""
        with ThreadPoolExecutor(concurrency) as pool:
            futures = [pool.submit(self.post, path, request) for request in requests]
            for count, _ in enumerate(as_completed(futures), 1):
                finished(count)
            return [future.result() for future in futures]
