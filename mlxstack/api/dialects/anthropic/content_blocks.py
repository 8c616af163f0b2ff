"""Content blocks as clients send them: known kinds typed, others reduced to their text."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct, field

from mlxstack.api.dialects.anthropic.request_schema import Content
from mlxstack.core.errors import BadRequest, Unsupported

FAULT = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)


class TextInput(Struct, tag="text"):
    """Words."""

    text: str


class ImageInput(Struct, tag="image"):
    """A picture, which a text model cannot see."""


class DocumentInput(Struct, tag="document"):
    """A file; its text can be read when the source carries it."""

    source: dict[str, Any] = field(default_factory=dict)
    title: str | None = None
    context: str | None = None


class SearchResult(Struct, tag="search_result"):
    """A passage that the client found."""

    content: list[dict[str, Any]] = field(default_factory=list)
    title: str | None = None
    source: str | None = None


class ThinkingInput(Struct, tag="thinking"):
    """What the assistant thought; its signature is not looked at."""

    thinking: str = ""


class ToolUse(Struct, tag="tool_use"):
    """A call that the assistant made."""

    id: str
    name: str
    input: Any = None


class ToolResult(Struct, tag="tool_result"):
    """What came of a call."""

    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = None


class ToolReference(Struct, tag="tool_reference"):
    """A tool that a search among deferred ones has found."""

    tool_name: str


class ToolAddition(Struct, tag="tool_addition"):
    """A tool that joins from here on, by name or by definition."""

    tool: dict[str, Any]


class ToolRemoval(Struct, tag="tool_removal"):
    """A tool that is gone from here on."""

    tool: dict[str, Any]


Block = (
    TextInput
    | ImageInput
    | DocumentInput
    | SearchResult
    | ThinkingInput
    | ToolUse
    | ToolResult
    | ToolReference
    | ToolAddition
    | ToolRemoval
)
KINDS = frozenset(str(kind.__struct_config__.tag) for kind in Block.__args__)


def read(content: Content | None, at: str) -> tuple[Block, ...]:
    """The blocks of a `content` field at the path `at`, in their places; a string is one text.

    Kinds that are not known become their text, empty if they have none (X-6). Raises
    BadRequest with the path of a field that has the wrong type.
    """
    if isinstance(content, str):
        return (TextInput(content),) if content else ()
    return tuple(_read(content or [], at))


def words(block: Block) -> str:
    """What a model can read of a block; "" for calls, results and thoughts."""
    match block:
        case TextInput():
            return block.text
        case ImageInput():
            return "[image omitted]"
        case DocumentInput():
            return _document(block)
        case SearchResult():
            return "\n".join([*_lines(block.title, block.source), *_texts(block.content)])
    return ""


def require_readable(block: Block) -> None:
    """Raises Unsupported for a picture, or for a document without text."""
    kind = block.__struct_config__.tag
    if isinstance(block, ImageInput) or (
        isinstance(block, DocumentInput) and _inside(block) is None
    ):
        raise Unsupported(f"{kind} input is not supported by this model; send text")


def _read(content: list[dict[str, Any]], at: str) -> Iterator[Block]:
    for i, raw in enumerate(content):
        kind = raw.get("type")
        if not isinstance(kind, str):
            path = f"{at}[{i}].type"
            raise BadRequest(f"{path}: Field required", path)
        yield _typed(raw, f"{at}[{i}]") if kind in KINDS else TextInput(_text(raw))


def _typed(raw: dict[str, Any], at: str) -> Block:
    try:
        block: Block = msgspec.convert(raw, Block)
    except msgspec.ValidationError as error:
        fault = FAULT.fullmatch(str(error))
        assert fault is not None
        path = at + (fault["path"] or "")
        raise BadRequest(f"{path}: {fault['what']}", path) from None
    return block


def _document(document: DocumentInput) -> str:
    inside = _inside(document)
    if inside is None:
        return "[document omitted]"
    return "\n".join(_lines(document.title, document.context, inside))


def _inside(document: DocumentInput) -> str | None:
    """The text of a document, None if its source carries none."""
    source = document.source
    match source.get("type"), source.get("data"), source.get("content"):
        case "text", str(data), _:
            return data
        case "content", _, str(content):
            return content
        case "content", _, list(content):
            return "\n".join(_texts(content))
    return None


def _texts(parts: list[Any]) -> list[str]:
    return [text for part in parts if isinstance(part, dict) and (text := _text(part))]


def _text(raw: dict[str, Any]) -> str:
    found = raw.get("text", raw.get("content"))
    return found if isinstance(found, str) else ""


def _lines(*lines: str | None) -> list[str]:
    return [line for line in lines if line]
