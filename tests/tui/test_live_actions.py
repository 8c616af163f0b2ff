"""What is done by key press in the dashboard happens in a real service, and is seen there."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from mlxstack.config import modes
from mlxstack.core.preset import SlotSpec
from mlxstack.core.status import AgentView
from mlxstack.host.home import Home, make_home
from mlxstack.tui.actions import action_of
from mlxstack.tui.screens.agents import AgentScreen, AgentsScreen
from mlxstack.tui.screens.dialogs import ChoiceDialog, ConfirmDialog, TextDialog
from mlxstack.tui.widgets.table import PatchedTable
from mlxstack.tui.widgets.text_lines import TextLines
from tests.api.running import Running, running, tiny_preset
from tests.patience import PATIENCE_S
from tests.tui.test_live import board, said, until, watching

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

ANN = "ann:1"
BOB = "bob"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A running service with three slots, in which one can talk for long."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    preset = tiny_preset(folder, slots=SlotSpec(count=3, n_ctx=16_384))
    with running(preset, tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture
async def http(live: Running) -> Any:
    async with httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S) as client:
        yield client


async def alone(http: httpx.AsyncClient, *agents: str) -> None:
    """Each of them says something, the first one last; nobody else is there."""
    for one in (await http.get("/v1/agents")).json()["data"]:
        await http.delete(f"/v1/agents/{one['id']}")
    await meet(http, *agents)


async def meet(http: httpx.AsyncClient, *agents: str) -> None:
    """Each of them says something, the first one last."""
    for agent in reversed(agents):
        body = {
            "messages": [{"role": "user", "content": f"a story about {agent} " * 20}],
            "max_tokens": 4,
            "session_id": agent,
        }
        (await http.post("/v1/chat/completions", json=body)).raise_for_status()


async def at_agents(pilot: Pilot[Any], chosen: str) -> None:
    """The agents screen, with the cursor on this one."""
    await pilot.press("3")
    await until(pilot, lambda: chosen in rows(pilot))
    for _ in range(rows(pilot).index(chosen)):
        await pilot.press("down")
    assert board(pilot).chosen["agent"] == chosen  # type: ignore[index]


def rows(pilot: Pilot[Any]) -> list[str]:
    return [str(row.value) for row in pilot.app.screen.query(PatchedTable).first().rows]


async def answered(pilot: Pilot[Any], key: str, *answer: str) -> None:
    """A key that asks, the question on the screen, and the answer."""
    await pilot.press(key)
    await pilot.pause()
    assert isinstance(pilot.app.screen, ConfirmDialog | ChoiceDialog | TextDialog)
    await pilot.press(*answer)


def view(pilot: Pilot[Any], agent: str) -> AgentView | None:
    return next((one for one in board(pilot).model.frame.agents or () if one.id == agent), None)


def seen(pilot: Pilot[Any], agent: str, is_so: Callable[[AgentView], bool]) -> Callable[[], bool]:
    def look() -> bool:
        found = view(pilot, agent)
        return found is not None and is_so(found)

    return look


def is_running(pilot: Pilot[Any]) -> bool:
    return any(slot.state == "running" for slot in board(pilot).model.frame.snapshot.slots)


async def test_h4_an_agent_is_parked_and_shown_without_a_slot(
    live: Running, http: httpx.AsyncClient
) -> None:
    await alone(http, ANN, BOB)
    async with watching(live.url) as pilot:
        await at_agents(pilot, ANN)
        await until(pilot, seen(pilot, ANN, lambda one: one.slot is not None))
        await answered(pilot, "p", "n")
        await answered(pilot, "p", "y")
        await until(pilot, lambda: said(board(pilot), f"{ANN} left the memory"))
        await until(pilot, seen(pilot, ANN, lambda one: one.slot is None and one.place == "disk"))
        await until(pilot, seen(pilot, BOB, lambda one: one.slot is not None))
    assert (await http.get(f"/v1/agents/{ANN}")).json()["place"] == "disk"


async def test_h4_an_agent_is_pinned_and_let_go(live: Running, http: httpx.AsyncClient) -> None:
    await alone(http, ANN, BOB)
    async with watching(live.url) as pilot:
        await at_agents(pilot, BOB)
        await answered(pilot, "i", "y")
        await until(pilot, seen(pilot, BOB, lambda one: one.is_pinned))
        assert (await http.get(f"/v1/agents/{BOB}")).json()["is_pinned"]
        table = pilot.app.screen.query(PatchedTable).first()
        await until(pilot, lambda: table.get_row(BOB)[0].plain == f"* {BOB}")
        await answered(pilot, "u", "y")
        await until(pilot, seen(pilot, BOB, lambda one: not one.is_pinned))
        assert not (await http.get(f"/v1/agents/{BOB}")).json()["is_pinned"]


async def test_h4_an_agent_gets_a_priority_on_its_own_screen(
    live: Running, http: httpx.AsyncClient
) -> None:
    await alone(http, ANN)
    async with watching(live.url) as pilot:
        await at_agents(pilot, ANN)
        await pilot.press("enter")
        await pilot.pause()
        assert isinstance(pilot.app.screen, AgentScreen)
        await answered(pilot, "o", "escape")
        assert isinstance(pilot.app.screen, AgentScreen)
        await answered(pilot, "o", "h")
        await until(pilot, lambda: said(board(pilot), f"{ANN} has priority high"))
        assert (await http.get(f"/v1/agents/{ANN}")).json()["priority"] == "high"
        # Whoever comes meanwhile becomes the first of the list, and is not meant.
        await meet(http, BOB)
        await until(pilot, seen(pilot, BOB, lambda one: True))
        await answered(pilot, "D", "y")
        await until(pilot, lambda: said(board(pilot), f"{ANN} was deleted"))
        await until(pilot, lambda: view(pilot, ANN) is None)
        await pilot.press("D")
        await pilot.press("y")
        await until(pilot, lambda: said(board(pilot), f"there is no agent {ANN}"))
    assert (await http.get(f"/v1/agents/{BOB}")).is_success


async def test_h4_an_agent_is_deleted_by_the_palettes_deed_and_gone(
    live: Running, http: httpx.AsyncClient
) -> None:
    await alone(http, ANN, BOB)
    async with watching(live.url) as pilot:
        await at_agents(pilot, BOB)
        await pilot.press("1")
        app = board(pilot)
        commands = app.get_system_commands(app.screen)
        await next(one for one in commands if one.title == f"Delete: agent {BOB}").callback()
        await pilot.pause()
        await pilot.press("y")
        await until(pilot, lambda: said(app, f"{BOB} was deleted"))
        await pilot.press("3")
        await until(pilot, lambda: isinstance(app.screen, AgentsScreen) and rows(pilot) == [ANN])
    assert (await http.get(f"/v1/agents/{BOB}")).status_code == 404


async def test_drilling_into_an_agent_shows_the_turns_that_the_service_tells(
    live: Running, http: httpx.AsyncClient
) -> None:
    await alone(http, ANN, BOB)
    await meet(http, ANN)
    await meet(http, ANN)
    async with watching(live.url) as pilot:
        await at_agents(pilot, ANN)
        await pilot.press("enter")
        told = (await http.get(f"/v1/agents/{ANN}")).json()
        assert [turn["reason"] is None for turn in told["turns"]] == [False, True, True]
        app = pilot.app
        await until(
            pilot, lambda: app.screen.query_one("#turns PatchedTable", PatchedTable).row_count == 3
        )
        table = app.screen.query_one("#turns PatchedTable", PatchedTable)
        for i, turn in enumerate(told["turns"]):
            n_prompt = turn["n_cached"] + turn["n_computed"]
            row = [cell.plain for cell in table.get_row(str(i))]
            assert row[2] == f"{100 * turn['n_cached'] // n_prompt}%"
            assert row[3] == str(n_prompt + turn["n_generated"])
            parts = [turn[part] > 0 for part in ("n_cached", "n_computed", "n_generated")]
            assert [sign in row[4] for sign in "▓█░"] == parts
            assert row[5] == (turn["reason"] or "-")
        states = app.screen.query_one("#states PatchedTable", PatchedTable)
        await until(pilot, lambda: states.row_count == len(told["states"]) == 1)
        shown = [cell.plain for cell in states.get_row("tiny")]
        assert shown[:2] == ["tiny", str(told["states"][0]["n_tokens"])]
        assert shown[3] == told["states"][0]["place"] == "live"


async def test_h4_a_busy_agent_is_not_deleted_and_the_reason_is_told(
    live: Running, http: httpx.AsyncClient
) -> None:
    await alone(http, ANN)
    body = {
        "messages": [{"role": "user", "content": "go on"}],
        "max_tokens": 15_000,
        "ignore_eos": True,
        "session_id": ANN,
    }
    async with watching(live.url) as pilot:
        await at_agents(pilot, ANN)
        talking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await until(pilot, lambda: is_running(pilot))
        await answered(pilot, "D", "y")
        await until(pilot, lambda: said(board(pilot), "is busy"))
    assert not talking.done()
    talking.cancel()
    with suppress(asyncio.CancelledError):
        await talking
    assert (await http.get(f"/v1/agents/{ANN}")).is_success


async def test_h4_a_file_is_warmed_and_pinned_under_its_name(
    live: Running, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    file = tmp_path / "handbook.txt"
    file.write_text("the rules of this house are few and clear. " * 20)
    async with watching(live.url) as pilot:
        await pilot.press("2")
        await answered(pilot, "w", *"none.txt", "enter")
        await until(pilot, lambda: said(board(pilot), "none.txt cannot be read"))
        await answered(pilot, "w")
        pilot.app.screen.query_one(Input).value = str(file)
        await pilot.press("enter")
        await until(pilot, lambda: said(board(pilot), "tokens are pinned"))
    found = (await http.get("/cache")).json()["prefixes"]
    assert any(one["name"] == "handbook" and one["is_pinned"] for one in found)


async def test_h4_a_listed_prefix_is_pinned_under_a_name_and_let_go(
    live: Running, http: httpx.AsyncClient
) -> None:
    await alone(http, ANN, BOB)
    await meet(http, ANN, BOB)
    async with watching(live.url) as pilot:
        await pilot.press("2")
        table = pilot.app.screen.query_one("#prefixes PatchedTable", PatchedTable)
        await until(pilot, lambda: table.row_count > 0)
        table.focus()
        await answered(pilot, "i", *"talk", "enter")
        await until(pilot, lambda: said(board(pilot), "talk: "))
        await until(pilot, lambda: "talk" in keys_in(table))
        await pilot.press(*["down"] * keys_in(table).index("talk"))
        await until(pilot, lambda: table.chosen == "talk")
        assert (await http.get("/cache")).json()["prefixes"]
        await answered(pilot, "u", "y")
        await until(pilot, lambda: said(board(pilot), "talk is no longer pinned"))
    found = (await http.get("/cache")).json()["prefixes"]
    assert "talk" not in {one["name"] for one in found}


def keys_in(table: PatchedTable) -> list[str]:
    return [str(row.value) for row in table.rows]


async def test_h4_the_model_is_changed_by_the_name_of_a_preset(tmp_path: Path) -> None:
    presets = tmp_path / "home" / "presets"
    presets.mkdir(parents=True, mode=0o700)
    preset = tiny_preset(tmp_path / "tiny")
    (presets / "other.yaml").write_text(
        f"name: other\nmodel: {{id: {tmp_path / 'tiny'}, alias: other}}\n"
        "slots: {count: 2, n_ctx: 512}\n"
    )
    with running(preset, tmp_path / "home") as found:
        async with watching(found.url) as pilot:
            app = board(pilot)
            await answered(pilot, "m", *"none", "enter")
            await until(pilot, lambda: said(app, "no preset is called `none`"))
            assert app.model.frame.service.model == "tiny"
            await answered(pilot, "m", *"other", "enter")
            await until(pilot, lambda: said(app, "tiny was replaced by other"))
            await until(pilot, lambda: app.model.frame.service.model == "other")
            await until(pilot, lambda: len(rows(pilot)) == 2)


async def test_the_health_line_names_the_mode_that_the_service_belongs_to(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    make_home(home)
    modes.mark_active(home, modes.Active("demo-mode", ("tiny", "other")))
    with running(tiny_preset(tmp_path / "tiny"), home.root) as found:
        async with watching(found.url) as pilot:
            await until(pilot, lambda: board(pilot).model.frame.service.mode == "demo-mode")
            health = pilot.app.screen.query_one("#health", TextLines)
            await until(pilot, lambda: "· demo-mode ·" in str(health.render()))


async def test_h4_without_its_computer_the_mode_cannot_be_switched(live: Running) -> None:
    async with watching(live.url) as pilot:
        await pilot.press("M")
        assert not isinstance(pilot.app.screen, TextDialog)
        await board(pilot).perform(action_of("switch"), None)
        await until(pilot, lambda: said(board(pilot), "on the computer of the service only"))
