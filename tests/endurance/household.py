"""A supervised service on two small models, for those who kill its worker."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import httpx

from mlxstack.core.preset import ModelSpec, Preset, QueueSpec, ServerSpec, SlotSpec
from mlxstack.host import services
from mlxstack.host.home import Home, make_home
from mlxstack.host.restart_policy import RestartPolicy
from mlxstack.host.services import ServiceSpec, ServiceState, read_state, write_json
from tests import models
from tests.ports import unused_port

N_SLOTS = 3
N_CTX = 2048
WAIT_S = 120.0
MODELS = {"a": models.LLAMA, "b": models.HYBRID}
TIRELESS = RestartPolicy(first_s=0.05, longest_s=0.1, max_crashes=10**6, look_s=0.5)


class Household:
    """`home` is where it keeps everything; `n_kills` how often its worker was killed."""

    def __init__(self, root: Path) -> None:
        self.home = Home(root / "home")
        make_home(self.home)
        self.home.presets.mkdir()
        for seed, (name, config) in enumerate(MODELS.items(), start=1):
            folder = models.write(root / name, config, seed=seed)
            text = f"model: {{id: {folder}, alias: {name}}}\n"
            text += f"slots: {{count: {N_SLOTS}, n_ctx: {N_CTX}}}\nqueue: {{max_waiting: 12}}\n"
            (self.home.presets / f"{name}.yaml").write_text(text)
        server = ServerSpec(port=unused_port(), drain_s=2)
        first = Preset(
            model=ModelSpec(id=str(root / "a"), alias="a"),
            name="one",
            slots=SlotSpec(count=N_SLOTS, n_ctx=N_CTX),
            queue=QueueSpec(max_waiting=12),
            server=server,
        )
        source = self.home.preset_file("one")
        write_json(source, first)
        self.url = f"http://127.0.0.1:{server.port}"
        self.n_kills = 0
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._plan = ServiceSpec(
            name="one",
            root=str(self.home.root),
            preset="one",
            url=self.url,
            worker=(sys.executable, "-m", "mlxstack.cli.main", "serve", str(source)),
            env={"MLX_STACK_HOME": str(self.home.root), "PYTHONUNBUFFERED": "1"},
            policy=TIRELESS,
        )

    def start(self) -> None:
        """Until it answers."""
        self._supervisor = services.start(self._plan)
        self.wait_for_worker(0)

    def kill(self) -> None:
        """kill -9, until the supervisor has brought another one."""
        old = self._worker()
        os.kill(old, signal.SIGKILL)
        self.n_kills += 1
        self.wait_for_worker(old)

    def wait_for_worker(self, old: int) -> None:
        """Until another worker than `old` answers."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            with suppress(httpx.TransportError):
                if self._worker() not in {0, old} and httpx.get(f"{self.url}/health").is_success:
                    return
            time.sleep(0.05)
        raise AssertionError(self.log()[-4000:])

    def end(self) -> None:
        """As `mlx-stack down` does."""
        state = self._state()
        if state is not None:
            services.stop(self.home, state, 15.0)
        if self._supervisor is not None:
            self._supervisor.wait(WAIT_S)

    def log(self) -> str:
        """What the worker and its supervisor said."""
        return self.home.log_file("one").read_text(errors="replace")

    def model(self) -> str:
        """What is served."""
        cards = httpx.get(f"{self.url}/v1/models").raise_for_status().json()
        return str(cards["data"][0]["id"])

    def _state(self) -> ServiceState | None:
        return read_state(self.home, "one")

    def _worker(self) -> int:
        state = self._state()
        return state.worker.pid if state is not None and state.worker is not None else 0
