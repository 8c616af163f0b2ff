"""A hub of our own: what huggingface_hub asks for a model's files, over a real socket."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.patience import PATIENCE_S

MODEL = "org/tiny"
GATED = "org/gated"
COMMIT = "c" * 40
LARGE = 2**20


class Hub:
    """Gives half of each large file, says so with `is_held`, and the rest after `go_on`.

    It knows the model `name`, and GATED, whose files need a license. `fetched` are the files that
    were asked for with GET, `resumed` where ranges of them began. `refuses` is a status and a
    message for every question about the model, `served` are bytes of files in place of those
    that it lists, `n_cuts` how many answers end in the middle. `forged` are names in its answers
    (`sha256` of weights, `etag` of other files, `commit`) in place of the right ones.
    """

    def __init__(self, files: dict[str, bytes], name: str = MODEL) -> None:
        self.files = files
        self.name = name
        self.is_held = threading.Event()
        self.go_on = threading.Event()
        self.fetched: list[str] = []
        self.resumed: list[int] = []
        self.refuses: tuple[int, str] | None = None
        self.served: dict[str, bytes] = {}
        self.n_cuts = 0
        self.forged: dict[str, str] = {}
        self.has_ranges = True
        self.url = ""

    def env(self, folder: Path) -> dict[str, str]:
        """What a process needs to load from here into `folder`."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1"}


@contextmanager
def serving(files: dict[str, bytes], name: str = MODEL) -> Iterator[Hub]:
    """A hub with one model of these files."""
    hub = Hub(files, name)
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


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a model folder, as the hub gives them."""
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def _etag(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


class _Answers(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, is_head: bool) -> None:
        files = self.hub.files
        address = urlsplit(self.path)
        path = address.path
        name = address.path.rpartition("/")[2]
        if path == "/api/models":
            searched = parse_qs(address.query).get("search", [""])[0].lower()
            names = [self.hub.name] if searched in self.hub.name.lower() else []
            self._send(
                json.dumps(
                    [{"id": model_name, "modelId": model_name} for model_name in names]
                ).encode()
            )
        elif self.hub.refuses is not None:
            self._refuse(self.hub.refuses[0], "", self.hub.refuses[1])
        elif GATED in path:
            self._refuse(403, "GatedRepo")
        elif f"/{self.hub.name}/" not in f"{path}/":
            self._refuse(404, "RepoNotFound")
        elif "/tree/" in path:
            tree = [{"type": "file", "path": n, "size": len(b), "oid": n} for n, b in files.items()]
            self._send(json.dumps(tree).encode())
        elif path.startswith(f"/api/models/{self.hub.name}"):
            commit = self.hub.forged.get("commit", COMMIT)
            card = {"id": self.hub.name, "modelId": self.hub.name, "sha": commit, "private": False}
            self._send(json.dumps({**card, "siblings": [*map(self._told, files)]}).encode())
        elif name in files:
            self._give(name, is_head)
        else:
            self._refuse(404, "EntryNotFound")

    def _give(self, name: str, is_head: bool) -> None:
        body = self.hub.served.get(name, self.hub.files[name])
        self.hub.fetched += [] if is_head else [name]
        asked = int((self.headers["range"] or "bytes=0-")[6:].rstrip("-"))
        self.hub.resumed += [asked] if asked else []
        begin = asked if self.hub.has_ranges else 0
        if begin and begin >= len(body):
            self._refuse(416, "")
        else:
            content = b"" if is_head else body[begin:]
            if content and self.hub.n_cuts and name.endswith(".safetensors"):
                self.hub.n_cuts -= 1
                content = content[: len(content) // 2]
            etag = _etag(self.hub.files[name])
            if not name.endswith(".safetensors"):
                etag = self.hub.forged.get("etag", etag)
            self._send(content, len(body), begin, etag)

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        self.send_response(status)
        if code:
            self.send_header("x-error-code", code)
        self.send_header("x-error-message", message or code)
        self.send_header("content-length", "0")
        self.end_headers()

    def _told(self, name: str) -> dict[str, Any]:
        """A file in the answer about its model; weights have the hash of their bytes."""
        body = self.hub.files[name]
        digest = self.hub.forged.get("sha256", _etag(body))
        lfs = {"sha256": digest, "size": len(body), "pointerSize": 1}
        return {"rfilename": name, **({"lfs": lfs} if name.endswith(".safetensors") else {})}

    def _send(self, body: bytes, size: int | None = None, begin: int = 0, etag: str = "") -> None:
        size = len(body) if size is None else size
        self.send_response(206 if begin else 200)
        self.send_header("content-length", str(size - begin))
        if begin:
            self.send_header("content-range", f"bytes {begin}-{size - 1}/{size}")
        self.send_header("content-type", "application/json")
        self.send_header("etag", f'"{etag or _etag(self.path.encode())}"')
        self.send_header("x-repo-commit", COMMIT)
        self.end_headers()
        half = len(body) // 2
        self.wfile.write(body[:half])
        self.wfile.flush()
        if half > LARGE:
            self.hub.is_held.set()
            assert self.hub.go_on.wait(PATIENCE_S)
        self.wfile.write(body[half:])
