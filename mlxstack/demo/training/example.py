"""Messages of a conversation, and cases made of them."""

import random
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Draw:
    """Random source, and the side of the held-out split to draw from."""

    rng: random.Random
    held_out: bool = False


@dataclass(frozen=True)
class Case:
    """Dialogue that ends with the assistant message to learn or judge.

    `expect` is what the judge looks for: a word, a call, or nothing.
    """

    messages: list[Message]
    tools: list[Message] = field(default_factory=list)
    thinks: bool = False
    expect: str = ""


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str, thought: str) -> Message:
    return {"role": "assistant", "content": text, "thought": thought}


def calls(name: str, arguments: dict[str, Any], thought: str) -> Message:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], "thought": thought}
