"""The embedded model behind the doors: it calls a tool, and it remembers across a restore."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from mlxstack.core.preset import ModelSpec, Preset, SamplingSpec, ServerSpec, SlotSpec
from tests.api.running import Running, running
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

WEATHER: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    preset = Preset(
        model=ModelSpec(id="demo"),
        slots=SlotSpec(n_ctx=2048),
        sampling=SamplingSpec(temperature=0, thinking=False),
        server=ServerSpec(port=0),
    )
    with running(preset, tmp_path_factory.mktemp("home")) as found:
        yield found


def test_the_openai_client_runs_a_tool_loop(demo: Running) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="x", max_retries=0) as client:
        first = client.chat.completions.create(model="demo", messages=messages, tools=WEATHER)
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        messages.append(message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"})
        second = client.chat.completions.create(model="demo", messages=messages, tools=WEATHER)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.choices[0].message.content
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached >= first.usage.prompt_tokens, "the whole first prompt is reused"


def test_c3_c5_the_magic_word_survives_save_and_restore(demo: Running) -> None:
    with httpx.Client(base_url=demo.url, timeout=PATIENCE_S) as http:

        def say(messages: list[dict[str, str]], slot: int) -> dict[str, Any]:
            body = {"messages": messages, "id_slot": slot}
            return dict(http.post("/v1/chat/completions", json=body).raise_for_status().json())

        told = [{"role": "user", "content": "The magic word is tulip. Remember it."}]
        heard = say(told, 0)["choices"][0]["message"]
        saved = http.post("/slots/0?action=save", json={"filename": "agent.bin"}).json()
        for slot in range(3):
            http.post(f"/slots/{slot}?action=erase")
        say([{"role": "user", "content": "Something else."}], 0)
        restored = http.post("/slots/0?action=restore", json={"filename": "agent.bin"}).json()
        assert "error" not in restored, (saved, restored)
        asked = [*told, heard, {"role": "user", "content": "What is the magic word?"}]
        answer = say(asked, 0)
    assert restored["n_restored"] == saved["n_saved"]
    assert "tulip" in answer["choices"][0]["message"]["content"].lower()
    assert answer["timings"]["cache_n"] >= restored["n_restored"] - 4
