"""Renderings of short conversations, by which a chat template is known."""

import json
from collections.abc import Sequence
from typing import Any

from mlxstack.text.rendering.renderers import render_chat

Turn = dict[str, Any]
USER_TURN: Turn = {"role": "user", "content": "User sentinel."}
VARIABLES = {"enable_thinking": True, "thinking": True}
REFUSALS = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, SyntaxError,
    TypeError, ValueError,
)  # fmt: skip
"""What templates in Jinja and functions of mlx-lm raise for what they do not take."""


class TemplateAsker:
    """Renders conversations as a template takes them, each once. Single owner."""

    def __init__(self, tokenizer: Any, tools: list[dict[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._variables: dict[str, Any] = VARIABLES
        self._tools: list[dict[str, Any]] | None = tools
        self._has_parts = False
        self._renderings: dict[str, str | None] = {}
        if self.text([USER_TURN]) is None:
            self._variables = {}
        if self.text([USER_TURN]) is None:
            self._tools = None
        if not self._shows_user():
            self._has_parts = True
            self._has_parts = self._shows_user()
        self.bare = self.text([USER_TURN], opens=False) or ""
        """A user turn, and nothing to open an answer."""
        self.prompt = self.text([USER_TURN]) or self.bare

    def text(self, turns: Sequence[Turn], *, opens: bool = True) -> str | None:
        """The rendering of turns; None if the template refuses them."""
        if self._has_parts:
            turns = [_in_parts(turn) for turn in turns]
        key = json.dumps([list(turns), opens, self._variables, self._tools is None])
        if key not in self._renderings:
            self._renderings[key] = self._render(turns, opens=opens)
        return self._renderings[key]

    def _render(self, turns: Sequence[Turn], *, opens: bool) -> str | None:
        try:
            return render_chat(
                self._tokenizer,
                list(turns),
                tools=self._tools,
                add_generation_prompt=opens,
                **self._variables,
            )
        except REFUSALS:
            return None

    def _shows_user(self) -> bool:
        return USER_TURN["content"] in (self.text([USER_TURN]) or "")


def _in_parts(turn: Turn) -> Turn:
    """A turn whose content is a list of parts."""
    content = turn.get("content")
    if not isinstance(content, str):
        return turn
    return {**turn, "content": [{"type": "text", "text": content}] if content else []}
