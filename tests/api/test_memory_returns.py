"""Memory that a burst of requests has freed goes back to the system when the service rests."""

import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest

from mlxstack.core.preset import ServerSpec
from mlxstack.host.heap import trim_heap
from tests.api.running import tiny_preset
from tests.api.speaking import chat_body
from tests.api.test_serve import free_port, wait_for

HAS_TRIM = hasattr(ctypes.CDLL(None), "malloc_trim")
pytestmark = [
    pytest.mark.mlx,
    pytest.mark.net,
    pytest.mark.skipif(not HAS_TRIM, reason="only glibc keeps what was freed"),
]

N_FREED = 200_000_000
# Every second block is freed: the heap has holes, but its end is in use.
HOLES = f"""
import logging, pathlib, sys, threading
import msgspec
logging.basicConfig(level=logging.INFO)
from mlxstack.api.server import run
from mlxstack.core.preset import Preset
from mlxstack.service import background_tasks
background_tasks.REST_S = 0.2
preset = msgspec.json.decode(pathlib.Path(sys.argv[1]).read_bytes(), type=Preset)
blocks = []
def burst():
    blocks.extend(b"x" * 50_000 for _ in range({N_FREED} // 25_000))
    del blocks[::2]
thread = threading.Thread(target=burst)
thread.start()
thread.join()
sys.exit(run(preset, pathlib.Path(sys.argv[2])))
"""


def test_a_service_at_rest_gives_freed_memory_back(model_folder: Path, tmp_path: Path) -> None:
    port = free_port()
    preset = tiny_preset(model_folder, server=ServerSpec(port=port))
    (tmp_path / "preset.json").write_bytes(msgspec.json.encode(preset))
    command = [sys.executable, "-c", HOLES, str(tmp_path / "preset.json"), str(tmp_path / "home")]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, env=env) as found:
        try:
            wait_for(url)
            memory = psutil.Process(found.pid).memory_info
            before = memory().rss
            httpx.post(url + "/v1/chat/completions", json=chat_body(), timeout=60)
            for _ in range(300):
                if memory().rss < before - N_FREED / 2:
                    break
                time.sleep(0.1)
            assert memory().rss < before - N_FREED / 2
        finally:
            found.kill()


def test_trimming_twice_does_no_harm() -> None:
    trim_heap()
    assert trim_heap() in (True, False)
