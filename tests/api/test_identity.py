"""Agents told apart: through the door, and in recordings of real clients where there are any.

Recordings hold their vendors' words, so that none is part of this repository; see
`tests/clients/tapes.py`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from mlxstack.api.caller import session_hint
from mlxstack.api.dialects.anthropic.request_schema import MessagesBody
from mlxstack.api.dialects.anthropic.to_conversation import conversation as from_messages
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody
from mlxstack.api.dialects.openai_chat.to_conversation import conversation as from_chat
from mlxstack.api.dialects.openai_responses.request_schema import ResponsesBody
from mlxstack.api.dialects.openai_responses.to_conversation import conversation as from_responses
from mlxstack.api.dialects.openai_responses.tool_names import ToolNames
from mlxstack.core.conversation import Conversation
from mlxstack.core.preset import SlotSpec
from mlxstack.core.status import StatusFrame
from mlxstack.policy.kv.conversation_id import ConversationNamer, user_turn_digests
from tests import models
from tests.api.running import Running, running, tiny_preset
from tests.environment import option
from tests.patience import PATIENCE_S

FOLDER = option("CAPTURES")
PATHS = ("/v1/messages", "/v1/chat/completions", "/v1/responses")
SYSTEM = "You are a patient assistant who likes short words. " * 12

pytestmark = [pytest.mark.mlx, pytest.mark.net]


def recorded(file: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The name of every generating request of a recording, and what was told in it."""
    names = ConversationNamer()
    for one in json.loads((Path(FOLDER or "") / file).read_text()):
        body = one["body"]
        headers = {k.lower(): v for k, v in one["headers"].items()}
        if one["path"].split("?")[0] not in PATHS:
            continue
        owner = (body.get("metadata") or {}).get("user_id")
        said = user_turn_digests(meant(one["path"], body))
        yield names.name(said, session_hint(headers, body.get("prompt_cache_key"), owner)), said


def meant(path: str, body: dict[str, Any]) -> Conversation:
    """The conversation of a recorded body, but for the tools, of which too little was kept."""
    body = {key: value for key, value in body.items() if key != "tools"}
    if path.endswith("responses"):
        return from_responses(msgspec.convert(body, ResponsesBody), ToolNames())
    if "messages" in path.rsplit("/", 1)[-1]:
        return from_messages(msgspec.convert(body, MessagesBody))
    return from_chat(msgspec.convert(body, ChatBody))


@pytest.mark.skipif(not FOLDER, reason="MLX_STACK_CAPTURES names no folder with recordings")
@pytest.mark.parametrize(
    ("file", "agents"),
    [
        ("claude-code-2.1.329-subagent.json", [0, 0, 1, 0]),
        ("claude-code-2.1.329-tool-loop-and-continue.json", [0, 0, 0]),
        ("claude-code-2.1.329-toolsearch.json", [0, 0]),
        ("codex-0.169-tool-loop.json", [0, 0]),
        ("opencode-1.18-tool-loop.json", [0, 1, 1]),
        ("opencode-1.18-reasoning.json", [0, 1, 1]),
    ],
)
def test_b9_x_30_recorded_conversations_are_told_apart(file: str, agents: list[int]) -> None:
    found = [name for name, _ in recorded(file)]
    order = list(dict.fromkeys(found))
    assert [order.index(name) for name in found] == agents


@pytest.mark.skipif(not FOLDER, reason="MLX_STACK_CAPTURES names no folder with recordings")
def test_b9_recorded_conversations_of_one_system_are_several() -> None:
    files = ("claude-code-2.1.329-tool-loop-and-continue.json", "claude-code-2.1.329-subagent.json")
    first = [next(recorded(file)) for file in files]
    assert first[0][0] != first[1][0]


def ask(sdk: openai.OpenAI, *said: str, headers: dict[str, str] | None = None) -> tuple[str, int]:
    """The agent that the answer names, and the cached tokens. Answers are "ok" in the history."""
    turns: list[Any] = [{"role": "system", "content": SYSTEM}]
    for text in said:
        turns += [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]
    raw = sdk.chat.completions.with_raw_response.create(
        model="tiny", messages=turns[:-1], max_tokens=4, extra_headers=headers
    )
    usage = raw.parse().usage
    assert usage and usage.prompt_tokens_details
    return raw.headers["x-mlx-stack-agent"], usage.prompt_tokens_details.cached_tokens or 0


