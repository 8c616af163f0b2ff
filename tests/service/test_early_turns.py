"""When the next turn of an agent is begun early, over an engine that does as it is told."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from msgspec.structs import replace

from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.demo import MODEL_DIR
from mlxstack.features.early_turns import service as early_turns
from mlxstack.service.calls.admission import admit
from mlxstack.service.calls.generation import stream_response
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.service.service import Service
from tests.callers import with_caller
from tests.service.standin import FACTS, StandIn, early_turns_of
from tests.service.test_service import made

HELLO = Conversation((Message(Role.USER, "hello"),), thinking=False)
Pair = tuple[Service, StandIn]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(MODEL_DIR)


@pytest.fixture
async def pair(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """A service on a computer with spare power, whose pauses are over at once."""
    monkeypatch.setattr(early_turns, "PAUSE_S", 0.0)
    service, engine = made(tokenizer)
    engine.loading.set_result(FACTS)
    early_turns_of(service).may_begin = lambda: True
    await service.start()
    yield service, engine
    await service.stop(0.1)


async def said(pair: Pair, *, copy: int = 0, **more: Any) -> str:
    """An answer, of a later choice by `copy`; the name of its agent."""
    service, engine = pair
    engine.script = engine.tokenizer.encode("good day", add_special_tokens=False)
    generation = await admit(service, HELLO, GenerationOptions("a-1", **with_caller(more)))
    chosen = generation.copy(copy) if copy else generation
    async for _ in stream_response(service, chosen, 1, 1):
        pass
    return chosen.request.display_name or ""


async def rest(service: Service) -> None:
    """Wait until nothing is to be begun any more."""
    await asyncio.gather(*early_turns_of(service).pauses.values(), return_exceptions=True)


async def test_an_answer_is_expected_to_be_followed_by_the_user(pair: Pair) -> None:
    service, engine = pair
    name = await said(pair, salt="mine")
    await rest(service)
    ((request, after),) = engine.expected
    assert (after, request.slot, request.max_tokens) == ("a-1", 0, 0)
    assert (request.display_name, request.salt, request.agent) == (name, "mine", None)
    turns = (*HELLO.messages, Message(Role.ASSISTANT, "good day"), Message(Role.USER, "Why?"))
    real = await service.text_processor.prompt(replace(HELLO, messages=turns))
    assert real.tokens[: len(request.tokens)] == request.tokens
    assert len(request.tokens) > len(engine.asked[0].tokens)


async def test_the_agent_and_its_client_keep_their_names(pair: Pair) -> None:
    await said(pair, agent="coder", client="claude-cli")
    await rest(pair[0])
    expected, _ = pair[1].expected[0]
    assert (expected.agent, expected.caller.client) == ("coder", "claude-cli")


@pytest.mark.parametrize(
    "more",
    [{"use_cache": False}, {"stop": ("day",)}, {"max_tokens": 0}, {"copy": 1}],
    ids=["without the cache", "stopped", "a prefill", "another choice"],
)
async def test_an_answer_that_is_not_kept_is_not_followed(pair: Pair, more: Any) -> None:
    await said(pair, **more)
    await rest(pair[0])
    assert not pair[1].expected


async def test_a_service_that_stops_begins_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, engine = pair
    monkeypatch.setattr(early_turns, "PAUSE_S", 3600.0)
    await said(pair)
    assert early_turns_of(service).pauses
    await service.stop(0.1)
    await rest(service)
    assert not engine.expected
