"""The embedded model behind this door: it calls a tool, hears the result, and answers."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from mlxstack.core.preset import ModelSpec, Preset, SamplingSpec, ServerSpec, SlotSpec
from tests.api.running import Running, running

pytestmark = [pytest.mark.mlx, pytest.mark.net]

WEATHER: list[Any] = [
    {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    }
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    preset = Preset(
        model=ModelSpec(id="demo"),
        slots=SlotSpec(n_ctx=2048),
        sampling=SamplingSpec(temperature=0),
        server=ServerSpec(port=0),
    )
    with running(preset, tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.mark.parametrize("thinking", ["disabled", "enabled"])
def test_b8_a_tool_loop(demo: Running, thinking: str) -> None:
    """Streamed first, whole then, as an agent falls back."""
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    more: dict[str, Any] = {"model": "demo", "max_tokens": 400, "tools": WEATHER}
    more["thinking"] = {"type": thinking, "budget_tokens": 1024}
    with anthropic.Anthropic(base_url=demo.url, api_key="x", max_retries=0) as claude:
        with claude.messages.stream(messages=messages, **more) as stream:
            first = stream.get_final_message()
        assert first.stop_reason == "tool_use"
        call = first.content[-1]
        assert call.type == "tool_use"
        assert call.input == {"city": "Paris"}
        messages.append({"role": "assistant", "content": first.to_dict()["content"]})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 21 degrees"}
        messages.append({"role": "user", "content": [result]})
        second = claude.messages.create(messages=messages, **more)
    assert second.stop_reason == "end_turn"
    assert second.content[-1].type == "text"
    assert second.content[-1].text
    assert (first.content[0].type == "thinking") is (thinking == "enabled")
    read = second.usage.cache_read_input_tokens
    n_first = first.usage
    assert read is not None
    n_tail = 2 if thinking == "enabled" else 0
    whole = n_first.input_tokens + (n_first.cache_read_input_tokens or 0)
    assert read >= whole - n_tail, "the whole first prompt is reused, but for its open thought"


def test_c5_the_own_answer_comes_back_and_costs_nothing(demo: Running) -> None:
    more: dict[str, Any] = {"model": "demo", "max_tokens": 99, "thinking": {"type": "disabled"}}
    messages: list[Any] = [{"role": "user", "content": "The magic word is tulip. Remember it."}]
    with anthropic.Anthropic(base_url=demo.url, api_key="x", max_retries=0) as claude:
        first = claude.messages.create(messages=messages, **more)
        messages.append({"role": "assistant", "content": first.to_dict()["content"]})
        messages.append({"role": "user", "content": "What is the magic word?"})
        second = claude.messages.create(messages=messages, **more)
    assert second.content[0].type == "text"
    assert "tulip" in second.content[0].text.lower()
    read = second.usage.cache_read_input_tokens
    assert read is not None
    n_before = first.usage.input_tokens + first.usage.output_tokens
    assert read >= n_before - 2, "prompt and answer are reused"


def test_a23u_a_call_that_the_limit_cuts_is_dropped(demo: Running) -> None:
    with anthropic.Anthropic(base_url=demo.url, api_key="x", max_retries=0) as claude:
        answer = claude.messages.create(
            model="demo",
            max_tokens=6,
            tools=WEATHER,
            thinking={"type": "disabled"},
            messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        )
    assert answer.stop_reason == "max_tokens"
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": ""}]
