"""Real clients over real sockets against a scripted model in the real engine."""

import json
import os
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.api.running import Running
from tests.cli.terminal import CLI
from tests.clients.agents import AIDER
from tests.clients.lines import CLAUDES, FIXED, FLAT, HELLO, SUNNY, TOOL
from tests.clients.stage import program, run

pytestmark = [pytest.mark.mlx, pytest.mark.net]


def test_b1_openai_chat_streams_and_tool_loop_reuse_the_whole_first_prompt(
    gpt: openai.OpenAI,
) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = gpt.chat.completions.create(model="local-model", messages=messages, tools=[TOOL])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"] == "I ask."
    assert message.tool_calls is not None
    (called,) = message.tool_calls
    assert called.type == "function"
    # Clients write the arguments again in their own way (C-4).
    arguments = json.dumps(json.loads(called.function.arguments), separators=(",", ":"))
    function = {"name": called.function.name, "arguments": arguments}
    back = {"id": called.id, "type": "function", "function": function}
    messages += [
        {"role": "assistant", "reasoning_content": "I ask.", "tool_calls": [back]},
        {"role": "tool", "tool_call_id": called.id, "content": "21 degrees"},
    ]
    stream = gpt.chat.completions.create(
        model="local-model", messages=messages, tools=[TOOL], stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == SUNNY
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert first.usage is not None
    n_cached = usage.prompt_tokens_details.cached_tokens or 0
    # All but the opened thought, which no template renders again.
    assert n_cached >= first.usage.prompt_tokens - 2


def test_o7_parallel_calls_come_whole_in_a_stream(gpt: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "for both cities"}]
    with gpt.chat.completions.stream(
        model="local-model", messages=messages, tools=[TOOL]
    ) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls or []
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["A", "B"]
    one_only = gpt.chat.completions.create(
        model="local-model", messages=messages, tools=[TOOL], parallel_tool_calls=False
    )
    assert len(one_only.choices[0].message.tool_calls or []) == 1


def test_r3_responses_loop(gpt: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    with gpt.responses.stream(model="local-model", input=asked, tools=[FLAT]) as stream:
        first = stream.get_final_response()
    (called,) = [item for item in first.output if item.type == "function_call"]
    asked += [item.model_dump(exclude_none=True) for item in first.output]
    asked.append(
        {"type": "function_call_output", "call_id": called.call_id, "output": "21 degrees"}
    )
    second = gpt.responses.create(model="local-model", input=asked, tools=[FLAT])
    assert second.output_text == SUNNY
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 2


@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
def test_a30_anthropic_stream_tool_loop_and_count_tokens(
    claude: anthropic.Anthropic, thinking: str
) -> None:
    more: dict[str, Any] = {"model": "local-model", "tools": [CLAUDES]}
    more["thinking"] = {"type": thinking, "budget_tokens": 1024}
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    n_counted = claude.messages.count_tokens(messages=messages, **more).input_tokens
    with claude.messages.stream(messages=messages, max_tokens=900, **more) as stream:
        first = stream.get_final_message()
    n_prompt = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
    assert n_counted == n_prompt
    called = first.content[-1]
    assert called.type == "tool_use"
    assert called.input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": called.id, "content": "21 degrees"}
    messages += [
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    second = claude.messages.create(messages=messages, max_tokens=900, **more)
    assert second.content[-1].type == "text"
    assert second.content[-1].text == SUNNY
    assert (second.usage.cache_read_input_tokens or 0) >= n_prompt - 2


@pytest.mark.client
def test_litellm_speaks_to_both_doors(stage: Running, tmp_path: Path) -> None:
    script = Path(__file__).with_name("ask_litellm.py")
    done = run(
        [str(program("python")), str(script), stage.url],
        tmp_path,
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )
    assert json.loads(done.splitlines()[-1]) == {
        "chat": HELLO,
        "stream": HELLO,
        "messages": HELLO,
        "call": "get_weather",
        "arguments": {"city": "Paris"},
        "reason": "tool_calls",
    }


@pytest.mark.client
def test_c10_aider_edits_a_file(stage: Running, tmp_path: Path) -> None:
    file = tmp_path / "sums.py"
    file.write_text("def add(a, b):\n    return a - b\n")
    # What a project of a user may hold.
    away = "http://127.0.0.1:9"
    (tmp_path / ".env").write_text(
        f"OPENAI_API_BASE={away}\nOPENAI_API_KEY=k\nAIDER_MODEL=gpt-4o\n"
    )
    (tmp_path / ".aider.conf.yml").write_text(f"model: gpt-4o\nopenai-api-base: {away}\n")
    run(
        [
            *CLI, "run", "aider", "--url", stage.url, "--",
            *AIDER, "please fix add", "sums.py",
        ],
        tmp_path,
        PATH=f"{program('aider').parent}{os.pathsep}{os.environ['PATH']}",
        MLX_STACK_HOME=str(tmp_path / "mlx-stack"),
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )  # fmt: skip
    assert file.read_text() == FIXED
