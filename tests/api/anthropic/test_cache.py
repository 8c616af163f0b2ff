"""What a coding agent's next request finds in the cache, whatever it changed at its clothes."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from mlxstack.core.preset import SlotSpec
from tests.api.anthropic import shapes
from tests.api.anthropic.speaking import PATH, Event, n_prompt, stream
from tests.api.running import Running, running, tiny_preset
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

# What another slot left behind is shared by whole blocks.
BLOCK = 128


@pytest.fixture(scope="module")
def roomy(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Three slots that hold an agent's head; more than one conversation fits the cache."""
    preset = structs.replace(tiny_preset(model_folder), slots=SlotSpec(count=3, n_ctx=8192))
    with running(preset, tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture
def http(roomy: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=roomy.url, timeout=PATIENCE_S) as client:
        for slot in range(3):
            client.post(f"/slots/{slot}?action=erase").raise_for_status()
        yield client


def usage(found: list[Event]) -> dict[str, int]:
    return dict(next(event for event in found if event["type"] == "message_delta")["usage"])


def run(http: httpx.Client, body: shapes.Body) -> dict[str, int]:
    return usage(stream(http, body))


def count(http: httpx.Client, body: shapes.Body) -> int:
    return int(http.post(f"{PATH}/count_tokens", json=body).json()["input_tokens"])


def loses_nothing(before: dict[str, int], after: dict[str, int]) -> None:
    """At least 99 % of the previous prompt is read from the cache."""
    assert after["cache_read_input_tokens"] >= 0.99 * n_prompt(before)


def test_c2_c3_a_follow_up_turn_loses_nothing(http: httpx.Client) -> None:
    first = shapes.opening("run the marker command please")
    before = run(http, first)
    assert n_prompt(before) > 10 * BLOCK
    shown = shapes.result("CAPTURED_OK", is_error=False)
    second = shapes.following(first, shapes.canned("ToolA", command="echo"), shown)
    after = run(http, second)
    loses_nothing(before, after)
    again = {"type": "text", "text": "a second different prompt"}
    third = shapes.following(second, [{"type": "text", "text": "Done."}], again)
    loses_nothing(after, run(http, third))


def test_c1_another_header_loses_nothing(http: httpx.Client) -> None:
    body = shapes.opening("the same words")
    before = run(http, body)
    for suffix in ("100", "3f6", "715; cch=a5145"):
        changed = shapes.opening("the same words", suffix)
        assert changed != body
        loses_nothing(before, run(http, changed))


def test_a22_another_conversation_reuses_tools_and_system(http: httpx.Client) -> None:
    run(http, shapes.opening("the first conversation", "715"))
    head = {**shapes.opening(""), "messages": [{"role": "user", "content": "x"}]}
    other = shapes.opening("something else altogether", "338")
    other["messages"][0]["content"][0] = shapes.reminder(77)
    after = run(http, other)
    n_head = count(http, head)
    assert n_head > 10 * BLOCK
    assert after["cache_read_input_tokens"] >= n_head - BLOCK


def test_c6_a20_tool_search_loses_nothing(http: httpx.Client) -> None:
    first = shapes.opening("find a tool")
    before = run(http, first)
    names = [one["name"] for one in shapes.found_later()]
    shown = shapes.result([{"type": "tool_reference", "tool_name": name} for name in names])
    grown = sorted([*first["tools"], *shapes.found_later()], key=lambda one: str(one["name"]))
    second = shapes.following(first, shapes.canned("ToolC", query="web"), shown, tools=grown)
    after = run(http, second)
    loses_nothing(before, after)
    assert n_prompt(after) > n_prompt(before) + 100, "the found tools are described"


def test_midstream_fallback_repeats_for_nothing(http: httpx.Client) -> None:
    body = shapes.opening("say something")
    before = run(http, body)
    whole = http.post(PATH, json={**body, "stream": False}).json()
    loses_nothing(before, whole["usage"])


def test_x31_short_requests_do_not_cost_the_long_ones_anything(http: httpx.Client) -> None:
    """The title, and others under one session id, come between two turns."""
    headers = {"x-claude-code-session-id": shapes.SESSION}
    http.headers.update(headers)
    first = shapes.opening("the main conversation")
    before = run(http, first)
    for i in range(5):
        run(http, shapes.title(f"<session>{i} the main conversation</session>"))
    shown = shapes.result("fine")
    after = run(http, shapes.following(first, shapes.canned("ToolA"), shown))
    assert after["cache_read_input_tokens"] >= n_prompt(before) - BLOCK


def test_x30_main_and_helper_run_side_by_side(http: httpx.Client) -> None:
    """One session, two heads, at the same time: neither loses, and neither hears the other."""
    bodies = [shapes.opening("main"), shapes.subagent("help")]
    headers: list[dict[str, str]] = [{}, {"x-claude-code-agent-id": "a4bb6d3fef88bc051"}]
    for one in headers:
        one["x-claude-code-session-id"] = shapes.SESSION

    def go(body: shapes.Body, named: dict[str, str]) -> dict[str, Any]:
        whole = {**body, "stream": False, "max_tokens": 12, "thinking": {"type": "disabled"}}
        return dict(http.post(PATH, json=whole, headers=named).raise_for_status().json())

    alone = [go(body, {})["content"] for body in bodies]
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(go, bodies, headers))
    assert [one["content"] for one in both] == alone
    assert all(one["usage"]["cache_read_input_tokens"] > 500 for one in both)


def test_z8_more_conversations_than_slots_lose_no_more_than_a_block(http: httpx.Client) -> None:
    openings = [shapes.opening(f"conversation number {i}", f"{i}00") for i in range(5)]
    for one in openings:
        one["messages"][0]["content"][0] = shapes.reminder(200 + len(one["messages"][0]))
    before = [run(http, one) for one in openings]
    shown = shapes.result("fine")
    for one, cold in zip(openings, before, strict=True):
        after = run(http, shapes.following(one, shapes.canned("ToolA"), shown))
        assert after["cache_read_input_tokens"] >= n_prompt(cold) - BLOCK
