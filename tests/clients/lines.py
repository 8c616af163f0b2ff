"""What the scripted model says to whom, and the tools it is offered."""

from typing import Any

from tests.clients.scripted import call

HELLO = "Hello! I am here."
SUNNY = "It is sunny in Paris."
FIXED = "def add(a, b):\n    return a + b\n"
SCRIPT = [
    {"when": "tool_response>.*21 degrees", "say": SUNNY, "think": "Now I know."},
    {"when": "fix add", "say": f"Done.\n\nsums.py\n```\n{FIXED}```\n"},
    {"when": "hello there", "say": HELLO, "think": "A greeting."},
    {"when": "weather in Paris", "say": call("get_weather", city="Paris"), "think": "I ask."},
    {"when": "both cities", "say": "\n".join(call("get_weather", city=c) for c in "AB")},
]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
FLAT: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": False}
CLAUDES: Any = {"name": "get_weather", "input_schema": PARAMETERS}
