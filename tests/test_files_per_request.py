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
from msgspec import Struct

import mlxstack
from mlxstack.demo import MODEL_DIR
from mlxstack.features.vision.images.checkpoint import TOWER
from tests.api.running import running
from tests.demo.test_demo_sees import asked, plain
from tests.one_chat import PRESET, deltas, let_intervals_rest, stream, user
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

FEATURES = "features/"
"""Folder of the features; all other files are the spine."""


class FileLimit(Struct, frozen=True):
    """Most files that a request may run."""

    total: int
    spine: int
    """Those outside of `FEATURES`."""


CHAT = FileLimit(total=101, spine=76)
CHAT_WITH_TOOLS = FileLimit(total=113, spine=78)
CHAT_WITH_AN_IMAGE = FileLimit(total=112, spine=79)
PARKED_TURN = FileLimit(total=112, spine=87)

PATH = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the weather of a city", "parameters": CITY}
TOOLS = [{"type": "function", "function": WEATHER}]
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
def http_with_tower(
    counter: FileCounter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[httpx.Client]:
    """The whole demo, one slot."""
    let_intervals_rest(monkeypatch)
    with (
        running(PRESET, tmp_path) as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as client,
    ):
        yield client


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


def check(files: list[str], limit: FileLimit) -> None:
    """Fail with the files of each package where they are more than `limit`."""
    by_package = defaultdict[str, list[str]](list)
    for file in files:
        package, _, name = file.partition("/")
        by_package[package].append(name)
    spine = [file for file in files if not file.startswith(FEATURES)]
    lines = [f"{package} {len(names)}: {', '.join(names)}" for package, names in by_package.items()]
    table = "\n".join([f"{len(files)} files ran, {len(spine)} of the spine; {limit}", *lines])
    assert {"api/guards.py", "engine/thread.py"} <= set(files), "a thread was not counted"
    assert len(files) <= limit.total, table
    assert len(spine) <= limit.spine, table


def test_a_streamed_chat_runs_few_files(http: httpx.Client, counter: FileCounter) -> None:
    # The first request of a service compiles templates and measures steps.
    stream(http, PATH, messages=user("Good morning."))
    with counter.counting():
        assert stream(http, PATH, messages=user("Hello, who are you?"))
    check(counter.ours(), CHAT)


def test_a_chat_with_tools_runs_few_files(http: httpx.Client, counter: FileCounter) -> None:
    body = {"messages": user("What is the weather in Oslo?"), "tools": TOOLS, "max_tokens": 64}
    deltas(http, PATH, **body)
    with counter.counting():
        answer = deltas(http, PATH, **body)
    assert any(delta.get("tool_calls") for delta in answer), answer
    check(counter.ours(), CHAT_WITH_TOOLS)


def test_a_chat_with_an_image_runs_few_files(
    http_with_tower: httpx.Client, counter: FileCounter
) -> None:
    stream(http_with_tower, PATH, messages=[asked(plain("red", "A").image)])
    with counter.counting():
        assert stream(http_with_tower, PATH, messages=[asked(plain("blue", "B").image)])
    check(counter.ours(), CHAT_WITH_AN_IMAGE)


def test_a_parked_agents_next_turn_runs_few_files(http: httpx.Client, counter: FileCounter) -> None:
    path = "/v1/agents/bob/generate"
    stream(http, path, append=user("Remember the word apple, and tell me who you are. " * 20))
    stream(http, PATH, messages=user("Another conversation takes the slot."))
    with counter.counting():
        assert stream(http, path, append=user("Which word was it?"))
    cached = http.get("/v1/agents/bob").json()["n_cached"]
    assert cached > 100, "the turn was not resumed from parked KV"
    check(counter.ours(), PARKED_TURN)
