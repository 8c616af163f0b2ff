"""The service goes on while a person reads, is asked, or types."""

import pytest

from mlxstack.core.engine_snapshot import SlotView, Snapshot
from mlxstack.core.status import AgentView, CacheView, MissView, StatusFrame
from mlxstack.tui.app import Dashboard, Updated
from mlxstack.tui.feed import News
from mlxstack.tui.recording import RecordingFeed
from mlxstack.tui.screens.dialogs import ConfirmDialog
from mlxstack.tui.screens.text_page import TextPage
from mlxstack.tui.state import reduce
from mlxstack.tui.theme import ThemeChoice
from mlxstack.tui.widgets.table import PatchedTable
from tests.repetition import in_soak
from tests.tui.conftest import settled
from tests.tui.slot_service import Clerk
from tests.tui.test_keys import on_screen, told

pytestmark = pytest.mark.slow


def seats(*slots: tuple[str | None, str | None]) -> StatusFrame:
    """A service with these (agent, request) in its slots."""
    views = [SlotView(i, 4096, None, ask, agent, 9) for i, (agent, ask) in enumerate(slots)]
    return StatusFrame(at=1.0, snapshot=Snapshot(slots=tuple(views)))


def attached(clerk: Clerk, *tape: News) -> Dashboard:
    return Dashboard(RecordingFeed("127.0.0.1:7109", tape), clerk, ThemeChoice())


def show(app: Dashboard, frame: StatusFrame) -> None:
    app.post_message(Updated(reduce(app.model, frame)))


@pytest.mark.parametrize("keys", [("E", "y"), *in_soak((("S", "enter"),), (("R", "enter"),))])
@pytest.mark.parametrize(
    ("before", "after"),
    [(("bob", "q1"), ("eve", "q2")), ((None, "q1"), (None, "q2")), ((None, None), ("eve", "q2"))],
)
async def test_h4_a_slot_that_changed_hands_is_not_the_one_that_was_asked_about(
    keys: tuple[str, str], before: tuple[str | None, str | None], after: tuple[str | None, str]
) -> None:
    clerk = Clerk()
    app = attached(clerk, seats(before))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press(keys[0])
        show(app, seats(after))
        await settled(pilot)
        await pilot.press(keys[1])
        (said,) = await told(pilot)
        assert "not done, slot 0 has another agent now" in said
    assert clerk.asked == []


async def test_h4_an_agent_that_goes_on_meanwhile_is_still_the_one_in_its_slot() -> None:
    clerk = Clerk()
    app = attached(clerk, seats(("bob", "q1")))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("E")
        show(app, seats(("bob", "q2")))
        await settled(pilot)
        await pilot.press("y")
        await settled(pilot)
    assert clerk.asked == [("erase", 0, "")]


async def test_h4_the_palette_does_it_to_what_it_named() -> None:
    clerk = Clerk()
    ann = AgentView("ann")
    bob = AgentView("bob")
    app = attached(clerk, StatusFrame(at=1.0, agents=(ann, bob)))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("3")
        commands = app.get_system_commands(app.screen)
        delete = next(one for one in commands if one.title == "Delete: agent ann")
        show(app, StatusFrame(at=2.0, agents=(bob,)))
        await settled(pilot)
        await delete.callback()
        assert "Delete ann?" in on_screen(app)
        await pilot.press("y")
        await settled(pilot)
    assert clerk.asked == [("/v1/agents/ann", 0, "")]


async def test_one_answer_answers_one_question() -> None:
    clerk = Clerk()
    app = attached(clerk, seats(("bob", "q1")))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        for _ in range(2):
            await app.run_action("act('erase')")
        await settled(pilot)
        assert [type(one) for one in app.screen_stack].count(ConfirmDialog) == 1


async def test_the_cursor_stays_at_its_place_when_its_row_goes_for_good() -> None:
    agents = [AgentView(name) for name in "abcde"]
    app = attached(Clerk(), StatusFrame(at=1.0, agents=tuple(agents)))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("3", "down", "down")
        table = app.screen.query_one(PatchedTable)
        for gone, chosen in (("c", "d"), ("e", "d"), ("d", "b"), ("a", "b"), ("b", None)):
            agents = [one for one in agents if one.id != gone]
            show(app, StatusFrame(at=2.0, agents=tuple(agents)))
            await settled(pilot)
            assert table.chosen == chosen


def missed(*asks: str) -> StatusFrame:
    misses = (MissView("diverged", 3, ask, text_sent=f"sent by {ask}") for ask in asks)
    return StatusFrame(at=1.0, cache=CacheView(misses=tuple(misses)))


async def test_a_miss_stays_under_the_cursor_when_newer_ones_come() -> None:
    app = attached(Clerk(), missed("q2", "q1"))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("2", "tab", "down")
        show(app, missed("q4", "q3", "q2", "q1"))
        await settled(pilot)
        await pilot.press("enter")
        assert isinstance(app.screen, TextPage)
        assert "sent by q1" in on_screen(app)
