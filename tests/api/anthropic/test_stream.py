"""The order of events, for any reply that a model could give."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.api.dialects.anthropic.stream import MessageStream, ResponseIds
from mlxstack.core.engine_events import FinishReason, RequestTimings, SlotAssigned
from mlxstack.core.response_parts import (
    CollectedResponse,
    ContentPart,
    GenerationFinished,
    KeepAlive,
    ReasoningPart,
    ResponsePart,
    SpokenPart,
    ToolCallPart,
    in_pieces,
)
from tests.api.anthropic.speaking import blocks, events, in_order

NAMES = ResponseIds("msg_1", "m", "req_1")
WORDS = st.text(min_size=1, max_size=8)
ARGUMENTS = st.dictionaries(st.text(max_size=3), st.integers() | WORDS | st.none(), max_size=3)


def called(arguments: dict[str, Any]) -> ToolCallPart:
    return ToolCallPart("toolu_1", "f", arguments, json.dumps(arguments))


SPOKEN: st.SearchStrategy[SpokenPart] = st.one_of(
    st.builds(ReasoningPart, WORDS), st.builds(ContentPart, WORDS), st.builds(called, ARGUMENTS)
)
QUIET = st.builds(KeepAlive, st.just(1), st.just(2))


def said(*parts: ResponsePart) -> list[dict[str, Any]]:
    """The events of these parts, read back from their bytes."""
    stream = MessageStream(NAMES)
    sent = [
        piece
        for part in parts
        for piece in (in_pieces(part) if isinstance(part, ToolCallPart) else (part,))
    ]
    frames = [frame for part in sent for frame in stream.render(0, part)]
    return events(b"".join(frames).decode())


@given(
    st.lists(QUIET, max_size=2),
    st.lists(SPOKEN | QUIET, max_size=12),
    st.sampled_from(FinishReason).filter(lambda one: one is not FinishReason.CANCELLED),
)
def test_a30_any_reply_streams_in_order_and_adds_up(
    before: list[KeepAlive], parts: list[SpokenPart | KeepAlive], ending: FinishReason
) -> None:
    started = SlotAssigned("a", slot=0, n_prompt=9, n_cached=4)
    ended = GenerationFinished(
        ending, RequestTimings(n_prompt=9, n_cached=4, n_generated=7), slot=0
    )
    found = said(*before, started, *parts, ended)
    in_order(found)
    spoken = tuple(part for part in parts if not isinstance(part, KeepAlive))
    calls = tuple(part for part in spoken if isinstance(part, ToolCallPart))
    reply = CollectedResponse(started=started, ended=ended, calls=calls, spoken=spoken)
    whole = MessageStream(NAMES).whole((reply,))
    assert blocks(found) == json.loads(json.dumps([_plain(block) for block in whole.content]))
    last = found[-2]
    assert last["delta"]["stop_reason"] == whole.stop_reason
    assert (whole.stop_reason == "tool_use") is bool(calls)
    assert last["usage"]["output_tokens"] == 7
    assert sum(event["type"] == "ping" for event in found) == len(before) + sum(
        isinstance(part, KeepAlive) for part in parts
    )


def test_x21_pings_may_come_before_the_answer_begins() -> None:
    assert [event["type"] for event in said(KeepAlive(0, 9))] == ["ping"]


def test_a34_no_empty_text_between_thoughts_and_call() -> None:
    started = SlotAssigned("a", slot=0, n_prompt=9, n_cached=4)
    found = said(started, ReasoningPart("hm"), called({}))
    kinds = [e["content_block"]["type"] for e in found if e["type"] == "content_block_start"]
    assert kinds == ["thinking", "tool_use"]
    deltas = [e["delta"]["type"] for e in found if e["type"] == "content_block_delta"]
    assert deltas == ["thinking_delta", "signature_delta", "input_json_delta"]
    assert [e["delta"].get("partial_json") for e in found if "delta" in e][-1] == "{}"


def test_a_text_after_a_call_begins_without_the_space_between() -> None:
    started = SlotAssigned("a", slot=0, n_prompt=9, n_cached=4)
    parts = (ContentPart("\nOne."), called({}), ContentPart("\n\nTwo.\n"), ContentPart("\nThree."))
    found = said(started, *parts)
    texts = [e["delta"]["text"] for e in found if "text" in e.get("delta", {})]
    assert texts == ["\nOne.", "Two.\n", "\nThree."]
    ended = GenerationFinished(FinishReason.EOS, RequestTimings(), slot=0)
    reply = CollectedResponse(started=started, ended=ended, spoken=parts)
    first, _, second = MessageStream(NAMES).whole((reply,)).content
    assert (_plain(first)["text"], _plain(second)["text"]) == ("\nOne.", "Two.\n\nThree.")


def _plain(block: Any) -> dict[str, Any]:
    import msgspec

    return dict(msgspec.json.decode(msgspec.json.encode(block)))
