"""The dashboard beside a real service: attach, see, act, lose it, find it again, leave."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families
from textual.pilot import Pilot

from mlxstack.client.client import Client
from mlxstack.client.types import FeedLost, ServerSentEvent
from mlxstack.core.preset import ServerSpec
from mlxstack.core.status import MemoryView, StatusFrame, WindowSums
from mlxstack.service.parts.stats import MAX_SAMPLES
from mlxstack.tui.actions.action import ActionTarget
from mlxstack.tui.app import Dashboard
from mlxstack.tui.feed import LiveFeed
from mlxstack.tui.state import WINDOW_S, LinkState, series
from mlxstack.tui.text_pages import pages
from mlxstack.tui.theme import ThemeChoice
from mlxstack.tui.views.formatting import gib
from mlxstack.tui.views.names import agent_name
from mlxstack.tui.views.overview import totals
from mlxstack.tui.views.tiles import memory
from mlxstack.tui.widgets.sparkline import SparklineChart
from mlxstack.tui.widgets.table import PatchedTable
from tests import patience
from tests.api.running import Running, running, standing, tiny_preset
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

HELLO = [{"role": "user", "content": "tell me a very long story about a slot"}]
AGENT = "claude:main.1"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny model lives."""
    return tmp_path_factory.mktemp("model") / "tiny"


