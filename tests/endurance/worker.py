"""A service process over a home of its own, which is killed and started again."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
from msgspec.structs import replace

from mlxstack.core.preset import Preset, ServerSpec
from tests.ports import unused_port

WAIT_S = 240.0


class Worker:
    """Serves a preset from a file, in which a change of the model is kept for the next start."""

    def __init__(self, root: Path, preset: Preset, *module: str) -> None:
        self._module = module or ("mlxstack.cli.main", "serve")
        self.home = root / "home"
        (self.home / "presets").mkdir(parents=True)
        self._source = root / "preset.json"
        server = ServerSpec(port=unused_port(), drain_s=2)
        self.url = f"http://127.0.0.1:{server.port}"
        self._source.write_bytes(msgspec.json.encode(replace(preset, server=server)))
        self._process: subprocess.Popen[bytes] | None = None
        self.n_starts = 0

    def start(self) -> None:
        """Start, and wait until it is healthy. Raises AssertionError with its log."""
        command = [sys.executable, "-m", *self._module, str(self._source)]
        env = {**os.environ, "MLX_STACK_HOME": str(self.home)}
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        self.n_starts += 1
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").is_success:
                    return
            time.sleep(0.05)
        raise AssertionError((self.home / "log").read_text()[-4000:])

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def end(self, number: int = signal.SIGTERM) -> None:
        """End the process by a signal."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(WAIT_S)
