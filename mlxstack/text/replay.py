"""Remembers how the model wrote its tool calls, so that a replayed one tokenises as it was sampled.

Clients send the arguments of a call back as JSON of their own making, and templates print them
in a third way; every difference would cost the rest of the cached conversation (C-4).
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mlxstack.core.conversation import Tool, ToolCall
from mlxstack.text.calls import parse_calls, tool_shapes
from mlxstack.text.guard import unmarked


class Replay:
    """The texts of the last calls, by id, at most `max_chars` in all. Callable by any thread."""

    def __init__(self, tokenizer: Any, max_chars: int = 4_000_000) -> None:
        self._parser = tokenizer.tool_parser
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        self._blocks = (
            re.compile(rf"(?<={re.escape(start)}).*?(?={re.escape(end)})", re.DOTALL)
            if start and end
            else None
        )
        self._max = max_chars
        self._n_chars = 0
        self._lock = threading.Lock()
        self._texts: OrderedDict[str, str] = OrderedDict()

    def remember(self, call_id: str, raw: str) -> None:
        """`raw` is the sampled text between the marks of exactly this call."""
        if self._blocks is None or not raw:
            return
        with self._lock:
            self._n_chars += len(raw) - len(self._texts.pop(call_id, ""))
            self._texts[call_id] = raw
            while self._n_chars > self._max:
                self._n_chars -= len(self._texts.popitem(last=False)[1])

    def restore(
        self,
        marked: str,
        calls: Sequence[ToolCall],
        tools: Iterable[Tool],
        guard: Callable[[str], str],
    ) -> str:
        """The rendered text, with calls that mean what was sampled written as they were sampled.

        A call that the client changed, or a block that is none of these calls, stays as it is.
        """
        raws = self._known(calls)
        if self._blocks is None or not raws:
            return marked
        shapes = tool_shapes(tools)
        waiting = list(calls)

        def written(block: re.Match[str]) -> str:
            meant = parse_calls(self._parser, unmarked(block[0]), shapes)
            if len(meant) != 1 or not waiting or not _is_same(meant[0], waiting[0]):
                return block[0]
            raw = raws.get(waiting.pop(0).id)
            is_true = raw is not None and parse_calls(self._parser, raw, shapes) == meant
            return guard(raw) if raw is not None and is_true else block[0]

        return self._blocks.sub(written, marked)

    def _known(self, calls: Iterable[ToolCall]) -> dict[str, str]:
        with self._lock:
            return {call.id: self._texts[call.id] for call in calls if call.id in self._texts}


def _is_same(meant: ToolCall, call: ToolCall) -> bool:
    return (meant.name, meant.arguments) == (call.name, call.arguments)
