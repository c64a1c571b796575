"""A stand-in for an engine's process tree: a health URL, a child, a grandchild of another session.

    fake_engine.py PORT WORK [MODE]

Writes the pids of the whole tree to WORK/pids. MODE `die` prints an error and ends; `deaf` ignores
the request to stop.
"""

import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

PORT, WORK, MODE = int(sys.argv[1]), Path(sys.argv[2]), "".join(sys.argv[3:])
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(repr(dict(os.environ)).encode())


if MODE == "die":
    print("loading\nValueError: there is no tensor model.norm.weight\nfarewell", flush=True)
    sys.exit(3)
if MODE == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(SLEEP)
split_off = subprocess.Popen(SLEEP, start_new_session=True)
(WORK / "pids").write_text(f"{os.getpid()} {child.pid} {split_off.pid}")
if MODE != "mute":
    HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
signal.pause()
