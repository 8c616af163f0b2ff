"""Services of one home divide one memory: the sum of their budgets stays within the ceiling."""

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from mlxstack.api.dialects.openai_chat.messages import read_message_file
from mlxstack.config import presets
from mlxstack.control import gateway
from mlxstack.control.start import StartRequest
from mlxstack.core.preset import Preset
from mlxstack.host.hardware import bytes_of, memory_of, this_memory
from mlxstack.host.home import Home, make_folder, make_home
from mlxstack.host.process import identify
from mlxstack.host.services import Phase, ServiceSpec, ServiceState, claim, locked, write_json
from mlxstack.planner.memory_room import claim_of, claims_in, room_in
from mlxstack.policy.memory.memory_shares import kv_budgets
from mlxstack.service.assembly import assemble
from mlxstack.service.parts.neighbors import Neighbors, grants_in
from tests.cli.terminal import CLI, Shell
from tests.patience import wait_until
from tests.ports import unused_port

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

MEMORY = "4GiB"
CEILING = memory_of(bytes_of(MEMORY)).usable


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A terminal that starts real services on an imagined memory."""
    shell = Shell(tmp_path)
    del shell.env["MLX_STACK_WORKER"]
    shell.env["MLX_STACK_MEMORY"] = MEMORY
    yield shell
    shell.run("down")


def service_at(home: Home, name: str) -> tuple[Neighbors, Preset]:
    """A running service by its files: this process is its supervisor."""
    make_home(home)
    preset = replace(presets.load("demo", home).preset, name=name)
    write_json(home.preset_file(name), preset)
    supervisor = identify(os.getpid())
    assert supervisor is not None
    plan = ServiceSpec(name, str(home.root), "demo", "http://127.0.0.1:1", ())
    claim(ServiceState(plan, Phase.RUNNING, supervisor))
    return Neighbors(home.root, name), preset


def test_a_new_service_waits_for_room_before_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_STACK_MEMORY", MEMORY)
    home = Home(tmp_path)
    first, preset = service_at(home, "one")
    assert first.try_reserve(preset) <= 0
    least = grants_in(home)["one"]
    alone = first.share(preset)
    assert alone is not None
    assert alone > least
    assert grants_in(home) == {"one": alone}
    two, two_preset = service_at(home, "two")
    assert two.try_reserve(two_preset) > 0
    assert two.share(two_preset) == 0
    assert grants_in(home) == {"one": alone}
    half = first.share(preset)
    assert half is not None
    assert least < half < alone
    assert grants_in(home) == {"one": alone}, "KV is still held"
    first.hold(half)
    assert two.try_reserve(two_preset) <= 0
    assert grants_in(home) == {"one": half, "two": least}
    assert two.share(two_preset) == half


def test_an_unloaded_model_holds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_STACK_MEMORY", MEMORY)
    home = Home(tmp_path)
    first, preset = service_at(home, "one")
    first.reserve(preset)
    first.share(preset)
    two, two_preset = service_at(home, "two")
    assert two.try_reserve(two_preset) > 0
    first.release()
    assert first.share(preset), "looked up while the model was unloaded"
    assert two.try_reserve(two_preset) <= 0
    assert set(grants_in(home)) == {"two"}
    two.release()
    first.reserve(preset)
    assert set(grants_in(home)) == {"one"}


def test_two_that_load_at_once_reserve_their_slots_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_STACK_MEMORY", MEMORY)
    home = Home(tmp_path)
    first, preset = service_at(home, "one")
    first.reserve(preset)
    two, two_preset = service_at(home, "two")
    two.reserve(two_preset)
    least = claim_of(preset, this_memory(os.environ), "").kv
    assert grants_in(home) == {"one": least, "two": least}


def test_a_gateway_leaves_a_running_service_the_kv_of_its_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_STACK_MEMORY", MEMORY)
    home = Home(tmp_path)
    memory = this_memory(os.environ)
    _, preset = service_at(home, "one")
    own = claim_of(preset, memory, "one")
    requests = [StartRequest("demo", (f"name={name}",), tmp_path) for name in ("a", "b")]
    planned = gateway.plan("gateway", requests, home, room_in(home, memory))
    members = [claim_of(member.preset, memory, member.preset.name) for member in planned.members]
    supervisor = identify(os.getpid())
    assert supervisor is not None
    claim(ServiceState(gateway.write(planned, home).service, Phase.RUNNING, supervisor))
    (front,) = (
        service_claim
        for service_claim in claims_in(home, memory, None)
        if service_claim.name == "gateway"
    )
    budget_of = kv_budgets([own, front, *members], memory.usable)
    assert budget_of["one"] >= own.kv


def test_members_of_a_gateway_that_take_turns_leave_a_service_the_kv_of_its_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their fixed shares together exceed the ceiling."""
    monkeypatch.setenv("MLX_STACK_MEMORY", MEMORY)
    home = Home(tmp_path)
    memory = this_memory(os.environ)
    running, preset = service_at(home, "one")
    own = claim_of(preset, memory, "one")
    running.reserve(preset)
    running.share(preset)
    sets = [(f"name={name}", "prefix_cache.memory_budget_pct=60") for name in "ab"]
    requests = [StartRequest("demo", service, tmp_path) for service in sets]
    planned = gateway.plan("gateway", requests, home, room_in(home, memory))
    written = gateway.write(planned, home)
    supervisor = identify(os.getpid())
    assert supervisor is not None
    for service in (written.service, *(member.service for member in written.spec.members)):
        claim(ServiceState(service, Phase.RUNNING, supervisor))
    assert room_in(home, memory).free == 0
    budget = running.share(preset)
    assert budget is not None
    assert budget >= own.kv
    running.hold(budget)
    (a, first), (b, second) = [
        (Neighbors(home.root, service.preset.name), service.preset) for service in planned.members
    ]
    assert a.try_reserve(first) <= 0
    share = a.share(first)
    assert share == claim_of(first, memory, "a").share
    assert b.try_reserve(second) > 0
    a.release()
    assert b.try_reserve(second) <= 0
    assert b.share(second) == share
    assert running.share(preset) == budget
    assert grants_in(home) == {"one": budget, "b": share}


