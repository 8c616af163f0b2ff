"""A service on a device that stays broken: a new process, or a supervisor that gives up."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from mlxstack.core.preset import AgentsSpec, Persist, ServerSpec
from mlxstack.host import services
from mlxstack.host.home import Home, make_home
from mlxstack.host.process import kill
from mlxstack.host.restart_policy import RestartPolicy
from mlxstack.host.services import Phase, ServiceSpec, ServiceState, read_state, write_json
from tests.api.requests import chat_body
from tests.api.running import tiny_preset
from tests.api.test_agents import history, turn, user
from tests.patience import PATIENCE_S, wait_until
from tests.ports import unused_port

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
QUICK = RestartPolicy(first_s=0.05, longest_s=0.1, max_crashes=2, window_s=300.0)


class Supervised:
    """A supervisor, and the service of its worker."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.home, port = Home(folder / "home"), unused_port()
        make_home(self.home)
        agents = AgentsSpec(persist=Persist.AFTER_TURN)
        preset = tiny_preset(folder / "tiny", server=ServerSpec(port=port), agents=agents)
        write_json(self.home.preset_file("one"), preset)
        file = str(self.home.preset_file("one"))
        self.url = f"http://127.0.0.1:{port}"
        # A worker that is forked finds the tests by itself.
        command = (sys.executable, "-m", "tests.mac.faulty_worker", file, str(self.home.root))
        spec = ServiceSpec(
            name="one",
            root=str(self.home.root),
            preset="one",
            url=self.url,
            worker=command,
            env=env if sys.platform == "linux" else {**env, "PYTHONPATH": str(ROOT)},
            policy=QUICK,
        )
        self.process = services.start(spec)

    @property
    def state(self) -> ServiceState | None:
        return read_state(self.home, "one")

    @property
    def log(self) -> str:
        return self.home.log_file("one").read_text()

    def is_healthy(self) -> bool:
        try:
            return httpx.get(self.url + "/health").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def supervised(folder: Path, **env: str) -> Iterator[Supervised]:
    service = Supervised(folder, env)
    try:
        yield service
    finally:
        service.process.kill()
        service.process.wait()
        if service.state and service.state.worker:
            kill(service.state.worker)


def until(question: Callable[[], object]) -> None:
    wait_until(question)


def is_replaced(service: Supervised, pid: int) -> bool:
    """Whether the worker is another process than `pid`."""
    state = service.state
    return state is not None and state.worker is not None and state.worker.pid != pid


def test_a_new_process_serves_the_agents_of_the_broken_one(tmp_path: Path) -> None:
    with (
        supervised(tmp_path) as service,
        httpx.Client(base_url=service.url, timeout=PATIENCE_S) as http,
    ):
        until(service.is_healthy)
        before = turn(http, "bob", user("remember this " * 20))
        assert service.state is not None
        assert service.state.worker is not None
        first = service.state.worker.pid
        os.kill(first, signal.SIGUSR1)
        for _ in range(2):
            try:
                http.post("/v1/chat/completions", json=chat_body("and this"))
            except httpx.TransportError:
                break
        until(lambda: is_replaced(service, first))
        until(service.is_healthy)
        assert [message["role"] for message in history(http, "bob")] == ["user", "assistant"]
        assert turn(http, "bob", user("go on"))["agent"]["n_tokens"] > before["agent"]["n_tokens"]
        assert "the GPU did not finish its work" in service.log
        assert service.state.exit_code == 1


def test_a_supervisor_gives_up_on_a_device_that_fails_at_every_start(tmp_path: Path) -> None:
    with supervised(tmp_path, FAULTY="1") as service:
        service.process.wait(PATIENCE_S)
        assert service.state is not None
        assert service.state.phase is Phase.CRASHED
        assert service.state.n_crashes == 2
        assert "SubmissionsIgnored" in service.log
        assert "giving up; see the log above" in service.log
