"""What real clients send again is read from the cache."""

import copy
import re
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import structs

from mlxstack.api.dialects.anthropic.request_schema import MessagesBody
from mlxstack.api.dialects.anthropic.to_conversation import conversation as from_messages
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody
from mlxstack.api.dialects.openai_chat.to_conversation import conversation as from_chat
from mlxstack.api.dialects.openai_responses.request_schema import ResponsesBody
from mlxstack.api.dialects.openai_responses.to_conversation import conversation as from_responses
from mlxstack.api.dialects.openai_responses.tool_names import toolbox
from mlxstack.core.conversation import Conversation
from mlxstack.core.formatting import short_time
from mlxstack.core.preset import ModelSpec, SlotSpec
from mlxstack.core.status import RequestView
from mlxstack.features.receipts.policy import Cause, seconds_of, waited_s
from tests import models
from tests.api.anthropic.speaking import events, in_order, n_prompt
from tests.api.responses.checking import check
from tests.api.running import TINY, Running, running, tiny_preset
from tests.clients.tapes import Request, Tape, tapes
from tests.patience import PATIENCE_S

N_CTX = 65536
BLOCK = 128
NARROW = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": N_CTX,
}
MESSAGES = "/v1/messages"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
GOES_ON = re.compile("code$|codex|toolsearch|loop|reasoning|subagent|fallback")
BILLING = re.compile(r"(cc_version=[\d.]+\.)\w+")

pytestmark = [pytest.mark.mlx, pytest.mark.net]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tiny model with the context of a large one."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    models.write(folder, {**TINY, **NARROW})
    preset = structs.replace(
        tiny_preset(folder),
        model=ModelSpec(id=str(folder), alias="local-model"),
        slots=SlotSpec(count=3, n_ctx=N_CTX),
    )
    with running(preset, tmp_path_factory.mktemp("home")) as live:
        yield live


