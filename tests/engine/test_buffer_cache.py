"""Freeing MLX's buffers while another engine of the process loads."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlxstack
from tests.patience import PATIENCE_S

FILL_AND_FREE = """
import sys, threading, time
import mlx.core as mx
from mlxstack.engine import device

from mlxstack.engine.kv.slot_restore import unfilled

sys.setswitchinterval(1e-5)
end = time.monotonic() + 2

def fill():
    with mx.stream(mx.new_stream(mx.cpu)):
        while time.monotonic() < end:
            unfilled(1 << 16)

def free():
    while time.monotonic() < end:
        device.release()

threads = [threading.Thread(target=work, daemon=True) for work in (fill, fill, free)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("done", flush=True)
"""


@pytest.mark.mlx
def test_buffers_are_freed_while_another_engine_loads_without_a_deadlock() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", FILL_AND_FREE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        out, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert b"done" in out


def test_the_engine_frees_buffers_through_the_one_function_that_excludes_loads() -> None:
    engine = Path(mlxstack.__file__).parent / "engine"
    callers = [
        p.name for p in engine.rglob("*.py") if re.search(r"mx\.clear_cache\(", p.read_text())
    ]
    assert callers == ["device.py"]
