"""A hub of our own: what huggingface_hub asks for a model's files, over a real socket."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MODEL = "org/tiny"
COMMIT = "c" * 40
LARGE = 2**20
PATIENCE_S = 60.0


class Hub:
    """Gives half of each large file, says so with `is_held`, and the rest after `go_on`."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.is_held = threading.Event()
        self.go_on = threading.Event()
        self.url = ""

    def env(self, folder: Path) -> dict[str, str]:
        """What a process needs to load from here into `folder`."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1"}


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Hub]:
    """A hub with one model, MODEL, of these files."""
    hub = Hub(files)
    answers = type("Answers", (_Answers,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), answers)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Answers(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, is_head: bool) -> None:
        files, path = self.hub.files, self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if "/tree/" in path:
            tree = [{"type": "file", "path": n, "size": len(b), "oid": n} for n, b in files.items()]
            self._send(json.dumps(tree).encode())
        elif path.startswith(f"/api/models/{MODEL}"):
            told = {"id": MODEL, "modelId": MODEL, "sha": COMMIT, "private": False}
            self._send(json.dumps({**told, "siblings": [{"rfilename": n} for n in files]}).encode())
        elif name in files:
            self._send(b"" if is_head else files[name], len(files[name]))
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
        if half > LARGE:
            self.hub.is_held.set()
            assert self.hub.go_on.wait(PATIENCE_S)
        self.wfile.write(body[half:])
