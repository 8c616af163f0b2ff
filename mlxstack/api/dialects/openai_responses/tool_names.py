"""Tools of a Responses body, with their names."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from msgspec import Struct, structs

from mlxstack.api import request_fields
from mlxstack.api.custom_tools import custom_tool
from mlxstack.api.dialects.openai_responses.request_schema import (
    InputItem,
    Item,
    ResponsesBody,
    ResponsesToolParam,
    flat_tool,
    items_of,
)
from mlxstack.api.tool_choice import chosen_tool, require_offered
from mlxstack.core.conversation import Tool
from mlxstack.core.errors import BadRequest

ADDED = "additional_tools"
FOUND = "tool_search_output"
"""Items that hold tools."""


class ToolKind(StrEnum):
    """Kind of a tool call in the output."""

    FUNCTION = "function"
    CUSTOM = "custom"
    SEARCH = "tool_search"


class ClientTool(Struct, frozen=True):
    """Tool by its name in the client."""

    name: str
    kind: ToolKind = ToolKind.FUNCTION
    namespace: str | None = None


class ToolNames(Struct, frozen=True):
    """Tools by name: flat in the prompt, with namespaces in the client.

    `tools` are those of the prompt, `offers` the client's by their names in the prompt.
    """

    tools: tuple[Tool, ...] = ()
    offers: dict[str, ClientTool] = {}

    @property
    def custom_names(self) -> frozenset[str]:
        """Names in the prompt of the custom tools."""
        return frozenset(filter(self.is_custom, self.offers))

    def is_custom(self, name: str) -> bool:
        """Whether the tool of a name in the prompt takes text."""
        return name in self.offers and self.offers[name].kind is ToolKind.CUSTOM

    def offer(self, called: str) -> ClientTool:
        """Client's tool for a name that the model has called.

        Models that saw a namespace elsewhere may write it in front of the name.
        """
        if called in self.offers:
            return self.offers[called]
        for offer in self.offers.values():
            if called in (f"{offer.namespace}.{offer.name}", f"{offer.namespace}__{offer.name}"):
                return offer
        return ClientTool(called)

    def spoken(self, name: str, namespace: str | None) -> str:
        """Name in the prompt of a tool of the client."""
        for tool_name, offer in self.offers.items():
            if (offer.name, offer.namespace) == (name, namespace):
                return tool_name
        return name


def toolbox(body: ResponsesBody) -> ToolNames:
    """Functions, custom and namespaced tools, without those of vendors.

    Items add tools too: Codex sends all of them so, and those that its search found, which stay out
    of the head of the prompt. A name that is taken gets its namespace in front. Raises BadRequest.
    """
    tools: list[Tool] = []
    offers: dict[str, ClientTool] = {}
    for raw_tools, path, is_found in _tool_lists(body):
        for offer, spec in _offered(raw_tools, path, None):
            name = offer.name
            if name in offers and offer.namespace:
                name = f"{offer.namespace}__{offer.name}"
            if name not in offers:
                offers[name] = offer
                tools.append(_tool(name, offer.kind, spec, is_found))
    require_offered([str(tool.get("type")) for tool in body.tools or ()], len(tools))
    return ToolNames(tuple(tools), offers)


def omitted_tools(body: ResponsesBody) -> tuple[str, ...]:
    """Types of the tools that are not offered to the model."""
    return tuple(str(tool.get("type")) for tool in body.tools or () if not _is_offered(tool))


def _is_offered(tool: Item) -> bool:
    return next(_offered([tool], "tools", None), None) is not None


def _tool_lists(body: ResponsesBody) -> Iterator[tuple[list[Any], str, bool]]:
    """Lists of tools with their paths, and whether a search found them."""
    yield body.tools or [], "tools", False
    for i, item in enumerate(items_of(body)):
        if item.get("type") in (ADDED, FOUND):
            item_fields = request_fields.converted(item, InputItem, f"input[{i}]")
            yield item_fields.tools or [], f"input[{i}].tools", item["type"] == FOUND


def _offered(
    raw_tools: list[Any], path: str, namespace: str | None
) -> Iterator[tuple[ClientTool, ResponsesToolParam]]:
    for i, raw in enumerate(raw_tools):
        spec = flat_tool(request_fields.converted(raw, ResponsesToolParam, f"{path}[{i}]"))
        match spec.type or ToolKind.FUNCTION:
            case "custom" if spec.name and spec.input_schema is not None:
                # A function of Anthropic's API.
                yield ClientTool(spec.name, ToolKind.FUNCTION, namespace), spec
            case "function" | "custom" as kind if spec.name:
                yield ClientTool(spec.name, ToolKind(kind), namespace), spec
            case ToolKind.SEARCH as kind if spec.execution == "client":
                yield ClientTool(kind, ToolKind.SEARCH), spec
            case "function" | "custom" | "namespace" if not spec.name:
                raise BadRequest(f"{path}[{i}].name: Field required", f"{path}[{i}].name")
            case "namespace":
                yield from _offered(spec.tools or [], f"{path}[{i}].tools", spec.name)


def _tool(name: str, kind: ToolKind, spec: ResponsesToolParam, is_found: bool) -> Tool:
    if kind is ToolKind.CUSTOM:
        return custom_tool(name, spec.description, spec.format, is_found)
    parameters = spec.parameters if isinstance(spec.parameters, dict) else None
    schema = request_fields.schema_of(structs.replace(spec, parameters=parameters))
    return Tool(name, spec.description or "", schema, is_found)


def forced_tool(box: ToolNames, choice: Any) -> str | None:
    """Name in the prompt of the tool that must be called."""
    name = chosen_tool(choice)
    if isinstance(choice, dict) and name:
        return box.spoken(name, choice.get("namespace"))
    return None
