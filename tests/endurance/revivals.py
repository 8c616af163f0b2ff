"""kill -9 of the worker under load, again and again: it is back by itself, until it flaps.

Whoever waits is told so, agents find their KV again, and a killed supervisor leaves no orphan.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeVar

import httpx
from msgspec import Struct

from mlxstack.control.probe import ServiceHealthLevel, ServiceStatus, survey
from mlxstack.core.preset import ModelSpec, Preset, ServerSpec, SlotSpec
from mlxstack.host import services
from mlxstack.host.hardware import for_mlx
from mlxstack.host.home import Home, make_home
from mlxstack.host.process import is_alive
from mlxstack.host.restart_policy import RestartPolicy
from mlxstack.host.services import ServiceSpec, ServiceState, read_state, write_json
from mlxstack.store.agent_history import folder_of
from tests.endurance.talkers import Talk, Talkers, answer
from tests.ports import unused_port

T = TypeVar("T")

NAME = "revived"
N_SLOTS = 3
N_TALKERS = 5
WAIT_S = 60.0


class Outcome(Struct, frozen=True):
    """`talk` is what the clients lived through; shares are of the prompts of who came back."""

    n_revivals: int
    n_returns: int
    least_share: float
    talk: Talk


class House:
    """A supervised service over a home, and how it is waited for."""

    def __init__(self, model: Path, root: Path, n_deaths: int, silent_s: float = 2.0) -> None:
        self.home = Home(root / "home")
        make_home(self.home)
        server = ServerSpec(port=unused_port(), drain_s=2)
        self.url = f"http://127.0.0.1:{server.port}"
        preset = Preset(
            model=ModelSpec(id=str(model)),
            name=NAME,
            slots=SlotSpec(count=N_SLOTS, n_ctx=4096),
            server=server,
        )
        write_json(self.home.preset_file(NAME), preset)
        self._plan = ServiceSpec(
            name=NAME,
            root=str(self.home.root),
            preset=NAME,
            url=self.url,
            worker=(sys.executable, "-m", "mlxstack.cli.main", "serve",
                    str(self.home.preset_file(NAME))),
            env=for_mlx(os.environ) | {"MLX_STACK_HOME": str(self.home.root)},
            policy=RestartPolicy(0.1, 0.5, n_deaths, 600.0, 4.0, look_s=0.5, silent_s=silent_s),
        )  # fmt: skip

    def start(self) -> None:
        """As `up` does."""
        self._supervisor = services.start(self._plan)
        self.healthy(n_restarts=0)

    def healthy(self, n_restarts: int) -> ServiceStatus:
        """Wait until `status` calls it healthy after so many restarts."""

        def is_back() -> ServiceStatus | None:
            status = self.look()
            if status is None or status.state is not ServiceHealthLevel.HEALTHY:
                return None
            return status if status.n_restarts == n_restarts else None

        return self.until(is_back)

    def look(self) -> ServiceStatus | None:
        """The service as `status` shows it."""
        return next(iter(survey(self.home).services), None)

    def state(self) -> ServiceState:
        """What the supervisor last wrote."""
        state = read_state(self.home, NAME)
        assert state is not None
        return state

    def is_on_disk(self, agent: str) -> bool:
        """Whether KV of the agent was saved."""
        folder = self.home.agents / folder_of(agent)
        return any(folder.glob("*/manifest.json"))

    def strike(self, number: signal.Signals) -> None:
        """Send a signal to the worker."""
        worker = self.state().worker
        assert worker is not None
        os.kill(worker.pid, number)

    def behead(self) -> None:
        """kill -9 of the supervisor; its worker must go by itself."""
        worker = self.state().worker
        assert worker is not None
        self._supervisor.kill()
        self._supervisor.wait()
        self.until(lambda: not is_alive(worker))

    def gave_up(self) -> None:
        """Wait for the end of the supervisor, which must say why."""
        assert self._supervisor.wait(WAIT_S) == 1

    def end(self) -> None:
        """As `down` does."""
        if self._supervisor.poll() is None:
            services.stop(self.home, self.state(), 10.0)
            self._supervisor.wait(WAIT_S)

    def log(self) -> str:
        """All that the worker and the supervisor said."""
        return self.home.log_file(NAME).read_text(errors="replace")

    def until(self, question: Callable[[], T | None]) -> T:
        """The first answer that is true."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            result = question()
            if result:
                return result
            time.sleep(0.02)
        raise AssertionError(f"not within {WAIT_S} s: {self.log()[-4000:]}")


def revivals(model: Path, root: Path, n_blows: int, seed: int) -> Outcome:
    """One blow after the other, then one too many, then the supervisor. Raises AssertionError.

    The last blow stops the worker instead of killing it; the supervisor has to do that.
    """
    house = House(model, root, n_deaths=n_blows + 1)
    random = Random(seed)
    shares: list[float] = []
    house.start()
    try:
        with Talkers(house.url, N_TALKERS) as talkers:
            talkers.wait_for_all()
            talkers.begin_round()
            talkers.wait_for_all()
            # A write waits for an idle engine, some seconds at most; kill -9 may come before it.
            house.until(lambda: all(house.is_on_disk(talker.agent) for talker in talkers.all))
            for n, blow in enumerate([*[signal.SIGKILL] * (n_blows - 1), signal.SIGSTOP], start=1):
                time.sleep(random.random())
                house.strike(blow)
                house.until(lambda n=n: house.state().n_crashes == n)
                talkers.begin_round()
                seen = house.healthy(n_restarts=n)
                assert "was killed by SIGKILL" in seen.detail
                shares += talkers.wait_for_all()
            house.strike(signal.SIGKILL)
            house.gave_up()
        _check_flap(house, n_blows + 1)
        house.start()
        assert all(share > 0 for share in _returns(house, talkers))
        house.behead()
        _check_no_orphan(house)
    finally:
        house.end()
    assert min(shares) > 0
    return Outcome(n_blows, len(shares), round(min(shares), 3), talkers.talk())


def _check_flap(house: House, n_deaths: int) -> None:
    status = house.look()
    assert status is not None and status.state is ServiceHealthLevel.CRASHED
    assert f"gave up after {n_deaths} crashes" in status.detail
    assert f"the worker died {n_deaths} times within 600 s; giving up" in house.log()


def _returns(house: House, talkers: Talkers) -> list[float]:
    """How much of each agent's last prompt is still known, and that its answer is the same."""
    shares = []
    with httpx.Client(base_url=house.url, timeout=WAIT_S) as client:
        for talker in talkers.all:
            asked, text = talker.last
            warm = answer(client, talker.agent, asked)
            cold = answer(client, None, asked, cache_prompt=False)
            assert warm.text == cold.text == text, talker.agent
            shares.append(warm.n_cached / warm.n_prompt)
    return shares


def _check_no_orphan(house: House) -> None:
    status = house.look()
    assert status is not None and status.state is ServiceHealthLevel.CRASHED
    assert services.running(house.home) == []
    assert services.sweep(house.home, NAME) is not None
    assert house.home.pid_file(NAME).exists() is False
