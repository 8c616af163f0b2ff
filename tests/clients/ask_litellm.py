"""Run inside litellm's own environment: chat, stream and a tool call; prints what came as JSON."""

import json
import sys

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def main(url: str) -> None:
    def ask(model: str, text: str, **more: object) -> object:
        base = f"{url}/v1" if model.startswith("openai/") else url
        messages = [{"role": "user", "content": text}]
        return litellm.completion(
            model=model, messages=messages, api_base=base, api_key="any", max_tokens=400, **more
        )

    openai = "openai/local-model"
    claude = "anthropic/local-model"
    stream = ask(openai, "hello there", stream=True)
    called = ask(openai, "the weather in Paris?", tools=[TOOL]).choices[0]
    answers = {
        "chat": ask(openai, "hello there").choices[0].message.content,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
        "messages": ask(claude, "hello there").choices[0].message.content,
        "call": called.message.tool_calls[0].function.name,
        "arguments": json.loads(called.message.tool_calls[0].function.arguments),
        "reason": called.finish_reason,
    }
    sys.stdout.write(json.dumps(answers))


main(sys.argv[1])