@pytest.fixture
def http(wide: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=wide.url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(params=tapes(), ids=lambda tape: tape.name)
def tape(request: pytest.FixtureRequest) -> Tape:
    recorded: Tape = request.param
    if not recorded.requests:
        pytest.skip("MLX_STACK_CAPTURES names no folder with recordings of this client")
    return recorded


def test_c2_c3_c6_whatever_goes_on_from_an_earlier_request_loses_nothing(
    wide: Running, http: httpx.Client, tape: Tape
) -> None:
    """At least 99 % of an earlier prompt, and all that two prompts share but for a block.

    Short questions of scripts come from three slots in turn, and lose their last block.
    """
    n_followed = 0
    heard: list[tuple[tuple[Any, ...], tuple[int, ...]]] = []
    for request in tape.requests:
        meant = conversation(request)
        if meant is None:
            answer = http.request(request.method, request.path, json=request.body)
            assert answer.status_code in (200, 501), "only an embedding model embeds"
            continue
        expected = meaning(meant)
        tokens = wide.service.text_processor.prompt_maker.make(meant).tokens
        n_prompt, n_cached = ask(http, request)
        assert n_prompt >= len(tokens), "a forced call adds its opening mark"
        for earlier, before in heard:
            if "sdks" not in tape.name and expected[: len(earlier)] == earlier:
                n_followed += 1
                assert n_cached >= 0.99 * len(before), tape.name
            assert n_cached >= shared(before, tokens) - BLOCK
        heard.append((expected, tokens))
    assert n_followed or not GOES_ON.search(tape.name)


def test_the_receipt_of_each_slow_turn_explains_it(http: httpx.Client, tape: Tape) -> None:
    """Slow is above the session's median, in place of five seconds."""
    n_before = len(http.get("/requests").json())
    for request in tape.requests:
        if conversation(request) is not None:
            ask(http, request)
    views = msgspec.convert(http.get("/requests").json(), list[RequestView])
    views = views[: len(views) - n_before] or views
    slowest = sorted(views, key=lambda view: view.ttft_s + view.decode_s)[len(views) // 2 :]
    for view in slowest:
        receipt = http.get(f"/receipts/{view.id}").json()
        assert receipt["reason"] == (view.miss.reason if view.miss else None)
        seconds = seconds_of(view)
        assert seconds[receipt["cause"]] == max(seconds.values())
        figures = {
            Cause.ANSWER: f"tokens in {short_time(view.decode_s)}",
            Cause.OTHERS: f"waited {short_time(waited_s(view))}",
            Cause.RESTORE: f"in {short_time(view.restore_s)}",
        }
        first_token = f"first token {short_time(view.ttft_s)}"
        assert figures.get(receipt["cause"], first_token) in receipt["line"]
        if view.miss is not None and view.miss.n_lost:
            assert view.miss.reason in receipt["line"]


def test_a22_another_conversation_of_the_same_client_reuses_tools_and_system(
    wide: Running, http: httpx.Client, tape: Tape
) -> None:
    first = longest(tape)
    ask(http, first)
    second = structs.replace(first, body=copy.deepcopy(first.body))
    turns = second.body["input" if "input" in second.body else "messages"]
    asked = next(message for message in turns if message["role"] == "user")
    expected = "something else altogether"
    asked["content"] = expected if isinstance(asked["content"], str) else [text(asked, expected)]
    before, after = (conversation(request) for request in (first, second))
    assert before and after
    n_head = shared(
        *(wide.service.text_processor.prompt_maker.make(talk).tokens for talk in (before, after))
    )
    n_prompt, n_cached = ask(http, second)
    assert n_prompt > n_cached >= n_head - BLOCK
    system = [message.text for message in after.messages if message.role == "system"]
    n_system = sum(len(wide.service.text_processor.tokenizer.encode(text)) for text in system[:1])
    assert n_head >= n_system, "tools and system come before what the user says"


@pytest.mark.parametrize(
    "tape",
    [tape for tape in tapes() if "claude" in tape.name],
    indirect=True,
    ids=lambda tape: tape.name,
)
def test_c1_another_billing_header_loses_nothing(
    wide: Running, http: httpx.Client, tape: Tape
) -> None:
    first = longest(tape)
    if not BILLING.search(msgspec.json.encode(first.body).decode()):
        pytest.skip("the client sent no billing header in this recording")
    n_before, _ = ask(http, first)
    for version in ("3f6", "715"):
        changed = BILLING.sub(rf"\g<1>{version}", msgspec.json.encode(first.body).decode())
        n_prompt, n_cached = ask(http, structs.replace(first, body=msgspec.json.decode(changed)))
        assert n_prompt == n_before
        assert n_cached >= 0.99 * n_before


def longest(tape: Tape) -> Request:
    """The first of the requests with the most to say before the user does."""
    asked = [request for request in tape.requests if conversation(request) is not None]
    if not asked:
        pytest.skip("nothing was asked in this recording, only counted")
    return max(
        asked, key=lambda request: len(str([request.body.get("tools"), request.body.get("system")]))
    )


def text(message: Any, expected: str) -> dict[str, str]:
    """A text part of the kind that the turn has."""
    return {"type": message["content"][0]["type"], "text": expected}


def shared(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many tokens two prompts begin with in common."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )


def meaning(talk: Conversation) -> tuple[Any, ...]:
    """What a request says, without its clothes: the head, and then each turn."""
    head = tuple(tool.name for tool in talk.tools if not tool.is_deferred)
    return (head, talk.thinking, *talk.messages)


def conversation(request: Request) -> Conversation | None:
    """What is said in a request for an answer; None for any other."""
    match request.path.partition("?")[0]:
        case "/v1/messages":
            return from_messages(msgspec.convert(request.body, MessagesBody))
        case "/v1/chat/completions":
            return from_chat(msgspec.convert(request.body, ChatBody))
        case "/v1/responses":
            body = msgspec.convert(request.body, ResponsesBody)
            return from_responses(body, toolbox(body))
    return None


def ask(http: httpx.Client, request: Request) -> tuple[int, int]:
    """The tokens of the prompt, and those that were read from the cache."""
    keep = ("x-", "anthropic", "session", "thread", "originator")
    headers = {k: v for k, v in request.headers.items() if k.lower().startswith(keep)}
    answer = http.post(request.path, json=short(request), headers=headers)
    assert answer.status_code == 200, answer.text
    usage = used(request, answer.text)
    if "messages" in request.path:
        return n_prompt(usage), usage["cache_read_input_tokens"]
    name = "input" if "input_tokens" in usage else "prompt"
    return usage[f"{name}_tokens"], usage[f"{name}_tokens_details"]["cached_tokens"]


def short(request: Request) -> Any:
    """The same body, for a short answer that tells its usage."""
    if "responses" in request.path:
        return {**request.body, "max_output_tokens": 16}
    body = {**request.body, "max_tokens": 2}
    body.pop("max_completion_tokens", None)
    if "chat" in request.path and body.get("stream"):
        body["stream_options"] = {"include_usage": True}
    return body


def used(request: Request, text: str) -> Any:
    """The usage of an answer, streamed or not, which is checked on the way."""
    if not request.body.get("stream"):
        return msgspec.json.decode(text)["usage"]
    if "responses" in request.path:
        return check(text).response["usage"]
    if "messages" in request.path:
        named_events = events(text)
        in_order(named_events)
        return named_events[-2]["usage"]
    frames = [
        block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: {")
    ]
    return msgspec.json.decode(frames[-1])["usage"]
