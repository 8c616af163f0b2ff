"""Recorded sessions of real clients on a real coder, played to a model that writes its answers."""

import json
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxstack.core.conversation import Conversation, Role
from tests.api.running import Running
from tests.clients.agent_recordings import (
    RecordedAgent,
    RecordedRequest,
    bodies,
    inflated,
    read_answer,
    recorded_agents,
)
from tests.clients.agents import N_CTX, holds_tools, offered
from tests.clients.relay import Exchange
from tests.clients.stage import Script, model, playing_model
from tests.clients.tapes import Request
from tests.clients.test_recorded import BLOCK, conversation, meaning, shared
from tests.patience import PATIENCE_S

N_EDGE = 60
"""Characters at both ends of a message that its line of the script is found by."""
OBJECT_AT_THE_END = re.compile(r"(?:```\w*\s*(\{.*\})\s*```|(\{.*\}))$", re.DOTALL)
AGENTS = recorded_agents()

pytestmark = [pytest.mark.mlx, pytest.mark.net]


class Session:
    """Requests of a recording, with the ids that this service gave to calls."""

    def __init__(self, recorded: RecordedAgent) -> None:
        self.recorded = recorded
        self._bodies = bodies(recorded)
        self._ids: dict[str, str] = {}

    def requests(self) -> Iterator[tuple[RecordedRequest, Request]]:
        """Recorded requests, and what is sent for them."""
        for recorded, body in zip(self.recorded.requests, self._bodies, strict=True):
            text = json.dumps(body)
            for before, now in self._ids.items():
                text = text.replace(before, now)
            yield recorded, Request("POST", recorded.path, {}, json.loads(text))

    def rename(self, before: str, now: str) -> None:
        """Take another id for a call from here on."""
        self._ids[before] = now


def said_in(recorded: RecordedAgent) -> Script:
    """Answers of a recording, each found by what its request ends with."""
    script: Script = []
    for request, body in zip(recorded.requests, bodies(recorded), strict=True):
        talk = conversation(Request("POST", request.path, {}, body))
        assert talk is not None
        n_answers = count_answers(talk)
        heard = [talk.messages[-1].text]
        if not n_answers:
            heard.insert(0, talk.messages[0].text)
        pattern = ".*".join(edges(text) for text in heard)
        script.append({"when": pattern, "say": inflated(request.said), "after": n_answers})
    return script


def edges(text: str) -> str:
    """Pattern of a text by its beginning and its end."""
    text = text.strip()
    if len(text) <= 2 * N_EDGE:
        return re.escape(text)
    return f"{re.escape(text[:N_EDGE])}.*{re.escape(text[-N_EDGE:])}"


def count_answers(talk: Conversation) -> int:
    """Answers in a history; neighbors are one."""
    return sum(role is Role.ASSISTANT for role, _ in groupby(m.role for m in talk.messages))


@pytest.fixture(params=AGENTS, ids=lambda recorded: recorded.client)
def recorded(request: pytest.FixtureRequest) -> RecordedAgent:
    session: RecordedAgent = request.param
    return session


def test_recorded_agents_are_answered_and_reuse_what_they_sent(
    recorded: RecordedAgent, tmp_path: Path
) -> None:
    """Each request is accepted, and each answer read as the calls and the text that it is.

    At least 99 % of an earlier prompt is reused, and all that two prompts share but for a block.
    """
    folder = model(tmp_path / "model", said_in(recorded))
    session = Session(recorded)
    heard: list[tuple[tuple[Any, ...], tuple[int, ...]]] = []
    with (
        playing_model(folder, tmp_path, N_CTX, thinking=False) as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http,
    ):
        for expected, request in session.requests():
            talk = conversation(request)
            assert talk is not None
            tokens = live.service.text_processor.prompt_maker.make(talk).tokens
            response = http.post(request.path, json=request.body)
            assert response.status_code == 200, response.text
            answer = read_answer(request.path, response.text)
            assert answer.is_whole
            called = [(call.name, json.loads(call.arguments)) for call in answer.calls]
            assert called == [
                (call.name, json.loads(inflated(call.arguments))) for call in expected.calls
            ]
            if not called:
                assert answer.text == inflated(expected.said)
            for before, now in zip(expected.calls, answer.calls, strict=True):
                session.rename(before.id, now.id)
            check_reuse(live, heard, meaning(talk), tokens)
            heard.append((meaning(talk), tokens))
        if any("tools" in request.fields for request in recorded.requests):
            holds_tools(live)


def test_calls_are_objects_that_end_an_answer_and_name_an_offered_tool(
    recorded: RecordedAgent,
) -> None:
    """Decision 16, by a second reading of what the model wrote."""
    for request, body in zip(recorded.requests, bodies(recorded), strict=True):
        exchange = Exchange("POST", request.path, bytearray(json.dumps(body).encode()))
        names = offered(exchange) if "tools" in body else {}
        called = []
        if found := OBJECT_AT_THE_END.search(inflated(request.said).strip()):
            written = json.loads(found[1] or found[2])
            called = [written["name"]] if written["name"] in names else []
        assert [call.name for call in request.calls] == called


def check_reuse(
    live: Running,
    heard: list[tuple[tuple[Any, ...], tuple[int, ...]]],
    talk: tuple[Any, ...],
    tokens: tuple[int, ...],
) -> None:
    """Compare the reused tokens of the latest request with earlier ones."""
    view = live.service.request_log.requests()[0]
    for earlier, before in heard:
        if talk[: len(earlier)] == earlier:
            assert view.n_cached >= 0.99 * len(before)
        assert view.n_cached >= shared(before, tokens) - BLOCK
