"""The fleet benchmark: recorded sessions, their requests in two dialects, and a live run."""

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from mlxstack.api.dialects.anthropic.request_schema import MessagesBody
from mlxstack.api.dialects.anthropic.to_conversation import conversation as from_messages
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody
from mlxstack.api.dialects.openai_chat.to_conversation import conversation as from_chat
from mlxstack.bench.fleet import wire
from mlxstack.bench.fleet.bench import FleetRequest, find_model, fitting, run_servers
from mlxstack.bench.fleet.play import FleetPlan, PlayedRun, play_all
from mlxstack.bench.fleet.session import (
    FOLDER,
    RecordedRequest,
    RecordedSession,
    filler,
    requests,
    sessions,
)
from mlxstack.bench.fleet.wire import FleetDialect
from mlxstack.bench.servers import ServerUnderTest
from mlxstack.core.conversation import Role
from mlxstack.core.errors import Broken, SetupError
from mlxstack.core.preset import ModelSpec, SlotSpec
from tests import models
from tests.api.running import TINY, Running, running, tiny_preset

N_CTX = 32768
NARROW = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": N_CTX,
}
SHORT = RecordedSession(
    "short",
    (
        RecordedRequest(
            messages=(
                {"role": "system", "content": filler(600, "head")},
                {"role": "user", "content": "Read the file."},
            ),
            n_answer=6,
            tools=(
                {
                    "type": "function",
                    "function": {
                        "name": "read",
                        "description": "Read a file",
                        "parameters": {
                            "type": "object",
                            "properties": {"path": {"type": "string"}},
                        },
                    },
                },
            ),
        ),
        RecordedRequest(
            messages=(
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "read", "arguments": '{"path": "a.py"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "print(1)"},
            ),
            n_answer=6,
            n_kept=2,
            leave_after=2,
        ),
        RecordedRequest(messages=(), n_answer=6, n_kept=4, pause_s=0.01),
    ),
)


@pytest.fixture(params=sessions(), ids=lambda session: session.client)
def recorded(request: pytest.FixtureRequest) -> RecordedSession:
    session: RecordedSession = request.param
    return session


def test_a_recorded_session_repairs_and_extends_the_project(recorded: RecordedSession) -> None:
    played = list(requests(recorded, "r", 0))
    assert len(played) >= 10
    results_of_tools = [
        message["content"] for message in played[-1].messages if message["role"] == "tool"
    ]
    assert any("FAILED" in text for text in results_of_tools)
    assert "Ran 5 tests" in results_of_tools[-1]
    assert results_of_tools[-1].rstrip().endswith("OK")
    assert all(request.n_answer >= 8 for request in played)


def test_a_request_continues_the_one_before(recorded: RecordedSession) -> None:
    played = list(requests(recorded, "r", 0))
    for before, after in pairwise(played):
        assert after.messages[: len(before.messages)] == before.messages
        assert after.tools == before.tools


def test_agents_of_a_run_share_their_head_and_runs_share_nothing(recorded: RecordedSession) -> None:
    first, sibling = (next(requests(recorded, "r", agent)) for agent in (0, 1))
    stranger = next(requests(recorded, "s", 0))
    assert first.messages[0] == sibling.messages[0]
    assert first.messages != sibling.messages
    assert first.messages[0] != stranger.messages[0]


def test_no_words_of_vendors_are_in_the_files() -> None:
    for file in FOLDER.glob("*.json"):
        session = msgspec.json.decode(file.read_bytes(), type=RecordedSession)
        for request in session.requests:
            system = [m["content"] for m in request.messages if m["role"] == "system"]
            described = [tool["function"]["description"] for tool in request.tools or ()]
            assert all(text.startswith("[[") or not text for text in (*system, *described))
            assert "/tmp" not in json.dumps(request.messages)


def test_both_dialects_mean_the_same_conversation(recorded: RecordedSession) -> None:
    last = list(requests(recorded, "r", 0))[-1]
    chat = wire.body(last, FleetDialect.OPENAI, "m")
    messages = wire.body(last, FleetDialect.ANTHROPIC, "m")
    ours = from_chat(msgspec.convert(json.loads(json.dumps(chat)), ChatBody))
    theirs = from_messages(msgspec.convert(messages, MessagesBody))
    assert [tool.name for tool in ours.tools] == [tool.name for tool in theirs.tools]
    for role in (Role.TOOL, Role.ASSISTANT):
        texts = [[m.text for m in c.messages if m.role is role] for c in (ours, theirs)]
        assert texts[0] == texts[1]
    calls = [[call for m in c.messages for call in m.tool_calls] for c in (ours, theirs)]
    assert calls[0] == calls[1]


def test_as_text_takes_turns_and_loses_nothing(recorded: RecordedSession) -> None:
    last = list(requests(recorded, "r", 0))[-1]
    plain = wire.as_text(last)
    roles = [message["role"] for message in plain.messages]
    assert not plain.tools
    assert all(before != after for before, after in pairwise(roles))
    text = "\n".join(message["content"] for message in plain.messages)
    for message in last.messages:
        assert (message.get("content") or "") in text
        assert all(call["function"]["name"] in text for call in message.get("tool_calls", ()))
    assert all(tool["function"]["name"] in text for tool in last.tools)


