"""A service on a real disk that fills up and turns read-only; to be run under `unshare -rm`.

In a mount namespace of its own everybody may mount a small disk. Nobody else sees it.
"""

import gc
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from mlxstack.core.errors import SetupError
from mlxstack.store.database import Database
from tests.api.running import running, tiny_preset

N_BYTES = 6_000_000
N_FILES = 1000
SAVE = ("/slots/0?action=save", {"filename": "a.bin"})
RESTORE = ("/slots/0?action=restore", {"filename": "a.bin"})
CHAT = {"messages": [{"role": "user", "content": "the pear and the boat " * 20}], "id_slot": 0}


class Calls(httpx.Client):
    """Called, it posts a body."""

    def __call__(self, path: str, body: Any) -> httpx.Response:
        return self.post(path, json=body)


def main(model: Path, disk: Path) -> None:
    """Raises AssertionError where the service does not keep its word."""
    _mount(disk, f"size={N_BYTES},nr_inodes={N_FILES}")
    preset = tiny_preset(model)
    with running(preset, disk / "home") as live, _calling(live.url) as call:
        cold = _answer(call(*_chat(cache_prompt=False)))
        assert _answer(call(*_chat())) == cold
        assert call(*_turn()).status_code == 200
        assert call(*_turn("gone")).status_code == 200
        with _filled(disk):
            _refuses(call(*SAVE), 507, "the disk has 0 left")
            assert _answer(call(*_chat())) == cold
            assert call(*_turn()).status_code == 200
            assert call.delete("/v1/agents/gone").status_code == 200
            assert call.get("/v1/agents/gone").status_code == 404
        assert call(*SAVE).status_code == 200
        assert call(*_turn()).status_code == 200
        _mount(disk, "remount,ro")
        _refuses(call(*SAVE), 500, "read-only")
        assert call(*RESTORE).status_code == 200
        assert _answer(call(*_chat())) == cold
        assert call(*_turn()).status_code == 200
        n_messages = _n_messages(call)
        _refuses(call.delete("/v1/agents/a"), 500, "read-only")
        assert _n_messages(call) == n_messages
    with suppress(SetupError), running(preset, disk / "home"):
        raise AssertionError("it started where nothing can be kept")
    _mount(disk, "remount,rw")
    with running(preset, disk / "home") as live, _calling(live.url) as call:
        assert call(*RESTORE).status_code == 200
        assert _answer(call(*_chat())) == cold
        assert call(*_turn()).status_code == 200
    print("kept its word")


def _chat(**more: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {**CHAT, "max_tokens": 8, "temperature": 0, **more}


def _turn(agent: str = "a") -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": "a turn about rain"}]
    return f"/v1/agents/{agent}/generate", {"append": messages, "max_tokens": 4}


def _n_messages(call: Calls) -> int:
    return len(call.get("/v1/agents/a/history").raise_for_status().json()["messages"])


def _answer(reply: httpx.Response) -> object:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]


def _refuses(reply: httpx.Response, status: int, text: str) -> None:
    assert reply.status_code == status, reply.text
    assert text in reply.text, reply.text


def _calling(url: str) -> Calls:
    return Calls(base_url=url, timeout=60)


def _mount(disk: Path, options: str) -> None:
    """A disk cannot become read-only while KV of the last answer is still being written."""
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(disk)]
    end = time.monotonic() + 20
    _close_databases()
    while subprocess.run(command, capture_output=True, check=False).returncode:
        assert time.monotonic() < end, "the disk stays busy"
        time.sleep(0.1)
        _close_databases()


def _close_databases() -> None:
    """A disk with files open for writing cannot be mounted read-only; they open again."""
    for database in gc.get_objects():
        if isinstance(database, Database):
            database.close()


@contextmanager
def _filled(disk: Path) -> Iterator[None]:
    """Not a byte and not a name is left meanwhile."""
    ballast = disk / "ballast"
    ballast.mkdir()
    with suppress(OSError), (ballast / "bytes").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with suppress(OSError):
        for n in range(N_FILES):
            (ballast / str(n)).touch()
    yield
    shutil.rmtree(ballast)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
