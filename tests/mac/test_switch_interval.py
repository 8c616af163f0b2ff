"""How long the MLX thread of a worker waits for the interpreter; the GPU is imitated."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from mlxstack.api import server
from mlxstack.core.preset import ModelSpec, Preset


@pytest.fixture(autouse=True)
def interval() -> Iterator[float]:
    """Interval of this process, restored after the test."""
    before = sys.getswitchinterval()
    yield before
    sys.setswitchinterval(before)


@pytest.mark.parametrize("is_on_gpu", [True, False])
def test_a_worker_on_a_gpu_switches_threads_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: float, is_on_gpu: bool
) -> None:
    intervals = []

    def serve(service: Any) -> int:
        service.close()
        intervals.append(sys.getswitchinterval())
        return 0

    monkeypatch.setattr(server, "has_gpu", lambda: is_on_gpu)
    monkeypatch.setattr(uvloop, "run", serve)
    assert server.run(Preset(model=ModelSpec(id="demo")), tmp_path) == 0
    assert intervals == [pytest.approx(0.0005) if is_on_gpu else interval]
