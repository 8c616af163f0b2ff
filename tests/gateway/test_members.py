"""Members by themselves: a failed start, requests that leave while they wait."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from mlxstack.control.gateway import inner_server
from mlxstack.core.errors import Broken
from mlxstack.core.preset import ModelSpec, Preset, Residency, ServerSpec
from mlxstack.gateway import members as members_module
from mlxstack.gateway.members import MemberPhase, Members
from mlxstack.gateway.spec import GatewayMember, GatewaySpec, names_of
from mlxstack.host.home import Home, make_home
from mlxstack.host.restart_policy import RestartPolicy
from mlxstack.host.services import ServiceSpec, write_json
from tests.gateway.real_members import until
from tests.ports import unused_port

pytestmark = pytest.mark.net


SERVES = """
import sys, json, http.server
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "ok"}')
port = json.load(open(sys.argv[1]))["server"]["port"]
http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""
"""Worker that serves at the port of its preset."""


def member(home: Home, name: str, *names: str, command: str = "", port: int = 1) -> GatewayMember:
    server = inner_server(ServerSpec(), ServerSpec(), "s", port)
    preset = Preset(model=ModelSpec(id="demo"), name=name, server=server)
    write_json(home.preset_file(name), preset)
    service = ServiceSpec(
        name=name,
        root=str(home.root),
        preset=name,
        url=f"http://127.0.0.1:{port}",
        worker=(sys.executable, "-c", command, str(home.preset_file(name))),
        policy=RestartPolicy(max_crashes=1),
    )
    return GatewayMember(names or (name,), service, 10, Residency.AUTO, 60.0)


def spec_of(*members: GatewayMember) -> GatewaySpec:
    return GatewaySpec("front", ServerSpec(), "s", members, members[0].name, 10)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    new_home = Home(tmp_path / "home")
    make_home(new_home)
    return new_home


def test_of_equal_names_the_service_goes_first_then_the_first_member(home: Home) -> None:
    first = member(home, "one", "two", "model")
    two = member(home, "two", "vectors", "model")
    names = names_of(spec_of(first, two))
    assert names == {"one": "one", "two": "two", "vectors": "two", "model": "one"}


async def test_a_failed_start_fails_those_that_wait_with_its_reason(home: Home) -> None:
    broken = member(home, "one", command="print('ERROR no such model'); raise SystemExit(78)")
    members = Members(spec_of(broken))
    running = asyncio.create_task(members.run())
    gate = members.by_name["one"]
    try:
        waiting = [asyncio.create_task(gate.enter()) for _ in range(2)]
        left = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        left.cancel()
        for task in waiting:
            with pytest.raises(Broken, match="`one` did not start: ERROR no such model"):
                await task
        assert (gate.phase, gate.n_active, gate.n_waiting) == (MemberPhase.UNLOADED, 0, 0)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_member_that_ended_starts_at_another_port_when_its_own_is_taken(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_module, "WATCH_S", 0.05)
    port = unused_port()
    members = Members(spec_of(member(home, "one", command=SERVES, port=port)))
    running = asyncio.create_task(members.run())
    gate = members.by_name["one"]
    try:
        await gate.enter()
        gate.leave()
        assert gate.process.url.endswith(f":{port}")
        # A worker may answer before its supervisor has written its process id.
        await asyncio.to_thread(
            until, lambda: gate.process.worker_pid is not None, "it has no worker"
        )
        pid = gate.process.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await asyncio.to_thread(until, lambda: not gate.process.is_running, "it did not end")
            taken.bind(("127.0.0.1", port))
            taken.listen()
            await asyncio.to_thread(
                until, lambda: gate.phase is MemberPhase.UNLOADED, "it is taken for loaded"
            )
            assert not gate.is_running
            await gate.enter()
            assert not gate.process.url.endswith(f":{port}")
            assert gate.is_running and await gate.process.status() == "ok"
            gate.leave()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await members.stop()
