"""A member whose supervisor is killed while it loads is started again."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from mlxstack.control import gateway
from mlxstack.control.start import StartRequest
from mlxstack.gateway.processes import MemberProcess
from mlxstack.host.hardware import this_memory
from mlxstack.host.home import Home
from mlxstack.host.services import owner
from mlxstack.planner.memory_room import room_in
from tests.patience import until

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]


@pytest.mark.parametrize("is_adopted", [False, True])
async def test_a_load_goes_on_after_its_supervisor_is_killed(
    tmp_path: Path, is_adopted: bool
) -> None:
    home = Home(tmp_path)
    requests = [StartRequest("demo", (), tmp_path)]
    planned = gateway.plan("gateway", requests, home, room_in(home, this_memory(os.environ)))
    spec = gateway.write(planned, home).spec
    member = first = MemberProcess(spec.members[0], spec.secret)
    loading = asyncio.create_task(member.ensure())
    await until(lambda: member.is_running)
    if is_adopted:
        # As by a gateway that starts while the member of an earlier one loads.
        member = MemberProcess(spec.members[0], spec.secret)
        loading.cancel()
        loading = asyncio.create_task(member.ensure())
        await asyncio.sleep(0)
    state = owner(home, "demo")
    assert state is not None
    os.kill(state.supervisor.pid, signal.SIGKILL)
    try:
        await loading
        assert await member.ensure() == "ok"
        state_now = owner(home, "demo")
        assert state_now is not None
        assert state_now.supervisor.pid != state.supervisor.pid
    finally:
        await member.stop()
        first._reap()
