"""The service over an engine that loads, hangs, dies, or says exactly what it is told."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from mlxstack.core.conversation import Conversation, Message, Role, Tool
from mlxstack.core.engine_events import FinishReason, SlotAssigned, TokenSampled
from mlxstack.core.errors import Broken, Busy, Loading, SetupError, TooLong
from mlxstack.core.preset import ModelSpec, Preset, SlotSpec
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request
from mlxstack.core.response_parts import (
    CollectedResponse,
    GenerationFinished,
    KeepAlive,
    PrefillProgressed,
    ReasoningPart,
    ResponsePart,
    ToolCallPart,
    gather,
)
from mlxstack.demo import MODEL_DIR
from mlxstack.policy.kv.conversation_id import user_turn_digests
from mlxstack.service import service as services
from mlxstack.service.calls.admission import admit, admit_text
from mlxstack.service.calls.generation import stream_response
from mlxstack.service.parts.generation_options import GenerationOptions, ToolChoiceMode
from mlxstack.service.parts.request_stream import EventDispatcher
from mlxstack.service.service import Service, ServiceHealth
from tests.patience import PATIENCE_S
from tests.service.standin import FACTS, StandIn, over

WEATHER = Tool("weather", "Tells it.", {"type": "object", "properties": {"city": {}}})
HELLO = Conversation(messages=(Message(Role.USER, "hello"),), tools=(WEATHER,), thinking=False)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'

Pair = tuple[Service, StandIn]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL_DIR)


@pytest.fixture
async def pair(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """A service that has just been loaded and looks after its engine often; its engine."""
    monkeypatch.setattr(services, "WATCH_S", 0.01)
    service, engine = made(tokenizer)
    engine.loading.set_result(FACTS)
    await service.start()
    yield service, engine
    await service.stop(0.1)


def made(tokenizer: Any) -> Pair:
    engine = StandIn(tokenizer)
    preset = Preset(model=ModelSpec(id="standin"), slots=SlotSpec(n_ctx=1024))
    return over(engine, preset), engine


async def say(
    pair: Pair, text: str, conversation: Conversation = HELLO, **more: Any
) -> tuple[CollectedResponse, list[ResponsePart]]:
    """What becomes of an engine's tokens for this text."""
    service, engine = pair
    engine.script = engine.tokenizer.encode(text, add_special_tokens=False)
    admitted = await admit(service, conversation, GenerationOptions("a-1", **more))
    parts = [part async for part in stream_response(service, admitted, 1, 1)]

    async def again() -> AsyncIterator[ResponsePart]:
        for part in parts:
            yield part

    return await gather(again()), parts


async def submitted(engine: StandIn) -> None:
    """Return when the engine has a request."""
    while not engine.asked:  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_parts_come_in_order(pair: Pair) -> None:
    answer, parts = await say(pair, "good day")
    assert isinstance(parts[0], SlotAssigned)
    assert isinstance(parts[-1], GenerationFinished)
    assert answer.content == "good day"
    assert answer.ended.ending is FinishReason.EOS
    assert [note.token for note in answer.notes] == list(pair[1].script or ())
    assert pair[0].request_log.last_in_slot[0].id == "a-1"


async def test_thoughts_are_told_apart_and_counted(pair: Pair) -> None:
    thinking = Conversation(messages=(Message(Role.USER, "hello"),), thinking=True)
    answer, parts = await say(pair, "let me see\n</think>\n\nyes", thinking)
    assert (answer.reasoning, answer.content) == ("let me see", "yes")
    assert 0 < answer.ended.n_reasoning < answer.ended.work.n_generated
    assert any(isinstance(part, ReasoningPart) for part in parts)


async def test_tool_calls_are_parsed_and_named(pair: Pair) -> None:
    answer, _ = await say(pair, f"I look.\n{CALL}", call_prefix="toolu_")
    (call,) = answer.calls
    assert (call.name, call.arguments) == ("weather", {"city": "Ulm"})
    assert call.id.startswith("toolu_")
    assert answer.content == "I look."


