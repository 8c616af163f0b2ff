"""Members of agents: what a gateway finds that starts after another one."""

import asyncio
from pathlib import Path

import pytest

from mlxstack.core.interfaces import Manifest
from mlxstack.core.preset import ServerSpec
from mlxstack.gateway import agent_members
from mlxstack.gateway.agent_members import AgentMembers
from mlxstack.gateway.spec import GatewayMember, GatewaySpec
from mlxstack.host.home import Home, make_home
from mlxstack.host.services import ServiceSpec
from mlxstack.store.agent_history import AgentFolders


def spec_of(home: Home, *names: str) -> GatewaySpec:
    members = tuple(
        GatewayMember(
            (f"model-{name}", name),
            ServiceSpec(name, str(home.root), name, "http://127.0.0.1:1", ()),
        )
        for name in names
    )
    return GatewaySpec("front", ServerSpec(), "s", members, names[0], 10)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    new_home = Home(tmp_path / "home")
    make_home(new_home)
    return new_home


async def test_the_member_of_an_agent_is_known_to_the_next_gateway(home: Home) -> None:
    first = AgentMembers(spec_of(home, "one", "two"))
    await first.note("ann", "one")
    await first.note("ann", "two")
    assert AgentMembers(spec_of(home, "one", "two")).find("ann") == "two"
    assert AgentMembers(spec_of(home, "three", "two")).find("ann") == "two"
    assert AgentMembers(spec_of(home, "three", "one")).find("ann") is None
    assert home.agent_members_file.stat().st_mode & 0o777 == 0o600


async def test_gateways_of_one_home_keep_the_notes_of_each_other(home: Home) -> None:
    left = AgentMembers(spec_of(home, "one"))
    right = AgentMembers(spec_of(home, "two"))
    names = [f"agent{i}" for i in range(20)]
    await asyncio.gather(
        *(left.note(name, "one") for name in names[::2]),
        *(right.note(name, "two") for name in names[1::2]),
    )
    both = AgentMembers(spec_of(home, "one", "two"))
    assert [both.find(name) for name in names] == ["one", "two"] * 10


async def test_the_file_is_written_when_a_member_changes_only(home: Home) -> None:
    notes = AgentMembers(spec_of(home, "one", "two"))
    await notes.note("ann", "one")
    before = home.agent_members_file.stat().st_ino
    await notes.note("ann", "one")
    await notes.note("chat-0123abcd", "two")
    assert home.agent_members_file.stat().st_ino == before
    assert notes.find("chat-0123abcd") == "two"


async def test_the_agents_noted_longest_ago_go_first(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_members, "MAX_AGENTS", 3)
    notes = AgentMembers(spec_of(home, "one", "two"))
    for name in ("ann", "bob", "cid", "ann", "dan"):
        await notes.note(name, "two")
    for i in range(4):
        await notes.note(f"chat-0123abc{i}", "one")
    assert [notes.find(name) for name in ("ann", "bob", "cid", "dan")] == [
        "two",
        None,
        "two",
        "two",
    ]
    reread = AgentMembers(spec_of(home, "one", "two"))
    assert [reread.find(name) for name in ("cid", "dan")] == ["two", "two"]


async def test_without_a_note_the_kv_on_disk_tells_the_member(home: Home) -> None:
    folders = AgentFolders(home.agents)
    folders.write_manifest("ann", "abc", Manifest("abc", (1, 2), (), model="model-two"))
    folders.write_manifest("bob", "def", Manifest("def", (1, 2), (), model="gone"))
    (home.agents / "cid" / "abc").mkdir(parents=True)
    (home.agents / "cid" / "abc" / "manifest.json").write_text("{")
    notes = AgentMembers(spec_of(home, "one", "two"))
    assert [notes.find(name) for name in ("ann", "bob", "cid")] == ["two", None, None]


async def test_a_damaged_or_unwritable_file_costs_the_notes_only(home: Home) -> None:
    file = home.agent_members_file
    file.parent.mkdir(mode=0o700)
    file.write_text("{")
    notes = AgentMembers(spec_of(home, "one", "two"))
    await notes.note("ann", "two")
    assert AgentMembers(spec_of(home, "one", "two")).find("ann") == "two"
    file.unlink()
    file.mkdir()
    await notes.note("ann", "one")
    assert notes.find("ann") == "one"
