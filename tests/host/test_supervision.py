"""A1, A9, A15: one real supervisor, real workers, real signals."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from mlxstack.control import supervisor
from mlxstack.core.preset import ModelSpec, Preset, ServerSpec, SlotSpec
from mlxstack.host import services
from mlxstack.host.home import Home, make_home
from mlxstack.host.log_lines import read
from mlxstack.host.process import ProcessId, identify, is_alive, kill, refusal
from mlxstack.host.restart_policy import RestartPolicy
from mlxstack.host.services import (
    Phase,
    ServiceSpec,
    ServiceState,
    claim,
    mark_stopped,
    owner,
    read_state,
    write_json,
    write_private,
)
from tests.patience import PATIENCE_S
from tests.patience import wait_until as until
from tests.ports import unused_port

pytestmark = pytest.mark.net

WORKER = Path(__file__).parent / "worker.py"
QUICK = RestartPolicy(
    first_s=0.05,
    longest_s=0.1,
    max_crashes=3,
    window_s=600.0,
    grace_s=2.0,
    look_s=0.25,
    silent_s=PATIENCE_S,
    stuck_s=4.0,
)
SILENT = msgspec.structs.replace(QUICK, silent_s=2.0)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    make_home(home)
    return home


class Started:
    """A supervisor in the background, with what a test asks of it."""

    def __init__(self, home: Home, mode: str, policy: RestartPolicy) -> None:
        self.home = home
        self.port = unused_port()
        preset = Preset(
            model=ModelSpec("demo"),
            name="one",
            slots=SlotSpec(count=2, n_ctx=128),
            server=ServerSpec(port=self.port),
        )
        write_json(home.preset_file("one"), preset)
        self.spec = ServiceSpec(
            name="one",
            root=str(home.root),
            preset="one",
            url=f"http://127.0.0.1:{self.port}",
            worker=(sys.executable, str(WORKER), str(home.preset_file("one"))),
            env={"WORKER_MODE": mode},
            policy=policy,
        )
        self.process = services.start(self.spec)

    def state(self) -> ServiceState | None:
        state = read_state(self.home, "one")
        return state if state and state.supervisor.pid == self.process.pid else None

    def listening(self) -> ServiceState:
        def answers() -> ServiceState | None:
            state = self.state()
            is_up = state and state.worker and is_alive(state.worker)
            taken = refusal("127.0.0.1", self.port) is not None
            return state if is_up and taken else None

        found = until(answers)
        assert isinstance(found, ServiceState)
        return found

    def log(self) -> str:
        return self.home.log_file("one").read_text()


@pytest.fixture
def started(home: Home) -> Iterator[Callable[[str], Started]]:
    made: list[Started] = []

    def start(mode: str, policy: RestartPolicy = QUICK) -> Started:
        made.append(Started(home, mode, policy))
        return made[-1]

    yield start
    for one in made:
        state = one.state()
        one.process.kill()
        one.process.wait()
        if state and state.worker:
            kill(state.worker)


def test_a1_the_worker_runs_and_its_words_are_logged(started: Callable[[str], Started]) -> None:
    one = started("ok")
    state = one.listening()
    assert state.phase is Phase.RUNNING
    assert int(one.home.pid_file("one").read_text()) == one.process.pid
    assert owner(one.home, "one") is not None
    until(lambda: "worker says hello" in one.log())
    assert one.home.log_file("one").stat().st_mode & 0o077 == 0
    files = [file for file in one.home.root.rglob("*") if file.is_file()]
    assert one.home.supervisor_log("one") in files
    assert [file for file in files if file.stat().st_mode & 0o077] == []


def test_a9_a_killed_worker_is_started_again(started: Callable[[str], Started]) -> None:
    one = started("ok")
    first = one.listening().worker
    assert first is not None
    kill(first)
    until(lambda: (s := one.state()) and s.n_crashes == 1 and s.phase is Phase.RUNNING)
    second = one.listening()
    assert second.worker is not None
    assert second.worker.pid != first.pid
    assert second.exit_code == -signal.SIGKILL
    assert f"worker {first.pid} was killed by SIGKILL, as when memory runs out" in one.log()


@pytest.mark.parametrize(
    ("policy", "how", "why"),
    [
        (SILENT, signal.SIGSTOP, "has not answered"),
        (QUICK, signal.SIGUSR1, "was unhealthy for 4 s (last error: no turn ends)"),
    ],
)
def test_a9_a_stuck_worker_is_killed_and_started_again(
    started: Callable[..., Started], policy: RestartPolicy, how: signal.Signals, why: str
) -> None:
    # On a busy machine the next worker may be late as well, and be killed too.
    one = started("ok", msgspec.structs.replace(policy, max_crashes=1000))
    first = one.listening().worker
    assert first is not None
    os.kill(first.pid, how)
    until(lambda: (s := one.state()) and s.n_crashes >= 1 and s.phase is Phase.RUNNING)
    second = one.listening()
    assert second.worker is not None and second.worker.pid != first.pid
    assert not is_alive(first)
    assert why in second.exit_summary and second.exit_summary.endswith(" and was killed by SIGKILL")
    messages = [read(line).message for line in one.log().splitlines()]
    killed = [message for message in messages if f"worker {first.pid} " in message]
    assert any(why in message and message.endswith("; killing it") for message in killed)
    assert supervisor.probe(one.spec.url, PATIENCE_S).is_well


def test_a_disk_that_refuses_ends_nobody(started: Callable[[str], Started]) -> None:
    one = started("ok")
    first = one.listening().worker
    assert first is not None
    file = one.home.state_file("one")
    file.unlink()
    file.mkdir()
    kill(first)
    until(lambda: one.log().count("listening") == 2)
    assert f"{file} cannot be written" in one.log()
    file.rmdir()
    one.process.terminate()
    assert one.process.wait(PATIENCE_S) == 0
    last = read_state(one.home, "one")
    assert last is not None and (last.phase, last.n_crashes) == (Phase.STOPPED, 1)


def test_a_supervisor_that_cannot_begin_says_why_in_words(
    home: Home, started: Callable[[str], Started]
) -> None:
    home.state_file("one").mkdir()
    assert started("ok").process.wait(PATIENCE_S) == 1
    told = home.supervisor_log("one").read_text()
    assert told == f"error: {home.state_file('one')}: Is a directory\n"


def test_a9_who_never_gets_well_flaps_too(started: Callable[[str], Started]) -> None:
    one = started("ok")
    for n_deaths in (1, 2, 3):
        worker = one.listening().worker
        assert worker is not None
        until(lambda: supervisor.probe(one.spec.url, PATIENCE_S).is_well)
        os.kill(worker.pid, signal.SIGUSR1)
        until(lambda n=n_deaths: (s := one.state()) and s.n_crashes == n)
    assert one.process.wait(PATIENCE_S) == 1
    assert "died 3 times within 600 s; giving up" in one.log()


def test_a9_sigterm_drains_the_worker_and_cleans_up(started: Callable[[str], Started]) -> None:
    one = started("ok")
    state = one.listening()
    assert services.stop(one.home, state, 10.0) is False
    assert one.process.wait(PATIENCE_S) == 0
    assert not one.home.pid_file("one").exists()
    final = read_state(one.home, "one")
    assert final is not None and final.phase is Phase.STOPPED
    assert state.worker is not None and not is_alive(state.worker)
    assert "drained, bye" in one.log()


def test_a9_a_deaf_worker_is_killed_after_its_grace(started: Callable[[str], Started]) -> None:
    one = started("deaf")
    state = one.listening()
    assert services.stop(one.home, state, 10.0) is False
    assert state.worker is not None and not is_alive(state.worker)
    assert "did not stop within 2 s; killing it" in one.log()


def test_a9_a_frozen_supervisor_is_killed_with_its_worker(
    started: Callable[[str], Started],
) -> None:
    one = started("deaf")
    state = one.listening()
    os.kill(one.process.pid, signal.SIGSTOP)
    assert services.stop(one.home, state, 0.5) is True
    assert state.worker is not None and not is_alive(state.worker)
    assert not one.home.pid_file("one").exists()
    final = read_state(one.home, "one")
    assert final is not None and final.phase is Phase.STOPPED


def test_a_flapping_worker_is_given_up_loudly(started: Callable[[str], Started]) -> None:
    one = started("flaps")
    assert one.process.wait(PATIENCE_S) == 1
    final = read_state(one.home, "one")
    assert final is not None and final.phase is Phase.CRASHED and final.n_crashes == 3
    assert "died 3 times within 600 s; giving up" in one.log()
    assert not one.home.pid_file("one").exists()


def test_a_hopeless_worker_is_not_started_again(started: Callable[[str], Started]) -> None:
    one = started("hopeless")
    assert one.process.wait(PATIENCE_S) == 1
    final = read_state(one.home, "one")
    assert final is not None and final.n_crashes == 1 and final.exit_code == 78
    assert services.last_error(final) == "this model cannot be served"


@pytest.mark.parametrize("mode", ["ok", "deaf"])
def test_a9_a_worker_does_not_outlive_a_killed_supervisor(
    started: Callable[[str], Started], mode: str
) -> None:
    one = started(mode)
    state = one.listening()
    one.process.kill()
    one.process.wait()
    assert state.worker is not None
    worker = state.worker
    until(lambda: not is_alive(worker))
    assert owner(one.home, "one") is None
    assert services.running(one.home) == []
    cleared = services.sweep(one.home, "one")
    assert cleared is not None and str(one.home.pid_file("one")) in cleared
    assert services.sweep(one.home, "one") is None


def test_a15_a_second_supervisor_is_refused_by_name(started: Callable[[str], Started]) -> None:
    one = started("ok")
    one.listening()
    before = one.home.state_file("one").read_bytes()
    second = services.start(one.spec)
    assert second.wait(PATIENCE_S) == 1
    told = one.home.supervisor_log("one").read_text()
    assert f"already running: pid {one.process.pid}, preset one, {one.spec.url}" in told
    assert one.home.state_file("one").read_bytes() == before
    assert owner(one.home, "one") is not None


@pytest.fixture
def bystander() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_a15_a_foreign_or_reused_pid_is_stale(
    home: Home, bystander: "subprocess.Popen[bytes]"
) -> None:
    foreign = identify(bystander.pid)
    assert foreign is not None
    plan = ServiceSpec("one", str(home.root), "one", "http://127.0.0.1:1", ("true",))
    state = ServiceState(plan, Phase.RUNNING, foreign)
    write_json(home.state_file("one"), state)
    write_private(home.pid_file("one"), b"%d\n" % bystander.pid)
    assert owner(home, "one") is not None

    reused = msgspec.structs.replace(foreign, born=foreign.born - 60)
    write_json(home.state_file("one"), msgspec.structs.replace(state, supervisor=reused))
    assert owner(home, "one") is None

    write_json(home.state_file("one"), state)
    write_private(home.pid_file("one"), b"1\n")
    assert owner(home, "one") is None
    write_private(home.pid_file("one"), b"garbage")
    assert owner(home, "one") is None

    write_private(home.pid_file("one"), b"%d\n" % bystander.pid)
    home.state_file("one").write_text("{half")
    assert owner(home, "one") is None
    assert services.sweep(home, "one") is not None
    assert psutil.pid_exists(bystander.pid)


def test_a15_who_clears_after_the_dead_takes_no_name_from_the_living(home: Home) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf')"
    args = [sys.executable, "-uc", f"{code}; time.sleep(60)"]
    me = identify(os.getpid())
    assert me is not None
    with subprocess.Popen(args, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdout.readline() == b"deaf\n"
        slow = msgspec.structs.replace(QUICK, grace_s=3.0)
        plan = ServiceSpec(
            "one", str(home.root), "one", "http://127.0.0.1:1", ("true",), policy=slow
        )
        dead = ServiceState(plan, Phase.RUNNING, ProcessId(me.pid, 1.0), identify(worker.pid))
        write_json(home.state_file("one"), dead)
        write_private(home.pid_file("one"), b"%d\n" % me.pid)
        told: list[str | None] = []
        sweeping = threading.Thread(target=lambda: told.append(services.sweep(home, "one")))
        sweeping.start()
        claim(ServiceState(plan, Phase.STARTING, me))
        assert worker.poll() is None
        sweeping.join()
        worker.kill()
    mark_stopped(home, dead)
    assert told == [None]
    living = owner(home, "one")
    assert living is not None and living.phase is Phase.STARTING


async def test_of_many_claims_at_once_one_wins(home: Home) -> None:
    plan = ServiceSpec(
        "one", str(home.root), "one", "http://127.0.0.1:1", (sys.executable, "-c", "1")
    )
    write_json(home.spec_file("one"), plan)
    code = (
        "import sys; from pathlib import Path; "
        "from mlxstack.host.services import *; from mlxstack.host.process import identify; "
        "plan = read_json(Path(sys.argv[1]), ServiceSpec); "
        "claim(ServiceState(plan, Phase.RUNNING, identify(os.getpid()))); print('won'); "
        "sys.stdout.flush(); sys.stdin.read()"
    )
    racers = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            code,
            str(home.spec_file("one")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        for _ in range(4)
    ]
    # Whoever wins stays alive until all have tried.
    lines = await asyncio.gather(*(one.stdout.readline() for one in racers if one.stdout))
    told = await asyncio.gather(*(racer.communicate(b"") for racer in racers))
    assert sorted(lines) == [b"", b"", b"", b"won\n"]
    assert sum(b"already running" in errors for _, errors in told) == 3