def test_b9_agents_without_a_name_are_shown_in_slots_and_headers(
    sdk: openai.OpenAI, http: httpx.Client, live: Running
) -> None:
    session = {"x-session-id": "ses_1"}
    main, _ = ask(sdk, "how do boats float", headers=session)
    again, cached = ask(sdk, "how do boats float", "and stones", headers=session)
    assert again == main and main.startswith("opencode-") and cached > 0
    other, _ = ask(sdk, "why is rain wet")
    assert other != main
    shown = {slot["agent"] for slot in http.get("/slots").json()}
    assert {main, other} <= shown
    assert live.service.agent_registry.find(main)


def test_x_31_a_side_request_leaves_the_long_branch_cached(
    sdk: openai.OpenAI, http: httpx.Client
) -> None:
    session = {"x-session-id": "ses_2"}
    long = [f"turn {n} about a rather long story of a ship" for n in range(8)]
    ask(sdk, *long, headers=session)
    for _ in range(4):
        sdk.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": "Write a title for this."},
            ],
            max_tokens=4,
            extra_headers=session,
        )
    _, cached = ask(sdk, *long, "and now", headers=session)
    assert cached >= 300


def test_the_frame_tells_of_agents(sdk: openai.OpenAI, http: httpx.Client) -> None:
    body = {"model": "tiny", "max_tokens": 4, "session_id": "frame-1"}
    turns = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "who are you"}]
    for _ in range(2):
        http.post("/v1/chat/completions", json={**body, "messages": turns}).raise_for_status()
    for slot in range(3):
        http.post("/v1/chat/completions", json={
            **body, "session_id": f"other-{slot}", "id_slot": slot,
            "messages": [{"role": "user", "content": f"nothing in common {slot} " * 20}],
        }).raise_for_status()  # fmt: skip
    frame = until(http, "frame-1", frozenset({"parked", "disk"}))
    one = next(agent for agent in frame.agents or () if agent.id == "frame-1")
    assert (one.n_requests, len(one.turns), one.slot) == (2, 2, None)
    assert one.n_cached > 0 and one.turns[1].n_cached > one.turns[0].n_cached
    assert one.n_generated == 8 and one.n_bytes > 0 and one.n_tokens > 100
    assert one.states[0].model == "tiny" and one.states[0].place in ("memory", "disk")
    live = [agent for agent in frame.agents or () if agent.id.startswith("other-")]
    assert {agent.slot for agent in live} == {0, 1, 2}
    assert {agent.place for agent in live} == {"live"}


def until(http: httpx.Client, agent: str, places: frozenset[str]) -> StatusFrame:
    """The first frame of the feed in which this agent is in one of these places."""
    seen = ""
    with http.stream("GET", "/events", timeout=PATIENCE_S) as feed:
        for line in feed.iter_lines():
            if line.startswith("data: "):
                frame = msgspec.json.decode(line[6:], type=StatusFrame)
                seen = next((a.place for a in frame.agents or () if a.id == agent), "nowhere")
                if seen in places:
                    return frame
    raise AssertionError(f"{agent} is {seen}, not {sorted(places)}")


@pytest.mark.parametrize("config", [models.LLAMA, models.SLIDING], ids=["tiny", "tiny-swa"])
def test_x_31_a_title_in_the_only_slot_does_not_cost_the_conversation(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = models.write(tmp_path / "model", config)
    preset = tiny_preset(folder, slots=SlotSpec(count=1, n_ctx=1024))
    session = {"x-claude-code-session-id": "s"}
    with (
        running(preset, tmp_path / "home") as found,
        openai.OpenAI(base_url=f"{found.url}/v1", api_key="any", max_retries=0) as sdk,
    ):
        long = [f"turn {n} about a rather long story" for n in range(6)]
        main, _ = ask(sdk, *long, headers=session)
        title = sdk.chat.completions.with_raw_response.create(
            model="tiny",
            messages=[{"role": "user", "content": "Write a title."}],
            max_tokens=4,
            extra_headers=session,
        )
        assert title.headers["x-mlx-stack-agent"] != main
        again, cached = ask(sdk, *long, "and now", headers=session)
        assert again == main and cached >= 250
