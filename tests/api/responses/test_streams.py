"""What is said becomes items and events that hold together (R-1 to R-3)."""

import json
from typing import Any

import pytest

from tests.api.responses.checking import PLAIN, text_of, told, whole
from tests.api.responses.conftest import Scripted

pytestmark = pytest.mark.net

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ASK: dict[str, Any] = {"model": "m", "input": "how is it in Ulm?", "tools": [WEATHER]}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


def bare(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without the ids that differ each time."""
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in output]


def test_words_become_a_message(scripted: Scripted) -> None:
    found = told(scripted.http, ASK)
    assert found.kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert text_of(found.response["output"]) == "Hello."
    assert found.response["status"] == "completed"
    assert found.response["id"].startswith("resp_")
    assert found.response["output"][0]["id"].startswith("msg_")
    used = found.response["usage"]
    assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"] > 0


def test_r1_calls_bear_ids_of_ours(scripted: Scripted) -> None:
    scripted.say(f"I look.\n{CALL}\n{CALL}")
    output = told(scripted.http, ASK).response["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "function_call"]
    for item in output[1:]:
        assert item["call_id"].startswith("call_")
        assert item["id"].startswith("fc_")
        assert json.loads(item["arguments"]) == {"city": "Ulm"}
        assert item["name"] == "weather"
        assert "namespace" not in item
    assert len({item["call_id"] for item in output[1:]}) == 2


def test_words_after_a_call_are_another_message(scripted: Scripted) -> None:
    scripted.say(f"First.\n\n{CALL}\n\nThen.\n\nLast.")
    found = told(scripted.http, ASK)
    output = found.response["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]
    assert [text_of([item]) for item in (output[0], output[2])] == ["First.", "Then.\n\nLast."]
    assert "".join(event["delta"] for event in found.of("output_text.delta")) == (
        "First.Then.\n\nLast."
    )


def test_thoughts_come_first(scripted: Scripted) -> None:
    scripted.say("I should greet.\n</think>\n\nHello.")
    found = told(scripted.http, {**ASK, **THINKING})
    assert [item["type"] for item in found.response["output"]] == ["reasoning", "message"]
    thoughts = found.response["output"][0]
    assert thoughts["id"].startswith("rs_")
    assert "I should greet." in thoughts["content"][0]["text"]
    assert thoughts["encrypted_content"] is None
    assert all(event["content_index"] == 0 for event in found.of("reasoning_text.delta"))
    assert found.response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize("said", ["Hello.", f"I look.\n{CALL}\n{CALL}", f"A.\n{CALL}\nB.", ""])
def test_r3_the_whole_response_is_that_of_the_stream(scripted: Scripted, said: str) -> None:
    scripted.say(said)
    one = whole(scripted.http, ASK)
    two = told(scripted.http, ASK).response
    assert bare(one["output"]) == bare(two["output"])
    assert one.keys() == two.keys()
    assert {k: v for k, v in one.items() if k in ("status", "usage", "tools", "text")} == {
        k: v for k, v in two.items() if k in ("status", "usage", "tools", "text")
    }


def test_saying_nothing_is_an_empty_message(scripted: Scripted) -> None:
    scripted.say("")
    (item,) = told(scripted.http, ASK).response["output"]
    assert item["content"][0]["text"] == ""
    scripted.say("only thoughts\n</think>")
    output = told(scripted.http, {**ASK, **THINKING}).response["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]


def test_parallel_tool_calls_false_ends_after_one(scripted: Scripted) -> None:
    scripted.say(f"{CALL}\n{CALL}")
    found = told(scripted.http, {**ASK, "parallel_tool_calls": False})
    assert [item["type"] for item in found.response["output"]] == ["function_call"]
    assert found.response["parallel_tool_calls"] is False


def test_a_call_that_makes_no_sense_is_said_and_counted(scripted: Scripted) -> None:
    def counted() -> float:
        lines = scripted.http.get("/metrics").text.splitlines()
        (line,) = (x for x in lines if x.startswith("mlxstack_unparsed_calls_total "))
        return float(line.split()[1])

    before = counted()
    scripted.say('<tool_call>\n{"name": \n</tool_call>')
    assert "<tool_call>" in text_of(told(scripted.http, ASK).response["output"])
    assert counted() == before + 1


def test_the_request_is_echoed(scripted: Scripted) -> None:
    body = {
        **ASK,
        "instructions": "be brief",
        "metadata": {"a": "b"},
        "tool_choice": "auto",
        "max_output_tokens": 99,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "text"}},
        "prompt_cache_key": "k",
    }
    made = whole(scripted.http, body)
    for name in body.keys() - {"input"}:
        assert made[name] == body[name], name


def test_the_sdk_accumulates_the_stream(scripted: Scripted) -> None:
    scripted.say(f"I look.\n{CALL}")
    with scripted.sdk.responses.stream(
        model="m", input="how is it?", tools=[WEATHER], extra_body=PLAIN
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == "I look."
    assert final.output[-1].type == "function_call"
    assert final.output[-1].arguments == '{"city":"Ulm"}'


def test_the_sdk_reads_a_whole_response(scripted: Scripted) -> None:
    scripted.say(f"I look.\n{CALL}")
    made = scripted.sdk.responses.create(
        model="m",
        input=[{"role": "user", "content": "how is it?"}],
        tools=[WEATHER],  # type: ignore[list-item]
        extra_body=PLAIN,
    )
    assert made.output_text == "I look."
    assert made.output[-1].type == "function_call"


@pytest.mark.parametrize("summary", [None, "auto", "detailed"])
def test_a_requested_summary_is_the_reasoning(scripted: Scripted, summary: str | None) -> None:
    scripted.say("I should greet.\n</think>\n\nHello.")
    found = told(scripted.http, {**ASK, **THINKING, "reasoning": {"summary": summary}})
    item = found.response["output"][0]
    text = item["content"][0]["text"]
    is_asked = summary in ("auto", "detailed")
    assert item["summary"] == ([{"type": "summary_text", "text": text}] if is_asked else [])
    deltas = [event["delta"] for event in found.of("reasoning_summary_text.delta")]
    assert "".join(deltas) == (text if is_asked else "")
    assert len(list(found.of("reasoning_summary_part.done"))) == is_asked
