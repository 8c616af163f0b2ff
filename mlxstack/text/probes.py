"""Probes of a chat template: small conversations that show its limits."""

import json
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from mlxstack.core.conversation import Tool
from mlxstack.text.template_adaptation import TemplateCapabilities

Turn = dict[str, Any]
USER: Turn = {"role": "user", "content": "first"}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"key": {"type": "string", "description": "The key."}},
    "required": ["key"],
}
# Defaults of the keys that a template may read without a check.
SCHEMA_DEFAULTS: dict[str, Any] = {"type": "object", "properties": {}, "required": []}
PROPERTY_DEFAULTS: dict[str, Any] = {"description": ""}


class Accepts(Protocol):
    """The rendered text of turns and tools; None if the template refuses them."""

    def __call__(self, *turns: Turn, tools: tuple[Tool, ...] = ()) -> str | None: ...


def find_traits(accepts: Accepts) -> TemplateCapabilities:
    """The traits of the template behind `accepts`, `needs_tool_list` left out."""
    answer = _said("assistant", "answer")
    objects = _called(_call("call00001", {"key": "value"}))
    strings = _called(_call("call00001", "broken {"))
    has_objects = accepts(USER, objects, _result("call00001")) is not None
    called = objects if has_objects else strings
    long = _called({**called["tool_calls"][0], "id": "call_00000001"})
    system, late = _said("system", "rules"), _said("system", "later")
    with_system = accepts(system, USER)
    second = _said("user", "second")
    with_late = accepts(system, USER, late, second), accepts(system, USER, answer, late, second)
    has_tools = accepts(USER, called, _result("call00001")) is not None
    with_both = {**called, "content": "text", "reasoning_content": "thought"}
    return TemplateCapabilities(
        has_system=with_system is not None and "rules" in with_system,
        has_late_system=all(
            text is not None and _in_order(text, "first", "later", "second") for text in with_late
        ),
        needs_alternation=accepts(USER, second, answer) is None,
        takes_user_after_tool=not has_tools
        or accepts(USER, called, _result("call00001"), USER) is not None,
        takes_objects=not has_tools or has_objects,
        takes_strings=accepts(USER, strings, _result("call00001")) is not None,
        needs_short_ids=has_tools and accepts(USER, long, _result("call_00000001")) is None,
        takes_text_and_thought=not has_tools
        or accepts(USER, with_both, _result("call00001")) is not None,
        takes_parallel_calls=not has_tools or _takes_parallel_calls(accepts, has_objects),
        takes_orphan_results=not has_tools or _takes_orphan_results(accepts),
        schema_keys=_needed(accepts, SCHEMA_DEFAULTS, _parameters_without),
        property_keys=_needed(accepts, PROPERTY_DEFAULTS, _property_without),
    )


def completed(parameters: dict[str, Any], capabilities: TemplateCapabilities) -> dict[str, Any]:
    """The parameters of a tool with the keys that the template reads without a check."""
    whole = _with_defaults(parameters, capabilities.schema_keys, SCHEMA_DEFAULTS)
    found = whole.get("properties")
    if not capabilities.property_keys or not isinstance(found, dict):
        return whole
    properties = {
        key: _with_defaults(one, capabilities.property_keys, PROPERTY_DEFAULTS)
        if isinstance(one, dict)
        else one
        for key, one in found.items()
    }
    return {**whole, "properties": properties}


def _with_defaults(
    schema: dict[str, Any], keys: Iterable[str], defaults: dict[str, Any]
) -> dict[str, Any]:
    missing = {key: defaults[key] for key in sorted(keys) if schema.get(key) is None}
    return {**schema, **missing} if missing else schema


def _takes_parallel_calls(accepts: Accepts, has_objects: bool) -> bool:
    """Whether the second of two calls is rendered, as far as separate turns would render it."""
    values: list[Any] = [{"key": "value-one"}, {"key": "value-two"}]
    one, two = (
        _call(f"call0000{at}", value if has_objects else json.dumps(value))
        for at, value in enumerate(values, 1)
    )
    results = _result("call00001"), _result("call00002")
    together = accepts(USER, _called(one, two), *results)
    if together is not None and "value-two" in together:
        return True
    apart = accepts(USER, _called(one), results[0], _called(two), results[1])
    return apart is None or "value-two" not in apart


def _takes_orphan_results(accepts: Accepts) -> bool:
    """Whether the result of a call that is not there is rendered."""
    text = accepts(USER, {**_result("call00001"), "content": "orphan-result"})
    return text is not None and "orphan-result" in text


def _needed(
    accepts: Accepts,
    defaults: dict[str, Any],
    without: Callable[[str], dict[str, Any]],
) -> frozenset[str]:
    """The keys without which a tool is refused, if a whole one is not."""

    def is_accepted(parameters: dict[str, Any]) -> bool:
        return accepts(USER, tools=(Tool("act", "Acts.", parameters),)) is not None

    if not is_accepted(PARAMETERS):
        return frozenset()
    return frozenset(key for key in defaults if not is_accepted(without(key)))


def _parameters_without(key: str) -> dict[str, Any]:
    # Without `properties` nothing can be required.
    whole = {**PARAMETERS, "required": []} if key == "properties" else PARAMETERS
    return {name: value for name, value in whole.items() if name != key}


def _property_without(key: str) -> dict[str, Any]:
    whole = PARAMETERS["properties"]["key"]
    bare = {name: value for name, value in whole.items() if name != key}
    return {**PARAMETERS, "properties": {"key": bare}}


def _said(role: str, text: str) -> Turn:
    return {"role": role, "content": text}


def _result(call_id: str) -> Turn:
    return {"role": "tool", "content": "result", "tool_call_id": call_id, "name": "act"}


def _call(call_id: str, arguments: dict[str, Any] | str) -> dict[str, Any]:
    function = {"name": "act", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _called(*calls: dict[str, Any]) -> Turn:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def _in_order(text: str, *words: str) -> bool:
    places = [text.find(word) for word in words]
    return -1 not in places and places == sorted(places)
