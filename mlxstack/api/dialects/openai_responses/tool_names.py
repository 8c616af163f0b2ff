"""The tools of a request: as the prompt names them, and as the client does."""

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.api.dialects.openai_responses.request_schema import Item, ResponsesToolParam
from mlxstack.core.conversation import Tool
from mlxstack.core.errors import BadRequest

# The one argument of a custom tool, which in truth takes free text.
INPUT = "input"


class ToolKind(StrEnum):
    """How a call of a tool is answered."""

    FUNCTION = "function"
    CUSTOM = "custom"


class ClientTool(Struct, frozen=True):
    """A tool as the client knows it."""

    name: str
    kind: ToolKind = ToolKind.FUNCTION
    namespace: str | None = None


class ToolNames(Struct, frozen=True):
    """`tools` for the prompt, where namespaces are flat; `offers` by the names in the prompt."""

    tools: tuple[Tool, ...] = ()
    offers: dict[str, ClientTool] = {}

    def offer(self, called: str) -> ClientTool:
        """What the client calls the tool that the model has called.

        Models that saw a namespace elsewhere may write it in front of the name.
        """
        found = self.offers.get(called)
        if found is not None:
            return found
        for offer in self.offers.values():
            if called in (f"{offer.namespace}.{offer.name}", f"{offer.namespace}__{offer.name}"):
                return offer
        return ClientTool(called)

    def spoken(self, name: str, namespace: str | None) -> str:
        """The name in the prompt of a tool that the client names so."""
        for spoken, offer in self.offers.items():
            if (offer.name, offer.namespace) == (name, namespace):
                return spoken
        return name


def toolbox(sent: list[Item] | None) -> ToolNames:
    """Functions, custom tools and those of namespaces; what a vendor would run is left out.

    A name that is taken gets its namespace in front. Raises BadRequest.
    """
    tools: list[Tool] = []
    offers: dict[str, ClientTool] = {}
    for offer, spec in _offered(sent or [], "tools", None):
        name = offer.name
        if name in offers and offer.namespace:
            name = f"{offer.namespace}__{offer.name}"
        if name not in offers:
            offers[name] = offer
            tools.append(_tool(name, offer.kind, spec))
    return ToolNames(tuple(tools), offers)


def _offered(
    sent: list[Any], at: str, namespace: str | None
) -> Iterator[tuple[ClientTool, ResponsesToolParam]]:
    for i, raw in enumerate(sent):
        spec = _spec(raw, f"{at}[{i}]")
        match spec.type:
            case "function" | "custom" if spec.name:
                yield ClientTool(spec.name, ToolKind(spec.type), namespace), spec
            case "function" | "custom" | "namespace" if not spec.name:
                raise BadRequest(f"{at}[{i}].name: Field required", f"{at}[{i}].name")
            case "namespace":
                yield from _offered(spec.tools or [], f"{at}[{i}].tools", spec.name)


def _spec(raw: Any, at: str) -> ResponsesToolParam:
    try:
        return msgspec.convert(raw, ResponsesToolParam)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{at}: {error}", at) from None


def _tool(name: str, kind: ToolKind, spec: ResponsesToolParam) -> Tool:
    if kind is ToolKind.CUSTOM:
        return Tool(name, _free_form(spec), _FREE_TEXT)
    parameters = spec.parameters if isinstance(spec.parameters, dict) else {}
    return Tool(name, spec.description or "", parameters)


_FREE_TEXT: dict[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The whole input, as plain text"}},
    "required": [INPUT],
}


def _free_form(spec: ResponsesToolParam) -> str:
    """The description, with the grammar that the input must follow."""
    form = spec.format or {}
    lines = [spec.description or ""]
    if definition := form.get("definition"):
        lines.append(f"The input follows this {form.get('syntax', '')} grammar:\n{definition}")
    return "\n\n".join(line for line in lines if line)
