"""Probe conversations rendered by a chat template."""

import json
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from mlxstack.features.formats.syntax import pieces
from mlxstack.text.rendering.asker import USER_TURN, TemplateAsker, Turn

NAMES = ("probe_alpha", "probe_beta")
KEYS = ("key_one", "key_two")
VALUES = ("value_one", "value_two")
IDS = ("callid001", "callid002")
CONTENT = "Content sentinel."
USER = USER_TURN
THOUGHT = "Thought sentinel."
TYPED: dict[str, Any] = {
    "integer": 73519, "number": 73.5, "boolean": True, "array": ["item_one"],
    "object": {"key_in": "value_in"}, "null": None,
}  # fmt: skip
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
_PROPERTIES = {
    key: {"type": "string", "description": key} for key in (*KEYS, *(f"key_{t}" for t in TYPED))
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A probe.",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": []},
        },
    }
    for name in NAMES
]
TWO = dict(zip(KEYS, VALUES, strict=True))


class TemplateProbes(TemplateAsker):
    """Renders probes; `arguments_as_text` if the template takes no objects.

    `no_content` is the content beside which the template writes calls: "" or None.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, TOOLS)
        self.arguments_as_text = False
        self.no_content: str | None = ""
        self.source = str(getattr(tokenizer, "chat_template", None) or "")
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.tokens = frozenset(token.content for token in added.values())
        eos = (added.get(token) for token in getattr(tokenizer, "eos_token_ids", ()))
        self.eos = tuple(token.content for token in eos if token is not None)

    def turn(self, content: Any = "", calls: Sequence[Turn] = (), **fields: Any) -> str | None:
        """Rendered assistant turn with its opening; None if refused."""
        turn = {"role": "assistant", "content": content, **fields}
        if calls:
            turn |= {"content": content or self.no_content, "tool_calls": list(calls)}
        whole = self.text([USER, turn], opens=False)
        if whole is None and calls:
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": "r", "name": NAMES[0]}
                for call in calls
            ]
            whole = self.text([USER, turn, *results], opens=False)
        if whole is None:
            return None
        return whole[self._start(whole) :]

    def _start(self, whole: str) -> int:
        """Start of the assistant turn, whatever a later turn changes."""
        start = common_start(self.bare, whole)
        said = whole.find(USER["content"]) + len(USER["content"])
        if start >= said or USER["content"] not in self.bare:
            return start
        return said + common_start(self.bare.partition(USER["content"])[2], whole[said:])

    def answer(self, turn: str) -> str:
        """An assistant turn without what the prompt opens it with."""
        opening = self.prompt[common_start(self.bare, self.prompt) :]
        return turn[opened_length(opening, turn) :]

    def calls(self, *arguments: dict[str, Any]) -> list[Turn]:
        """A call for each of some arguments."""
        return [self._call(at, values) for at, values in enumerate(arguments)]

    def _call(self, at: int, arguments: dict[str, Any]) -> Turn:
        values: Any = json.dumps(arguments) if self.arguments_as_text else arguments
        function = {"name": NAMES[at], "arguments": values}
        return {"id": IDS[at], "type": "function", "function": function}


def common_start(first: str, second: str) -> int:
    """Length of the common prefix of two texts, at mark boundaries."""
    n = shared_length(first, second)
    if n in (len(first), len(second)):
        return n
    at = max(second.rfind("<", 0, n), second.rfind("[", 0, n))
    is_inside = at >= 0 and not re.search(r"[>\]\s]", second[at:n])
    return at if is_inside else n


def opened_length(opening: str, turn: str) -> int:
    """Length of an opening, or of its end, that begins a turn."""
    if n := common_start(opening, turn):
        return n
    # The prompt may have said more before it opened the answer.
    ends = (opening[match.start() :] for match in re.finditer(r"[<\[]|(?<=\n)\S", opening))
    return next((len(end) for end in ends if turn.startswith(end)), 0)


def tokens(text: str) -> list[str]:
    """Marks, words and white space of a text."""
    parts: list[str] = []
    for part in re.findall(r"\s+|\S+", text):
        parts += [part] if part.isspace() else pieces(part)
    return parts


def shared_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Number of leading items that two sequences share."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def shared_start(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """The common beginning of two sequences of tokens."""
    return list(first[: shared_length(first, second)])


def shared_end(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """The common end of two sequences of tokens."""
    return shared_start(first[::-1], second[::-1])[::-1]
