"""Members by themselves: a failed start, requests that leave while they wait."""

import asyncio
import sys
from pathlib import Path

import pytest

from mlxstack.core.errors import Broken
from mlxstack.core.preset import ModelSpec, Preset, Residency, ServerSpec
from mlxstack.gateway.members import MemberPhase, Members
from mlxstack.gateway.spec import GatewayMember, GatewaySpec, names_of
from mlxstack.host.home import Home, make_home
from mlxstack.host.service_state import RestartPolicy, ServiceSpec, write_json

pytestmark = pytest.mark.net


def member(home: Home, name: str, *names: str, command: str = "") -> GatewayMember:
    preset = Preset(model=ModelSpec(id="demo"), name=name)
    write_json(home.preset_file(name), preset)
    service = ServiceSpec(
        name=name,
        root=str(home.root),
        preset=name,
        url="http://127.0.0.1:1",
        worker=(sys.executable, "-c", command),
        patience=RestartPolicy(max_crashes=1),
    )
    return GatewayMember(names or (name,), service, 10, Residency.AUTO, 60.0)


def spec_of(*members: GatewayMember) -> GatewaySpec:
    return GatewaySpec("front", ServerSpec(), "s", members, members[0].name, 10)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    found = Home(tmp_path / "home")
    make_home(found)
    return found


def test_of_equal_names_the_service_goes_first_then_the_first_member(home: Home) -> None:
    one, two = member(home, "one", "two", "model"), member(home, "two", "vectors", "model")
    found = names_of(spec_of(one, two))
    assert found == {"one": "one", "two": "two", "vectors": "two", "model": "one"}


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
        for one in waiting:
            with pytest.raises(Broken, match="one did not start: ERROR no such model"):
                await one
        assert (gate.phase, gate.n_active, gate.n_waiting) == (MemberPhase.UNLOADED, 0, 0)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
