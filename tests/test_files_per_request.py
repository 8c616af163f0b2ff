"""Counts the files in which one request runs code, from its first byte to its last.

A request that touches few files can be read in one sitting. The limits only ever fall.
"""

import shutil
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

import mlxstack
from mlxstack.demo import MODEL_DIR
from mlxstack.text.images.checkpoint import TOWER
from tests.api.running import running
from tests.one_chat import PRESET, let_intervals_rest, stream, user
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

MAX_FILES_OF_A_CHAT = 65
MAX_FILES_OF_A_PARKED_TURN = 73

PACKAGE = Path(mlxstack.__file__).parent


class FileCounter:
    """Profiler of every thread that starts after it; `files` are those seen while it counts."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._is_counting = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_counting and event == "call":
            self.files.add(frame.f_code.co_filename)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self.files.clear()
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False

    def ours(self) -> list[str]:
        """The files of the package, relative to it."""
        paths = (Path(name) for name in list(self.files))
        return sorted(
            str(path.relative_to(PACKAGE)) for path in paths if path.is_relative_to(PACKAGE)
        )


@pytest.fixture
def counter() -> Iterator[FileCounter]:
    found = FileCounter()
    threading.setprofile(found)
    yield found
    threading.setprofile(None)


@pytest.fixture
def http(
    counter: FileCounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[httpx.Client]:
    """The demo without its tower, one slot; periodic work, which no request causes, rests."""
    let_intervals_rest(monkeypatch)
    text = shutil.copytree(MODEL_DIR, tmp_path / "text", ignore=shutil.ignore_patterns(TOWER))
    monkeypatch.setattr("mlxstack.engine.loading.loader.MODEL_DIR", text)
    assert sys.getprofile() is None
    with (
        running(PRESET, tmp_path) as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as client,
    ):
        yield client


def report(files: list[str], limit: int) -> str:
    """The files of each package."""
    by_package = defaultdict[str, list[str]](list)
    for file in files:
        package, _, name = file.partition("/")
        by_package[package].append(name)
    lines = [f"{package} {len(names)}: {', '.join(names)}" for package, names in by_package.items()]
    return "\n".join([f"{len(files)} files ran, {limit} may:", *lines])


def test_one_streamed_chat_runs_few_files(http: httpx.Client, counter: FileCounter) -> None:
    # The first request of a service compiles templates and measures steps.
    stream(http, "/v1/chat/completions", messages=user("Good morning."))
    with counter.counting():
        assert stream(http, "/v1/chat/completions", messages=user("Hello, who are you?"))
    files = counter.ours()
    assert {"api/guards.py", "engine/core.py"} <= set(files), "a thread was not counted"
    assert len(files) <= MAX_FILES_OF_A_CHAT, report(files, MAX_FILES_OF_A_CHAT)


def test_a_parked_agents_next_turn_runs_few_files(http: httpx.Client, counter: FileCounter) -> None:
    path = "/v1/agents/bob/generate"
    stream(http, path, append=user("Remember the word apple, and tell me who you are. " * 20))
    stream(http, "/v1/chat/completions", messages=user("Another conversation takes the slot."))
    with counter.counting():
        assert stream(http, path, append=user("Which word was it?"))
    files = counter.ours()
    cached = http.get("/v1/agents/bob").json()["n_cached"]
    assert cached > 100, "the turn was not resumed from parked KV"
    assert len(files) <= MAX_FILES_OF_A_PARKED_TURN, report(files, MAX_FILES_OF_A_PARKED_TURN)
