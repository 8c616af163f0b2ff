"""Writes the arguments of tool calls as JSON while their text arrives."""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.core.conversation import ToolCall


class CallOpened(Struct, frozen=True):
    """Call whose name is certain; `id` is the model's own or ""."""

    name: str
    id: str


class CallArguments(Struct, frozen=True):
    """Piece of the JSON text of the arguments of the open call."""

    text: str


class CallEnded(Struct, frozen=True):
    """End of the open call; `arguments_json` sums up its pieces.

    The end of the answer cut the arguments of a call that `is_cut`.
    """

    call: ToolCall
    arguments_json: str
    is_cut: bool = False


CallEvent = CallOpened | CallArguments | CallEnded


class CallWriter:
    """Tells the calls of one section as events, each call in pieces."""

    def __init__(self, emit: Callable[[CallEvent], None]) -> None:
        self._emit = emit

    def write_whole(self, call: ToolCall) -> None:
        """Write a call of which nothing was written."""
        text = arguments_json(call.arguments)
        self._emit(CallOpened(call.name, call.id))
        self._emit(CallArguments(text))
        self._emit(CallEnded(call, text))


def arguments_json(arguments: Any) -> str:
    """Arguments as every dialect sends them."""
    return msgspec.json.encode(arguments).decode()