@pytest.fixture(scope="module")
def live(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A running service with three slots."""
    with running(tiny_preset(model_folder), tmp_path_factory.mktemp("home")) as found:
        yield found


@asynccontextmanager
async def watching(url: str, key: str | None = None) -> AsyncIterator[Pilot[Any]]:
    """A dashboard attached to it, with its first frame drawn: keys reach the table."""
    async with Client(url, key) as client:
        app = Dashboard(LiveFeed(client), client, ThemeChoice())
        async with app.run_test(size=(80, 24)) as pilot:
            await until(
                pilot,
                lambda: board(pilot).model.has_frame and isinstance(app.focused, PatchedTable),
            )
            yield pilot


def board(pilot: Pilot[Any]) -> Dashboard:
    assert isinstance(pilot.app, Dashboard)
    return pilot.app


async def until(pilot: Pilot[Any], is_so: Callable[[], bool]) -> None:
    """Wait for it; nobody presses a key."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():
                await asyncio.sleep(0.02)
                await pilot.pause()
    except TimeoutError:
        shown = [cells(pilot, slot) for slot in range(3)]
        told = [one.message for one in pilot.app._notifications]
        raise AssertionError(f"never so: {shown}, {told}") from None


def cells(pilot: Pilot[Any], slot: int) -> list[str]:
    """The row of a slot as a person sees it."""
    table = pilot.app.screen.query(PatchedTable).first()
    return [text.plain for text in table.get_row(str(slot))] if table.row_count else []


async def talk(url: str, **more: Any) -> None:
    async with Client(url) as client:
        body = {"messages": HELLO, "temperature": 0, **more}
        await client.post("/v1/chat/completions", body)


async def test_h2_a_row_changes_by_itself_while_a_slot_decodes(live: Running) -> None:
    async with watching(live.url) as pilot:
        talking = asyncio.create_task(
            talk(live.url, max_tokens=900, ignore_eos=True, id_slot=1, session_id=AGENT)
        )
        seen: list[list[str]] = []
        async with asyncio.timeout(PATIENCE_S):
            while not talking.done() and len(seen) < 3:
                await asyncio.sleep(0.05)
                row = cells(pilot, 1)
                if row and row[2].startswith("writing") and row not in seen:
                    seen.append(row)
        talking.cancel()
        assert len(seen) >= 2, seen
        assert {row[1] for row in seen} == {AGENT}
        speed = re.fullmatch(r"writing, \S+ tokens, (\S+) tok/s", seen[-1][2])
        assert speed is not None
        assert float(speed[1]) > 0
        await until(pilot, lambda: cells(pilot, 1)[2].startswith("idle"))


async def test_h3_what_is_shown_is_what_metrics_and_slots_say(live: Running) -> None:
    await talk(live.url, max_tokens=12, id_slot=0)
    await talk(live.url, max_tokens=12, id_slot=0)
    async with watching(live.url) as pilot, httpx.AsyncClient(base_url=live.url) as http:
        app = board(pilot)
        metrics = numbers((await http.get("/metrics")).text)
        slots = (await http.get("/slots")).json()
        now = app.model.frame.snapshot.counters
        assert metrics["llamacpp:prompt_tokens"] == now.n_prompt_tokens
        assert metrics["llamacpp:prompt_tokens_cached"] == now.n_cached_tokens > 0
        assert metrics["llamacpp:tokens_predicted"] == now.n_generated_tokens
        assert metrics["mlxstack_requests_completed"] == now.n_completed
        assert metrics["mlxstack_kv_bytes"] == app.model.frame.snapshot.kv_bytes
        told = "".join(cell.text for cell in totals(app.model, 80)[0])
        assert f"out {int(metrics['llamacpp:tokens_predicted'])} " in told
        for slot in slots:
            row = cells(pilot, slot["id"])
            assert row[3].endswith(f" {slot['n_tokens']}")
            assert row[2].startswith("idle" if slot["n_tokens"] else "empty")


def numbers(text: str) -> dict[str, float]:
    return {
        family.name: family.samples[0].value
        for family in text_string_to_metric_families(text)
        if family.samples
    }


async def test_h3_cache_and_requests_are_what_the_service_says(live: Running) -> None:
    await talk(live.url, max_tokens=4)
    await talk(live.url, max_tokens=4)
    async with watching(live.url) as pilot, httpx.AsyncClient(base_url=live.url) as http:
        app = board(pilot)
        said = (await http.get("/cache")).json()
        n_requests = said["whole"]["n_requests"]
        await until(pilot, lambda: whole_of(app).n_requests == n_requests > 1)
        cache = app.model.frame.cache
        sums = whole_of(app)
        assert cache is not None
        assert (cache.memory_budget, cache.n_entries) == (said["memory_budget"], said["n_entries"])
        assert (sums.n_hits, sums.n_cached) == (said["whole"]["n_hits"], said["whole"]["n_cached"])
        metrics = numbers((await http.get("/metrics")).text)
        assert sums.n_cached == metrics["llamacpp:prompt_tokens_cached"]
        await pilot.press("4")
        shown = [row.value for row in app.screen.query(PatchedTable).first().rows]
        assert shown[:50] == [one["id"] for one in (await http.get("/requests")).json()][:50]


def whole_of(app: Dashboard) -> WindowSums:
    cache = app.model.frame.cache
    return cache.whole if cache else WindowSums()


async def test_h4_save_erase_and_restore_reach_the_service(live: Running) -> None:
    await talk(live.url, max_tokens=12, id_slot=2)
    async with watching(live.url) as pilot:
        app = board(pilot)
        n_tokens = app.model.frame.snapshot.slots[2].n_tokens
        assert n_tokens > 0
        await pilot.press("down", "down")
        await until(pilot, lambda: app.chosen[ActionTarget.SLOT] == "2")
        await pilot.press("S")
        await pilot.press("ctrl+u", *"mine.kv", "enter")
        await until(pilot, lambda: said(app, f"slot 2: {n_tokens} tokens saved to mine.kv"))
        await pilot.press("E", "y")
        await until(pilot, lambda: cells(pilot, 2)[2] == "empty")
        await pilot.press("R")
        await pilot.press("ctrl+u", *"mine.kv", "enter")
        await until(pilot, lambda: cells(pilot, 2)[3].endswith(f" {n_tokens}"))
        await pilot.press("R")
        await pilot.press("ctrl+u", *"none.kv", "enter")
        await until(pilot, lambda: said(app, "none.kv"))


def said(app: Dashboard, text: str) -> bool:
    return any(text in one.message for one in app._notifications)


async def test_whoever_attaches_late_sees_charts_that_are_not_empty(live: Running) -> None:
    await talk(live.url, max_tokens=40)
    samples = live.service.stats.samples
    counters = live.service.snapshot().counters
    n_generated = counters.n_generated_tokens
    await patience.until(lambda: samples[-1].n_generated >= n_generated and len(samples) >= 3)
    oldest = samples[0]
    async with watching(live.url) as pilot:
        app = board(pilot)
        assert app.model.samples[0].time <= max(oldest.at, app.model.now.time - WINDOW_S) + 3
        shown = [pair[1] for pair in series(app.model, 300)]
        assert len([rate for rate in shown if rate is not None]) >= 2
        assert sum(rate for rate in shown if rate) > 0
        chart = app.screen.query_one("#decode", SparklineChart)
        drawn = "".join(chart.render_line(y).text for y in range(chart.size.height))
        assert any(sign in drawn for sign in "▂▃▄▅▆▇█")


async def test_the_past_is_bounded_and_only_the_first_frame_has_it(live: Running) -> None:
    service, _ = standing(ServerSpec(port=0))
    for _ in range(3 * MAX_SAMPLES):
        service.stats.sample(service.snapshot().counters)
    assert len(service.stats.samples) == MAX_SAMPLES
    frames = []
    async with Client(live.url) as client:
        async for message in client.feed("/events"):
            assert isinstance(message, ServerSentEvent)
            frames.append(msgspec.json.decode(message.data, type=StatusFrame))
            if len(frames) == 2:
                break
    assert [bool(one.past) for one in frames] == [True, False]


async def test_h1_leaving_does_not_touch_the_service(live: Running) -> None:
    talking = asyncio.create_task(talk(live.url, max_tokens=300, ignore_eos=True))
    async with watching(live.url) as pilot:
        await pilot.press("q")
    await talking
    async with Client(live.url) as client:
        assert (await client.health()).is_ready


async def test_h5_a_banner_while_it_is_away_and_none_when_it_is_back(
    model_folder: Path, tmp_path: Path
) -> None:
    with running(tiny_preset(model_folder), tmp_path) as first:
        port = int(first.url.rpartition(":")[2])
        stack = watching(first.url)
        pilot = await stack.__aenter__()
    app = board(pilot)
    try:
        await until(pilot, lambda: app.model.link.state is LinkState.LOST)
        banner = app.screen.query_one("#banner")
        await until(pilot, lambda: bool(banner.display))
        assert cells(pilot, 0)[2] == "empty"
        preset = tiny_preset(model_folder)
        again = structs.replace(preset, server=ServerSpec(port=port))
        began = time.monotonic()
        with running(again, tmp_path):
            await until(pilot, lambda: app.model.link.state is LinkState.LIVE)
            await until(pilot, lambda: not banner.display)
            assert app.model.frame.service.uptime_s <= time.monotonic() - began
    finally:
        await stack.__aexit__(None, None, None)


async def test_a_wrong_key_is_told_in_the_banner(model_folder: Path, tmp_path: Path) -> None:
    preset = structs.replace(
        tiny_preset(model_folder), server=ServerSpec(port=0, api_keys=("right",))
    )
    with running(preset, tmp_path) as found:
        async with watching(found.url, "right") as pilot:
            assert board(pilot).model.link.state is LinkState.LIVE
        async with Client(found.url, "wrong") as client, aclosing(LiveFeed(client).news()) as feed:
            lost = await anext(news async for news in feed if isinstance(news, FeedLost))
        assert "Invalid API Key; put the key into MLX_STACK_API_KEY" in lost.reason
        async with Client(found.url) as client, aclosing(pages(LiveFeed(client), 80, 1.0)) as shown:
            told = await anext(shown)
        assert "an API key is needed" in told and "MLX_STACK_API_KEY" in told


async def test_the_feed_rests_when_the_service_does_and_ends_with_it(
    model_folder: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    async def follow(url: str) -> None:
        with suppress(httpx.RemoteProtocolError):
            async with (
                httpx.AsyncClient(timeout=PATIENCE_S) as http,
                http.stream("GET", f"{url}/events") as answer,
            ):
                assert answer.headers["content-type"].startswith("text/event-stream")
                async for line in answer.aiter_lines():
                    lines.append(line)  # noqa: PERF401 (the test looks at it meanwhile)
                ended.set_result("cleanly")

    with running(tiny_preset(model_folder), tmp_path) as found:
        listening = asyncio.create_task(follow(found.url))
        began = loop.time()
        await patience.until(lambda: told(lines)[-4:] == [": ping", "event: frame"] * 2)
        assert told(lines).count("event: frame") <= 2 + 2 * (loop.time() - began)
        leave(found)
        await asyncio.wait_for(listening, PATIENCE_S)
    assert ended.done()


def told(lines: list[str]) -> list[str]:
    """Frames, and the comments between them, in their order."""
    return [line for line in lines if line in ("event: frame", ": ping")]


def leave(found: Running) -> None:
    """What SIGTERM does first: the service stops, its feeds end."""
    future = asyncio.run_coroutine_threadsafe(found.service.stop(1.0), found.loop)
    del future


async def test_status_watch_prints_the_same(live: Running) -> None:
    async with Client(live.url) as client:
        async for page in pages(LiveFeed(client), 100, every_s=1.0):
            assert "tiny" in page
            assert "Slots" in page
            assert page.isprintable() or all(line.isprintable() for line in page.split("\n"))
            break


async def test_at_most_four_frames_per_second_under_load(live: Running) -> None:
    ats = []
    talking = asyncio.create_task(talk(live.url, max_tokens=900, ignore_eos=True))
    async with Client(live.url) as client:
        async for news in LiveFeed(client).news():
            if isinstance(news, StatusFrame):
                ats.append(news.at)
            if len(ats) == 6 or talking.done():
                break
    talking.cancel()
    assert all(later - sooner >= 0.25 for sooner, later in pairwise(ats))


def whole(view: MemoryView) -> int:
    """Bytes of the process, as its parts add up."""
    return view.weights_bytes + view.live_bytes + view.parked_bytes + view.workspace_bytes


async def test_the_memory_tile_tells_the_systems_figure_and_accounts_for_the_whole_process(
    live: Running,
) -> None:
    await talk(live.url, max_tokens=12, id_slot=0)
    async with watching(live.url) as pilot:
        app = board(pilot)
        await until(pilot, lambda: app.model.frame.cache is not None)

        def is_told() -> bool:
            """Whether the newest frame tells what the system does; both change all the time."""
            view = app.model.frame.memory
            system = psutil.virtual_memory()
            resident = psutil.Process().memory_info().rss
            return (
                view is not None
                and abs(view.available_bytes - system.available) < 0.05 * system.total
                and abs(whole(view) - resident) < 0.05 * resident
            )

        await until(pilot, is_told)
        view = app.model.frame.memory
        snapshot = app.model.frame.snapshot
        assert view is not None
        assert view.total_bytes == psutil.virtual_memory().total
        assert view.live_bytes == snapshot.kv_bytes
        assert view.weights_bytes > 0
        assert whole(view) >= snapshot.active_bytes
        tile = "".join(cell.text for cell in memory(app.model, 80)[0])
        assert f"{gib(view.available_bytes)} GiB left of {gib(view.total_bytes)}" in tile


async def test_agents_have_titles_and_a_first_turn_is_a_new_conversation(live: Running) -> None:
    rules = "You are Claude Code.\nWorking directory: /src/shop-api\n" + "Rules are rules. " * 30
    changed = rules.replace("Rules are rules. ", "Rules are clear. ", 1)
    first = [{"role": "system", "content": rules}, {"role": "user", "content": "Fix the page."}]
    other = [first[0], {"role": "user", "content": "Name the three largest files."}]
    later = [
        {"role": "system", "content": changed},
        first[1],
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "And the other one."},
    ]
    async with (
        httpx.AsyncClient(base_url=live.url, timeout=PATIENCE_S) as http,
        watching(live.url) as pilot,
    ):
        reasons = []
        for messages in (first, other, later):
            body = {"messages": messages, "max_tokens": 4}
            answer = await http.post("/v1/chat/completions", json=body)
            reasons.append(answer.headers.get("x-mlx-stack-cache-miss-reason", ""))
        assert reasons[1].startswith("new conversation at token")
        assert reasons[2].startswith("diverged at token")
        app = board(pilot)
        await until(pilot, lambda: missed(app)[:2] == ["diverged", "new conversation"])
        diverged, new = (app.model.frame.requests or ())[:2]
        assert new.miss is not None
        assert (new.miss.n_lost, new.miss.lost_s) == (0, 0.0)
        assert diverged.miss is not None
        assert diverged.miss.n_lost > 0
        assert 0 < diverged.miss.lost_s <= diverged.prefill_s
        assert set(app.model.frame.titles.values()) >= {"claude · shop-api"}
        assert agent_name(app.model, diverged.agent).startswith("claude · shop-api ")


def missed(app: Dashboard) -> list[str]:
    """Reasons of the misses of the last requests, the latest first."""
    return [one.miss.reason if one.miss else "" for one in app.model.frame.requests or ()]
