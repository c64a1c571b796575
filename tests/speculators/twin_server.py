"""A tiny model behind an OpenAI-compatible server, in this process: ids in, greedy ids out."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from onboard.checkpoint.models import load_reference


@dataclass
class Twin:
    """A model and how its server behaves: requests after `refuse_after` fail."""

    model: Any
    names: Sequence[str] = ("model",)
    refuse_after: int | None = None
    with_ids: bool = True
    added: int = 0  # tokens that it says it read besides the prompt's
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def answer(self, request: dict[str, Any]) -> list[int]:
        ids = list(request["prompt"])
        with self.lock, torch.inference_mode():
            while len(ids) - len(request["prompt"]) < request["max_tokens"]:
                ids.append(int(self.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
                if ids[-1] in request["stop_token_ids"]:
                    break
        return ids[len(request["prompt"]) :]


@contextmanager
def serve(folder: Path, **behaviour: Any) -> Iterator[Twin]:
    twin = Twin(load_reference(folder, torch.float32), **behaviour)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, {"data": [{"id": name} for name in twin.names]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            twin.requests.append(request)
            if twin.refuse_after is not None and len(twin.requests) > twin.refuse_after:
                return self.reply(500, {"error": "out of memory"})
            tokens = twin.answer(request)
            choice = {"text": "", "token_ids": tokens if twin.with_ids else None}
            usage = {"prompt_tokens": len(request["prompt"]) + twin.added}
            return self.reply(200, {"choices": [choice], "usage": usage})

        def reply(self, status: int, document: Any) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    twin.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield twin
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
