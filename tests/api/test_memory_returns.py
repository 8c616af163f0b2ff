"""Memory that a burst of requests has freed goes back to the system when the service rests."""

import asyncio
import ctypes
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import msgspec
import psutil
import pytest

from mlxstack.api import server
from mlxstack.api.dialects.native.events import frames
from mlxstack.core.preset import Preset, ServerSpec
from mlxstack.core.status import StatusFrame
from mlxstack.host.heap import trim_heap
from mlxstack.service.calls.status_feed import StatusFeed
from tests.api.requests import chat_body
from tests.api.running import standing, tiny_preset
from tests.api.test_serve import wait_for
from tests.patience import PATIENCE_S, wait_until
from tests.ports import unused_port

HAS_TRIM = hasattr(ctypes.CDLL(None), "malloc_trim")
pytestmark = [
    pytest.mark.mlx,
    pytest.mark.net,
    pytest.mark.skipif(not HAS_TRIM, reason="only glibc keeps what was freed"),
]

N_FREED = 200_000_000
# Every second block is freed: the heap has holes, but its end is in use. At SIGUSR1, old cycles
# become garbage, which only a full collection frees, and the process works without requests.
HOLES = f"""
import gc, logging, pathlib, signal, sys, threading, time
import msgspec
logging.basicConfig(level=logging.INFO)
from mlxstack.api.server import run
from mlxstack.core.preset import Preset
from mlxstack.service.calls import background_tasks
from tests import self_checks
self_checks.install()
background_tasks.REST_S = background_tasks.WORK_S = 0.2
preset = msgspec.json.decode(pathlib.Path(sys.argv[1]).read_bytes(), type=Preset)
blocks = []
def burst():
    blocks.extend(b"x" * 50_000 for _ in range({N_FREED} // 25_000))
    del blocks[::2]
def old_cycles(*_):
    cycles = [[b"x" * 50_000] for _ in range({N_FREED} // 50_000)]
    for cycle in cycles:
        cycle.append(cycle)
    gc.collect()
    threading.Timer(1, work).start()
    print("held", flush=True)
def work():
    # Memory that is being returned just now must not count as returned after this work.
    until = time.process_time() + 0.5
    while time.process_time() < until:
        pass
signal.signal(signal.SIGUSR1, old_cycles)
thread = threading.Thread(target=burst)
thread.start()
thread.join()
sys.exit(run(preset, pathlib.Path(sys.argv[2])))
"""


class TrimmedService(NamedTuple):
    """A service, and its process with a pipe of its output."""

    url: str
    process: subprocess.Popen[str]

    @property
    def n_bytes(self) -> int:
        """Resident memory."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def has_huge_pages(self) -> bool:
        """Whether Linux may use huge pages for the process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return "THP_enabled:\t1" in status

    def wait_for_small_pages(self) -> None:
        """Return when huge pages are off."""
        wait_until(lambda: not self.has_huge_pages)

    def wait_below(self, limit: float) -> None:
        """Return when so little is resident."""
        wait_until(lambda: self.n_bytes < limit, lambda: f"{self.n_bytes} of {limit} bytes")


@pytest.fixture(scope="module")
def running(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrimmedService]:
    folder = tmp_path_factory.mktemp("service")
    port = unused_port()
    preset = tiny_preset(model_folder, server=ServerSpec(port=port))
    (folder / "preset.json").write_bytes(msgspec.json.encode(preset))
    command = [sys.executable, "-c", HOLES, str(folder / "preset.json"), str(folder / "home")]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}")
            yield TrimmedService(f"http://127.0.0.1:{port}", process)
        finally:
            process.kill()


def test_a_service_at_rest_gives_freed_memory_back(running: TrimmedService) -> None:
    before = running.n_bytes
    httpx.post(running.url + "/v1/chat/completions", json=chat_body(), timeout=PATIENCE_S)
    running.wait_below(before - N_FREED / 2)


def test_garbage_of_work_without_requests_goes_back_too(running: TrimmedService) -> None:
    before = running.n_bytes
    running.process.send_signal(signal.SIGUSR1)
    assert running.process.stdout is not None
    assert running.process.stdout.readline() == "held\n"
    running.wait_below(before + N_FREED / 4)


def test_huge_pages_are_off_while_idle_and_on_for_a_request(running: TrimmedService) -> None:
    url = running.url + "/v1/chat/completions"
    httpx.post(url, json=chat_body(), timeout=PATIENCE_S)
    running.wait_for_small_pages()
    with httpx.stream(
        "POST", url, json=chat_body(stream=True, max_tokens=400), timeout=PATIENCE_S
    ) as sent:
        assert "data: " in next(sent.iter_text())
        assert running.has_huge_pages
    running.wait_for_small_pages()


def test_trimming_twice_does_no_harm() -> None:
    trim_heap()
    assert trim_heap() in (True, False)


def n_frames() -> int:
    """Status frames in the memory of this process."""
    return sum(isinstance(one, StatusFrame) for one in gc.get_objects())


def test_a_watcher_keeps_no_status_frame_while_it_waits() -> None:
    async def watch() -> None:
        service, _ = standing(ServerSpec())
        feed = frames(service, 0)
        before = n_frames()
        assert (await anext(feed)).startswith(b"event: frame")
        assert n_frames() == before
        await feed.aclose()

    asyncio.run(watch())


def test_watchers_share_the_frames_of_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[None] = []
    compute = StatusFeed.frame

    def counted(feed: StatusFeed) -> StatusFrame:
        computed.append(None)
        return compute(feed)

    monkeypatch.setattr(StatusFeed, "frame", counted)

    async def watch() -> None:
        service, _ = standing(ServerSpec())
        watchers = [frames(service, 3600) for _ in range(5)]
        for watcher in watchers:
            assert (await anext(watcher)).startswith(b"event: frame")
        (feed,) = {watcher.ag_frame.f_locals["feed"] for watcher in watchers}
        assert len(computed) == len(watchers)
        for _ in watchers:
            feed.update(3600)
        assert len(computed) == len(watchers) + 1
        for watcher in watchers:
            await watcher.aclose()

    asyncio.run(watch())


def test_imported_objects_are_frozen_before_a_model_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    frozen: list[bool] = []

    async def serve_later(preset: Preset, home: Path, source: Path | None) -> int:
        return len(frozen)

    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    monkeypatch.setattr(server, "_run", serve_later)
    assert server.run(tiny_preset(tmp_path), tmp_path) == 1