def test_a_service_that_loads_without_room_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_STACK_MEMORY", MEMORY)
    monkeypatch.setattr("mlxstack.service.parts.neighbors.RESERVE_S", 0.0)
    home = Home(tmp_path)
    first, preset = service_at(home, "one")
    first.reserve(preset)
    alone = first.share(preset)
    two, two_preset = service_at(home, "two")
    two.reserve(two_preset)
    assert grants_in(home) == {"one": alone, "two": 0}


async def begun(preset: Preset, home: Home) -> int:
    """KV budget of a service that has just loaded, before its tasks run."""
    service = assemble(preset, home.root, read_message_file, home.preset_file(preset.name))
    try:
        await service.start()
        return service.snapshot().kv_budget_bytes
    finally:
        await service.stop(0.0)


def test_a_service_starts_with_its_share_after_it_has_waited_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLX_STACK_MEMORY", MEMORY)
    monkeypatch.setattr("mlxstack.service.parts.neighbors.RESERVE_S", 0.0)
    home = Home(tmp_path)
    first, preset = service_at(home, "one")
    first.reserve(preset)
    alone = first.share(preset)
    assert alone is not None
    _, two_preset = service_at(home, "two")
    assert asyncio.run(begun(two_preset, home)) == 0
    assert "other services still hold" in caplog.text
    assert grants_in(home) == {"one": alone, "two": 0}
    half = first.share(preset)
    assert half is not None
    first.hold(half)
    caplog.clear()
    assert asyncio.run(begun(two_preset, home)) == half
    assert "other services still hold" not in caplog.text
    assert grants_in(home) == {"one": half, "two": half}


def start(shell: Shell, *names: str) -> list["subprocess.Popen[str]"]:
    """Begin to start services at the same time."""
    command = [*CLI, "up", str(shell.preset), "--port"]
    return [
        subprocess.Popen(
            [*command, str(unused_port()), "--name", name],
            env=shell.env, cwd=shell.folder, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )
        for name in names
    ]  # fmt: skip


def bytes_held(home: Home, fixed: int) -> int:
    """Bytes of all services at one instant, `fixed` of each beside KV, as they have reserved."""
    make_folder(home.memory)
    with locked(home.memory / "lock"):
        grants = grants_in(home)
    return fixed * len(grants) + sum(grants.values())


def budgets(shell: Shell) -> dict[str, int]:
    """KV budget of each service, as `status` tells it."""
    budget_of = {name: card["kv_budget_bytes"] for name, card in shell.services().items()}
    return {name: n_bytes for name, n_bytes in budget_of.items() if n_bytes}


def planned(shell: Shell) -> int:
    """KV budget of the service `tiny`, as `plan` tells it."""
    plan = json.loads(shell.run("plan", str(shell.preset), "--json").stdout)
    n_bytes: int = plan["kv_budget_bytes"]
    return n_bytes


def fixed_bytes(shell: Shell) -> int:
    """Bytes of one of these services beside its KV."""
    preset = presets.load(str(shell.preset), Home(shell.home)).preset
    return claim_of(preset, memory_of(bytes_of(MEMORY)), "").fixed


def settle(
    shell: Shell, names: tuple[str, ...], starts: "list[subprocess.Popen[str]]"
) -> dict[str, int]:
    """Wait until the services have equal parts; the ceiling holds at every look."""
    home = Home(shell.home)
    fixed = fixed_bytes(shell)
    equal_parts: dict[str, int] = {}

    def is_settled() -> bool:
        assert bytes_held(home, fixed) <= CEILING
        for process in starts:
            assert not process.poll(), process.communicate()[1]
        grants = grants_in(home)
        if set(grants) != {*names} or len({*grants.values()}) > 1:
            return False
        equal_parts.update(dict.fromkeys(names, planned(shell)))
        return grants_in(home) == budgets(shell) == equal_parts

    wait_until(is_settled, lambda: (grants_in(home), budgets(shell), equal_parts))
    for process in starts:
        process.communicate()
    assert bytes_held(home, fixed) <= CEILING
    return equal_parts


def test_two_then_three_services_share_the_ceiling_and_one_alone_has_it_again(shell: Shell) -> None:
    alone = planned(shell)
    budget_of = settle(shell, ("tiny", "two"), start(shell, "tiny", "two"))
    assert budget_of["tiny"] < alone
    budget_of = settle(shell, ("tiny", "two", "three"), start(shell, "three"))
    assert CEILING - 3 < 3 * (fixed_bytes(shell) + budget_of["tiny"]) <= CEILING
    assert shell.run("down", "two", "three").returncode == 0
    assert settle(shell, ("tiny",), []) == {"tiny": alone}