OPENAI_STREAM = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data: {"choices":[{"delta":{"reasoning_content":"so "}}]}\n\n'
    b'data: {"choices":[{"delta":{"tool_calls":'
    b'[{"index":0,"function":{"name":"read","arguments":"{}"}}]}}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":7}}}\n\ndata: [DONE]\n\n'
)
ANTHROPIC_STREAM = (
    b'event: message_start\ndata: {"type":"message_start","message":{"usage":'
    b'{"input_tokens":2,"cache_read_input_tokens":7,"output_tokens":0}}}\n\n'
    b'data: {"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"so "}}\n\n'
    b'data: {"type":"content_block_start","content_block":{"type":"tool_use","name":"read"}}\n\n'
    b'data: {"type":"content_block_delta","delta":{"partial_json":"{}"}}\n\n'
    b'data: {"type":"message_delta","usage":{"output_tokens":3}}\n\n'
)


@pytest.mark.parametrize(
    ("stream", "dialect"),
    [(OPENAI_STREAM, FleetDialect.OPENAI), (ANTHROPIC_STREAM, FleetDialect.ANTHROPIC)],
    ids=["openai", "anthropic"],
)
def test_a_stream_is_read_with_its_counts_however_it_is_cut(
    stream: bytes, dialect: FleetDialect
) -> None:
    for cut in range(len(stream)):
        answer = wire.read([(1.0, stream[:cut]), (2.0, stream[cut:])], dialect)
        assert answer.text == "so read{}"
        assert (answer.n_prompt, answer.n_reused, answer.n_answer) == (9, 7, 3)


def test_an_event_that_is_no_json_is_named() -> None:
    with pytest.raises(Broken, match="no JSON: b'oops'"):
        wire.read([(0.0, b"data: oops\n\n")], FleetDialect.OPENAI)


def test_sessions_that_do_not_fit_are_left_out_and_named() -> None:
    said: list[str] = []
    plan = FleetPlan(sessions())
    names = [session.client for session in fitting(plan, 8192, said.append)]
    assert names == ["pi"]
    assert any("claude is left out" in line for line in said)
    with pytest.raises(SetupError, match="no session fits a context of 100 tokens"):
        fitting(plan, 100, said.append)


def test_a_file_that_is_no_session_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="has no sessions"):
        sessions(tmp_path)
    (tmp_path / "x.json").write_text('{"client": 1}')
    with pytest.raises(SetupError, match=r"x\.json is no recorded session"):
        sessions(tmp_path)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("wide") / "model"
    models.write(folder, {**TINY, **NARROW})
    preset = replace(
        tiny_preset(folder),
        model=ModelSpec(id=str(folder), alias="local-model"),
        slots=SlotSpec(count=3, n_ctx=N_CTX),
    )
    with running(preset, tmp_path_factory.mktemp("home")) as service:
        yield service


@pytest.mark.mlx
@pytest.mark.net
@pytest.mark.parametrize("dialect", FleetDialect)
def test_a_fleet_plays_on_a_service(live: Running, dialect: FleetDialect) -> None:
    plan = FleetPlan((SHORT,), widths=(1, 2), n_agents=3, dialect=dialect)
    server = asyncio.run(find_model(live.url, None, None))
    assert server.model == "local-model"
    played = asyncio.run(play_all([server], plan, f"run {dialect}"))
    for run in played[server.name].values():
        assert len(run.answered) == 9, "three agents, three turns"
        _check_agents(run)
        assert (run.n_equal, run.n_compared) == (3, 3)


def _check_agents(run: PlayedRun) -> None:
    for agent in range(3):
        first, left, last = [answer for answer in run.answered if answer.agent == agent]
        assert left.is_left
        assert 0 < first.answer.n_answer <= 6
        assert last.answer.n_reused > 0.5 * last.answer.n_prompt
        assert 0 < last.ttft_s <= last.seconds


@pytest.mark.mlx
@pytest.mark.net
def test_the_report_has_a_table_for_each_width_and_a_bar_for_each_server(live: Running) -> None:
    plan = FleetPlan((SHORT,), widths=(1, 2), n_agents=2, max_requests=1, is_text=True)
    servers = tuple(ServerUnderTest(name, live.url, "local-model") for name in ("a", "b"))
    report = asyncio.run(run_servers(FleetRequest(plan, 2, servers), lambda _: None))
    assert [table.title for table in report.tables] == [
        "Agents: 1 at a time",
        "Agents: 2 at a time",
    ]
    assert report.tables[0].columns == ("1 at a time", "a", "b", "a / b")
    assert len(report.charts[0].bars) == 4
    assert len(report.raw["turns per minute, a, 2 at a time"]) == 2


@pytest.mark.mlx
@pytest.mark.net
def test_a_refusal_is_told_with_its_server(live: Running) -> None:
    huge = RecordedRequest(messages=({"role": "user", "content": "a " * 2 * N_CTX},), n_answer=8)
    plan = FleetPlan((RecordedSession("huge", (huge,)),), widths=(1,), n_agents=1)
    server = ServerUnderTest("ours", live.url, "local-model")
    with pytest.raises(Broken, match="ours answered HTTP 400"):
        asyncio.run(play_all([server], plan, "run"))