async def test_one_call_is_enough_when_only_one_is_wanted(pair: Pair) -> None:
    both, _ = await say(pair, f"{CALL}\n{CALL}")
    assert len(both.calls) == 2
    one, parts = await say(pair, f"{CALL}\n{CALL}", is_one_call=True)
    assert len(one.calls) == 1
    assert pair[1].cancelled == ["a-1"]
    assert isinstance(parts[-2], ToolCallPart)


async def test_a24_a_call_that_makes_no_sense_is_said(pair: Pair) -> None:
    text = "<tool_call>\nnot json\n</tool_call>"
    answer, _ = await say(pair, text)
    assert answer.calls == ()
    assert answer.content == text


async def test_a_required_call_is_begun_for_the_model(pair: Pair) -> None:
    answer, _ = await say(
        pair, CALL.removeprefix("<tool_call>"), tool_choice=ToolChoiceMode.REQUIRED
    )
    assert answer.calls[0].name == "weather"
    opening = pair[1].tokenizer.tool_call_start_tokens
    assert pair[1].asked[0].tokens[-len(opening) :] == tuple(opening)


async def test_a_forbidden_call_cannot_be_opened(pair: Pair) -> None:
    free, _ = await say(pair, "no")
    forbidden, _ = await say(pair, "no", tool_choice=ToolChoiceMode.NONE)
    assert forbidden.content == free.content
    first, second = pair[1].asked
    assert first.tokens == second.tokens, "the tools stay in the prompt, for the cache"
    assert dict(second.sampling.logit_bias)[pair[1].tokenizer.tool_call_start_tokens[0]] < -1e9


async def test_stop_words_cancel_the_engine(pair: Pair) -> None:
    answer, _ = await say(pair, "one two three four", stop=("three",))
    assert answer.content == "one two "
    assert (answer.ended.ending, answer.ended.stop_string) == (FinishReason.WORD, "three")
    assert pair[1].cancelled == ["a-1"]
    assert 0 < answer.ended.work.n_generated < len(pair[1].script or ())


async def test_progress_only_when_wanted(pair: Pair) -> None:
    _, without = await say(pair, "yes")
    _, parts = await say(pair, "yes", has_progress=True)
    assert not any(isinstance(part, PrefillProgressed) for part in without)
    found = [part for part in parts if isinstance(part, PrefillProgressed)]
    assert (found[0].n_done, found[-1].n_done) == (0, found[0].n_prompt)


async def test_x20_silence_is_broken_by_quiet(pair: Pair) -> None:
    service, engine = pair
    engine.script = None
    admitted = await admit_text(service, "hello", GenerationOptions("a-1"))
    parts = stream_response(service, admitted, 0.2, 0.02)
    found = [await anext(parts) for _ in range(4)]
    await parts.aclose()
    assert isinstance(found[0], SlotAssigned)
    assert found[1:] == [KeepAlive(0, len(admitted.request.tokens))] * 3
    assert engine.cancelled == ["a-1"]


async def test_x9_leaving_cancels(pair: Pair) -> None:
    service, engine = pair
    engine.script = None
    admitted = await admit_text(service, "hello", GenerationOptions("a-1"))
    task = asyncio.create_task(gather(stream_response(service, admitted, 1, 1)))
    await submitted(engine)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.cancelled == ["a-1"]


async def test_a_conversation_that_is_refused_is_not_remembered(pair: Pair) -> None:
    begun = Message(Role.USER, "hello")
    with pytest.raises(TooLong):
        long = Conversation((begun, Message(Role.USER, "word " * 5000)))
        await admit(pair[0], long, GenerationOptions("a-1"))
    other = Conversation((begun, Message(Role.USER, "and then")))
    admitted = await admit(pair[0], other, GenerationOptions("a-2"))
    assert admitted.request.display_name == f"chat-{user_turn_digests(other)[0][:8]}"


