"""Loosens odd schemas of tools, and keeps the grammar of the others."""

import logging
import threading
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from mlxstack.core.conversation import Tool
from mlxstack.core.errors import BadRequest
from mlxstack.features.formats.grammar.forced_tool_call import ForcedCalls, call_grammar
from mlxstack.text.grammar.enforceable import Enforceable, enforceable
from mlxstack.text.grammar.schema_grammar import ResponseConstraint
from mlxstack.text.schema_types import Schema

log = logging.getLogger("mlxstack.service")
MAX_KNOWN = 256
MAX_SETS = 16
MAX_PATHS = 20
"""Named parts of one tool; where there are more, the tool alone is named."""

Source = tuple[Tool, ...] | ResponseConstraint


class ToolLoosener:
    """Finds the enforceable part of each tool's schema once. Single owner."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Enforceable] = OrderedDict()

    def loosened(
        self, calls: ForcedCalls, problem: Callable[[str], str | None], is_over: Callable[[], bool]
    ) -> tuple[ForcedCalls, tuple[str, ...]]:
        """Calls with enforceable schemas, and the paths left out.

        `problem` is the reason why a grammar does not compile, and nothing is tried once the time
        `is_over`. Where all of them together are too large, the largest are left out whole.
        """
        parts = [self._part(tool, calls, problem, is_over) for tool in calls.tools]
        tools = [
            replace(tool, parameters=part.schema)
            for tool, part in zip(calls.tools, parts, strict=True)
        ]
        left_out: list[str] = []
        for tool, part in zip(tools, parts, strict=True):
            paths = [f"{tool.name}{lost.path}" for lost in part.left_out]
            left_out += paths if len(paths) <= MAX_PATHS else [tool.name]
        by_size = sorted(range(len(tools)), key=lambda index: _size(tools[index], calls))

        def with_smallest(n: int) -> ForcedCalls:
            """Calls with the schemas of the `n` smallest tools."""
            bare = set(by_size[n:])
            chosen = (
                replace(tool, parameters={}) if index in bare else tool
                for index, tool in enumerate(tools)
            )
            return replace(calls, tools=tuple(chosen))

        def is_too_large(n: int) -> bool:
            return _problem(with_smallest(n), problem) is not None

        n_kept = len(tools)
        if is_too_large(n_kept):
            n_kept = bisect_left(range(1, n_kept), x=True, key=is_too_large)
            left_out += [tools[index].name for index in sorted(by_size[n_kept:])]
        return with_smallest(n_kept), tuple(dict.fromkeys(left_out))

    def _part(
        self,
        tool: Tool,
        calls: ForcedCalls,
        problem: Callable[[str], str | None],
        is_over: Callable[[], bool],
    ) -> Enforceable:
        key = repr((tool.name, tool.parameters, calls.marks.forced))
        part = self._known.get(key)
        if part is None:
            alone = replace(calls, tools=(tool,), is_complete=False)
            part = enforceable(
                tool.parameters, lambda schema: _problem(_with(alone, schema), problem), is_over
            )
            # In another request there may be time to try more of it.
            if not is_over():
                self._known[key] = part
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return part


class LooseSchemas:
    """Paths of unenforced schema parts by their source. Thread-safe.

    Each source is told once in the log.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def add(self, source: Source, paths: tuple[str, ...]) -> None:
        """Remember the paths of a set of tools, or of a format."""
        key = repr(source)
        with self._lock:
            is_new = key not in self._known
            self._known[key] = paths
            if len(self._known) > MAX_SETS:
                self._known.popitem(last=False)
        if is_new and paths:
            log.warning(
                "answers and calls are not held to these parts of schemas, which have no grammar: "
                "%s", ", ".join(paths),
            )  # fmt: skip

    def of(self, source: Source) -> tuple[str, ...]:
        """Known paths of a set of tools, or of a format."""
        with self._lock:
            return self._known.get(repr(source), ())

    @property
    def paths(self) -> list[str]:
        """The paths of all recent sets."""
        with self._lock:
            return sorted({path for paths in self._known.values() for path in paths})


def anywhere(param: str, keywords: Iterable[str]) -> tuple[str, ...]:
    """Paths of keywords anywhere in the schemas of `param`."""
    return tuple(f"{param}/**/{keyword}" for keyword in sorted(keywords))


def not_objects(tools: Iterable[Tool]) -> tuple[str, ...]:
    """Paths of the types of parameters that are no object."""
    return tuple(f"{tool.name}/type" for tool in tools if not _is_object(tool.parameters))


def _problem(calls: ForcedCalls, problem: Callable[[str], str | None]) -> str | None:
    """Reason why calls have no grammar; "" where it was not tried."""
    try:
        return problem(call_grammar(calls).text)
    except BadRequest as error:
        return error.message


def _size(tool: Tool, calls: ForcedCalls) -> int:
    """Characters of the grammar of one tool."""
    try:
        return len(call_grammar(replace(calls, tools=(tool,), is_complete=False)).text)
    except BadRequest:
        return 0


def _is_object(parameters: Schema) -> bool:
    kind = parameters.get("type", "object")
    if isinstance(kind, list):
        return "object" in kind
    return bool(kind == "object")


def _with(calls: ForcedCalls, parameters: Schema) -> ForcedCalls:
    return replace(calls, tools=(replace(calls.tools[0], parameters=parameters),))
