"""Floods of odd pictures beside a plain chat: `python -m tests.endurance.picture_floods`.

Several clients send each picture of `odd_pictures`, 10,000 in one body, and a hundred at the limit
of pixels, as new images and in histories. Each is answered with 200, or with 400 and a reason; the
plain chat's answers stay those of before; the worker lives, its memory comes back, and no picture
fills its log.
"""

import base64
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from msgspec import Struct

from mlxstack.demo import MODEL_DIR
from tests.endurance.odd_pictures import GRAY, PICTURES, png
from tests.endurance.revivals import House
from tests.patience import PATIENCE_S, wait_until

CHAT = "/v1/chat/completions"
N_CLIENTS = 4
LIMIT_SIDE = 6300
MAX_GROWTH = 256 << 20
"""Bytes of memory that a worker may keep: features and KV of what was shown."""
MAX_LOGGED = 4000
"""Bytes of the log for a request."""
RETRY_S = 0.2
SILENT_S = 30.0


class PictureOutcome(Struct, frozen=True):
    """Bodies by their answer, refusals for now, plain answers, the slowest one's seconds, MiB."""

    n_ok: int
    n_refused: int
    n_busy: int
    n_plain: int
    plain_s: float
    mib_before: int
    mib_most: int
    mib_after: int


class PictureFloods:
    """A supervised demo, and counts of what its clients got. Single owner."""

    def __init__(self, root: Path) -> None:
        self._house = House(MODEL_DIR, root, n_deaths=2, silent_s=SILENT_S)
        self._http = httpx.Client(base_url=self._house.url, timeout=2 * PATIENCE_S)
        self._lock = threading.Lock()
        self._statuses = {200: 0, 400: 0, 503: 0}
        self._faults: list[str] = []
        self._plain_s: list[float] = []
        self._most = 0

    def run(self, bodies: Mapping[str, bytes]) -> PictureOutcome:
        """Send all bodies. Raises AssertionError."""
        self._house.start()
        try:
            expected = self._plain()
            before = self._n_bytes()
            n_logged = len(self._house.log())
            with self._beside(expected):
                self._send_all(bodies)
            n_requests = sum(self._statuses.values()) + len(self._plain_s)
            n_logged = len(self._house.log()) - n_logged
            assert not self._faults, self._faults
            assert self._house.state().n_crashes == 0, self._house.log()[-4000:]
            assert n_logged < n_requests * MAX_LOGGED, f"{n_logged} bytes of the log"
            assert self._http.get("/health").json()["status"] == "ok"
            assert self._plain() == expected
            wait_until(lambda: self._n_bytes() < before + MAX_GROWTH, "memory does not come back")
            return PictureOutcome(
                n_ok=self._statuses[200],
                n_refused=self._statuses[400],
                n_busy=self._statuses[503],
                n_plain=len(self._plain_s),
                plain_s=max(self._plain_s, default=0.0),
                mib_before=before >> 20,
                mib_most=self._most >> 20,
                mib_after=self._n_bytes() >> 20,
            )
        finally:
            self._house.end()
            self._http.close()

    def _send_all(self, bodies: Mapping[str, bytes]) -> None:
        """Each body by one of several clients."""
        left = list(reversed(bodies.items()))

        def send() -> None:
            while True:
                with self._lock:
                    if not left:
                        return
                    name, body = left.pop()
                try:
                    self._send(name, body)
                except Exception as error:
                    self._faults.append(f"{name}: {error!r}")

        clients = [threading.Thread(target=send) for _ in range(N_CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    def _send(self, name: str, body: bytes) -> None:
        """Until the answer is 200 or 400."""
        headers = {"content-type": "application/json"}
        while True:
            reply = self._http.post(CHAT, content=body, headers=headers)
            with self._lock:
                self._most = max(self._most, self._n_bytes())
                is_expected = reply.status_code in self._statuses
                if is_expected:
                    self._statuses[reply.status_code] += 1
            if reply.status_code == 200:
                return
            message = reply.json()["error"]["message"] if is_expected else reply.text
            if reply.status_code != 503:
                assert is_expected and message, f"{reply.status_code} {message[:300]}"
                assert "status" not in message.partition("decoding it")[2], message
                return
            assert int(reply.headers["retry-after"]) >= 1, name
            time.sleep(RETRY_S)

    @contextmanager
    def _beside(self, expected: object) -> Iterator[None]:
        """A plain chat, again and again, until the end of the block."""
        has_ended = threading.Event()

        def talk() -> None:
            while not has_ended.is_set():
                began = time.monotonic()
                try:
                    if self._plain() != expected:
                        self._faults.append("the plain chat's answer is another one")
                except Exception as error:
                    self._faults.append(f"plain chat: {error!r}")
                self._plain_s.append(time.monotonic() - began)

        plain = threading.Thread(target=talk)
        plain.start()
        try:
            yield
        finally:
            has_ended.set()
            plain.join()

    def _plain(self) -> object:
        """A greedy answer without a picture; tried again while the service is full."""
        messages = [{"role": "user", "content": "What is the color of a pear?"}]
        while True:
            body = {"messages": messages, "temperature": 0, "max_tokens": 8}
            reply = self._http.post(CHAT, json=body)
            if reply.status_code != 503:
                return reply.raise_for_status().json()["choices"][0]["message"]
            time.sleep(RETRY_S)

    def _n_bytes(self) -> int:
        worker = self._house.state().worker
        assert worker is not None
        return int(psutil.Process(worker.pid).memory_info().rss)


def picture_floods(root: Path, bodies: Mapping[str, bytes]) -> PictureOutcome:
    """Send all bodies to a service of the demo. Raises AssertionError."""
    return PictureFloods(root).run(bodies)


def bodies_of(names: frozenset[str] = frozenset()) -> dict[str, bytes]:
    """Requests with one picture each, by names of `PICTURES`; none: all."""
    return {
        name: _body([_message([make()])])
        for name, make in PICTURES.items()
        if not names or name in names
    }


def floods() -> dict[str, bytes]:
    """Requests of many pictures."""
    small = [png((8, 8), GRAY, after=n.to_bytes(4, "big")) for n in range(10_000)]
    large = [png((LIMIT_SIDE, LIMIT_SIDE), GRAY, 1, after=bytes((n,))) for n in range(100)]
    asked = {"role": "user", "content": "What is it?"}
    answer = {"role": "assistant", "content": "Letters."}
    earlier = {
        "10,000 pictures": _message(small),
        "10,000 times one picture": _message(small[:1] * 10_000),
        "a hundred at the limit of pixels": _message(large),
        "twenty at the limit of pixels": _message(large[:20]),
        "a hundred times one at the limit": _message(large[:1] * 100),
    }
    return {
        **{name: _body([message]) for name, message in earlier.items()},
        **{
            f"{name}, earlier": _body([content, answer, asked]) for name, content in earlier.items()
        },
    }


def _message(pictures: list[bytes]) -> dict[str, Any]:
    parts = [
        {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"},
        }
        for data in pictures
    ]
    return {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}


def _body(messages: list[dict[str, Any]]) -> bytes:
    return json.dumps({"messages": messages, "temperature": 0, "max_tokens": 2}).encode()


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp(prefix="pictures-"))
    print(picture_floods(folder, {**bodies_of(), **floods()}), flush=True)
