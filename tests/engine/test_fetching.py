"""A model comes from the hub, and the log says how far it is: against a hub of our own."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = [pytest.mark.net]

# The hub's client writes 10 MiB at a time.
COMMIT = "c" * 40
FILES = {"config.json": b"{}", "model.safetensors": bytes(24 * 2**20)}
FETCH = """
import logging, sys
logging.basicConfig(format="%(message)s", level="INFO", stream=sys.stdout)
logging.getLogger("httpx").setLevel("WARNING")
from mlxstack.core.preset import ModelSpec
from mlxstack.engine.fetching import fetch
print("at", fetch(ModelSpec(id="org/tiny"), every_s=0.02))
"""


class Hub(BaseHTTPRequestHandler):
    """What `snapshot_download` asks for; the weights come in pieces, each when it may go on."""

    go_on = threading.Event()

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, is_head: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if "/tree/" in path:
            files = [
                {"type": "file", "path": n, "size": len(b), "oid": n} for n, b in FILES.items()
            ]
            self._send(json.dumps(files).encode())
        elif path.startswith("/api/models/org/tiny"):
            told = {"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "private": False}
            self._send(json.dumps({**told, "siblings": [{"rfilename": n} for n in FILES]}).encode())
        elif name in FILES:
            self._send(b"" if is_head else FILES[name], len(FILES[name]))
        else:
            self.send_error(404)

    def _send(self, body: bytes, size: int | None = None) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body) if size is None else size))
        self.send_header("content-type", "application/json")
        self.send_header("etag", f'"{hashlib.sha256(self.path.encode()).hexdigest()}"')
        self.send_header("x-repo-commit", COMMIT)
        self.end_headers()
        half = len(body) // 2
        self.wfile.write(body[:half])
        self.wfile.flush()
        if half > 2**20:
            assert self.go_on.wait(60)
        self.wfile.write(body[half:])


@pytest.fixture
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    Hub.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_download_tells_how_far_it_is(hub: str, tmp_path: Path) -> None:
    env = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", FETCH], env=env, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert next(lines) == "looking for org/tiny on the hub\n"
    assert any(re.fullmatch(r"downloading org/tiny: \d+ MiB so far\n", line) for line in lines)
    Hub.go_on.set()
    last = [*lines][-1]
    assert process.wait(60) == 0
    process.stdout.close()
    folder = Path(last.removeprefix("at ").strip())
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