async def test_a_refused_ask_raises_what_the_engine_said(pair: Pair) -> None:
    service, engine = pair
    engine.is_full = True
    admitted = await admit_text(service, "hello", GenerationOptions("a-1"))
    with pytest.raises(Busy) as refused:
        await gather(stream_response(service, admitted, 1, 1))
    assert refused.value.retry_after == 3
    assert engine.cancelled == []


async def test_nothing_is_served_before_the_model_is_there(tokenizer: Any) -> None:
    service, engine = made(tokenizer)
    starting = asyncio.create_task(service.start())
    await asyncio.sleep(0)
    assert service.health is ServiceHealth.LOADING
    for ask in (lambda: service.facts, lambda: service.text_processor, service.require):
        with pytest.raises(Loading):
            ask()
    engine.loading.set_result(FACTS)
    await starting
    assert service.health is ServiceHealth.OK
    await service.stop(0)
    with pytest.raises(Loading):
        service.require()


@pytest.mark.parametrize("error", [SetupError("no such folder"), ValueError("odd")])
async def test_a_failed_load_is_a_setup_error(tokenizer: Any, error: Exception) -> None:
    service, engine = made(tokenizer)
    engine.loading.set_exception(error)
    with pytest.raises(SetupError, match=str(error)):
        await service.start()
    assert service.health is ServiceHealth.BROKEN
    with pytest.raises(Broken):
        service.require()


@pytest.mark.parametrize("how", ["dies", "hangs"])
async def test_a_dead_or_stuck_engine_fails_who_waits(pair: Pair, how: str) -> None:
    service, engine = pair
    engine.script = None
    admitted = await admit_text(service, "hello", GenerationOptions("a-1"))
    waiting = asyncio.create_task(gather(stream_response(service, admitted, 5, 5)))
    await submitted(engine)
    engine.is_dead = how == "dies"
    engine.silent_s = 121.0 if how == "hangs" else 0.0
    with pytest.raises(Broken, match="died" if how == "dies" else "121 s"):
        await asyncio.wait_for(waiting, PATIENCE_S)
    assert service.health is (ServiceHealth.BROKEN if how == "dies" else ServiceHealth.STALLED)
    assert service.died.is_set() == (how == "dies")


async def test_a_stalled_engine_may_recover(pair: Pair) -> None:
    service, engine = pair
    engine.silent_s = 121.0
    assert service.health is ServiceHealth.STALLED
    engine.silent_s = 0.0
    assert service.health is ServiceHealth.OK


async def test_stopping_fails_who_is_left(pair: Pair) -> None:
    service, engine = pair
    engine.script = None
    admitted = await admit_text(service, "hello", GenerationOptions("a-1"))
    waiting = asyncio.create_task(gather(stream_response(service, admitted, 5, 5)))
    await submitted(engine)
    await service.stop(0.1)
    with pytest.raises(Loading):
        await waiting


class Counting(asyncio.SelectorEventLoop):
    """Counts how often other threads wake it."""

    n_woken = 0

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> Any:
        self.n_woken += 1
        return super().call_soon_threadsafe(*args, **kwargs)


async def test_outbox_wakes_the_loop_once_per_turn() -> None:
    def body() -> tuple[int, int]:
        outbox = EventDispatcher()
        loop = Counting()
        outbox.bind(loop)
        queues = [outbox.open(Request(name, PromptTokens((1, 2)), 1), str) for name in "abc"]
        events = tuple(TokenSampled(name, 1) for name in "abcz")
        before = loop.n_woken
        outbox.deliver(events)
        loop.run_until_complete(asyncio.sleep(0))
        woken = loop.n_woken - before
        loop.close()
        outbox.deliver(events)
        return woken, sum(map(len, queues))

    assert await asyncio.to_thread(body) == (1, 3)
