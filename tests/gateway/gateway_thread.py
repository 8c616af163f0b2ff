"""A gateway in a thread of this process, in front of a member that runs in another thread."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.api.listener import bind
from mlxstack.control.gateway import inner_server
from mlxstack.core.preset import ModelSpec, Preset, ServerSpec
from mlxstack.gateway.members import MemberGate, MemberPhase, Members
from mlxstack.gateway.server import web_server
from mlxstack.gateway.spec import GatewayMember, GatewaySpec
from mlxstack.host.home import Home, make_home
from mlxstack.host.process import identify
from mlxstack.host.services import Phase, ServiceSpec, ServiceState, write_json
from tests.api.running import Running, running, serving, standing
from tests.patience import PATIENCE_S
from tests.service.standin import FACTS, StandIn

SECRET = "secret"
WAYS = ("service", "gateway")
"""Ways to a service: its own address, and that of a gateway."""


class Front(Struct, frozen=True):
    """A gateway that runs, and the gate of its one member."""

    url: str
    member: MemberGate


def behind(server: ServerSpec) -> ServerSpec:
    """Server section of a service behind a gateway with this one."""
    return inner_server(server, server, SECRET, 0)


@contextmanager
def in_front(
    server: ServerSpec, url: str, name: str, folder: Path, *, is_loaded: bool = True
) -> Iterator[Front]:
    """A gateway before the service at `url`, which this process is said to run."""
    home = Home(folder)
    make_home(home)
    me = identify(os.getpid())
    assert me is not None
    plan = ServiceSpec(name=name, root=str(home.root), preset=name, url=url, worker=("none",))
    write_json(home.state_file(name), ServiceState(plan, Phase.RUNNING, me, me))
    home.pid_file(name).write_text(f"{os.getpid()}\n")
    write_json(home.preset_file(name), Preset(model=ModelSpec(id=name), server=behind(server)))
    spec = GatewaySpec("front", server, SECRET, (GatewayMember((name,), plan, 1),), name, 10)
    with bind(server) as listener, _running(spec, listener) as members:
        gate = members.by_name[name]
        while is_loaded and gate.phase is not MemberPhase.LOADED:
            threading.Event().wait(0.005)
        yield Front(f"http://127.0.0.1:{listener.getsockname()[1]}", gate)


@contextmanager
def _running(spec: GatewaySpec, listener: object) -> Iterator[Members]:
    started = threading.Event()
    running_members = []
    leave = []

    async def main() -> None:
        members = Members(spec)
        server = web_server(spec, members)
        serving = asyncio.create_task(server.serve(sockets=[listener]))  # type: ignore[list-item]
        residing = asyncio.create_task(members.run())
        loop = asyncio.get_running_loop()
        running_members.append(members)
        leave.append(lambda: loop.call_soon_threadsafe(setattr, server, "should_exit", True))
        started.set()
        await serving
        residing.cancel()
        await asyncio.gather(residing, return_exceptions=True)

    thread = threading.Thread(target=lambda: uvloop.run(main()))
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield running_members[0]
    finally:
        leave[0]()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@contextmanager
def standing_behind(
    way: str, server: ServerSpec, folder: Path
) -> Iterator[tuple[Running, StandIn]]:
    """A loaded service over a stand-in, reached by one of `WAYS`."""
    service, engine = standing(server if way == "service" else behind(server))
    engine.loading.set_result(FACTS)
    with bind(service.preset.server) as listener, serving(service, listener) as live:
        if way == "service":
            yield live, engine
            return
        with in_front(server, live.url, service.name, folder) as front:
            yield replace(live, url=front.url), engine


@contextmanager
def running_behind(way: str, preset: Preset, folder: Path) -> Iterator[Running]:
    """A service of a preset, reached by one of `WAYS`."""
    if way == "service":
        with running(preset, folder / "home") as live:
            yield live
        return
    with (
        running(replace(preset, server=behind(preset.server)), folder / "home") as live,
        in_front(preset.server, live.url, live.service.name, folder / "front") as front,
    ):
        yield replace(live, url=front.url)
