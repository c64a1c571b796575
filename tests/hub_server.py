"""A small Hugging Face Hub: the requests that huggingface_hub makes for a model, on localhost."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SHA = "c0ffee" + "0" * 34
LARGE = 1000  # bytes from which a file is kept as LFS, with a sha256


@dataclass
class Hub:
    """`files` of the one repository `acme/tiny`.

    `stall` names a file that stops half way, `drop` one whose first connection breaks there.
    """

    files: Mapping[str, bytes]
    url: str = ""
    stall: str | None = None
    drop: str | None = None
    stalled: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # verb, path, range


def entry(path: str, data: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": "1" * 40}
    if len(data) >= LARGE:
        row["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 130}
    return row


@contextmanager
def serve(files: Mapping[str, bytes]) -> Iterator[Hub]:
    hub = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            hub.requests.append((self.command, self.path, self.headers.get("Range")))
            path = self.path.partition("?")[0]
            if "gated" in path:
                return self.refuse(403, "GatedRepo", "Access to model acme/gated is restricted.")
            if not re.match(r"(/api/models)?/acme/tiny(/|$)", path):
                return self.refuse(404, "RepoNotFound", "Repository not found")
            if found := re.fullmatch(r"/acme/tiny/resolve/(\w+)/(.+)", path):
                return self.file(found[2], body)
            revision = re.search(r"/(?:revision|tree)/([^/]+)", path)
            if revision and revision[1] not in ("main", SHA):
                return self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision[1]}")
            rows = [entry(name, data) for name, data in hub.files.items()]
            listing = {"id": "acme/tiny", "sha": SHA, "siblings": []}
            return self.send(json.dumps(rows if "/tree/" in path else listing).encode(), body=body)

        def file(self, name: str, body: bool) -> None:
            if name not in hub.files:
                return self.refuse(404, "EntryNotFound", f"no {name}")
            data = hub.files[name]
            etag = _sha256(data) if len(data) >= LARGE else hashlib.sha1(data).hexdigest()
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
            asked = self.headers.get("Range")
            start, _, end = (asked or "bytes=0-")[6:].partition("-")
            first, last = int(start), min(int(end or len(data)), len(data) - 1)
            if asked:
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            part = data[first : last + 1]
            if body and name in (hub.stall, hub.drop):
                self.begin(200, len(part), headers)
                self.wfile.write(part[: len(part) // 2])
                self.wfile.flush()
                self.close_connection = True
                if name == hub.stall:
                    hub.stalled.set()
                    threading.Event().wait(20)
                hub.drop = None
                return None
            return self.send(part, 206 if asked else 200, headers, body)

        def refuse(self, status: int, code: str, message: str) -> None:
            self.send(b"", status, {"X-Error-Code": code, "X-Error-Message": message})

        def begin(self, status: int, size: int, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(size)}.items():
                self.send_header(name, value)
            self.end_headers()

        def send(
            self,
            data: bytes,
            status: int = 200,
            headers: Mapping[str, str] | None = None,
            body: bool = True,
        ) -> None:
            self.begin(status, len(data), headers or {})
            if body:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
