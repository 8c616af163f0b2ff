"""Converts a body of the Messages API to a conversation."""

import json
from collections.abc import Iterable, Iterator
from itertools import groupby, takewhile
from typing import Any, cast

from msgspec import structs, to_builtins

from mlxstack.api import request_fields
from mlxstack.api.dialects.anthropic.request_schema import (
    KINDS,
    Block,
    Content,
    DocumentInput,
    ImageInput,
    MessageParam,
    MessagesBody,
    SearchResult,
    ServerToolResult,
    TextInput,
    ThinkingInput,
    ToolAddition,
    ToolChoice,
    ToolParam,
    ToolReference,
    ToolRemoval,
    ToolResult,
    ToolUse,
)
from mlxstack.api.dialects.anthropic.typed_tools import (
    client_tool,
    is_server_tool,
    require_runnable,
)
from mlxstack.api.dialects.openai_chat.messages import result_content, with_marks
from mlxstack.api.request_fields import read_known
from mlxstack.api.response_format import format_constraint, format_instruction
from mlxstack.core.conversation import Conversation, Message, Role, Tool, ToolCall
from mlxstack.core.errors import BadRequest, NoThreads
from mlxstack.service.parts.generation_options import ToolChoiceMode
from mlxstack.text.grammar.schema_grammar import ResponseConstraint
from mlxstack.text.images.reader import TEXT_ONLY, ImageReader
from mlxstack.text.normalize_messages import (
    Definitions,
    drop_billing,
    error_text,
    parse_arguments,
    removal_note,
    result_text,
    user_message,
)
from mlxstack.text.template.adaptation import TURN_JOINT, reminder

CLAUDE_CODE = ("claude-cli", "claude-code")
"""Claude Code in the User-Agent."""
ROLES = ("user", "assistant", "system")
SHOWN = (TextInput, ImageInput, DocumentInput, SearchResult)
PLACES: dict[str, tuple[type[Block], ...]] = {
    "user": (*SHOWN, ToolResult, ServerToolResult),
    "assistant": (*SHOWN, ThinkingInput, ToolUse, ServerToolResult),
    "system": (*SHOWN, ToolAddition, ToolRemoval),
}
"""Blocks that messages of a role may have."""
SEALED = "redacted_thinking"
"""Reasoning that only Anthropic's servers can read."""
THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}

# Templates know the three levels of GPT-OSS; Anthropic's higher ones are their highest.
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


def conversation(
    body: MessagesBody, images: ImageReader = TEXT_ONLY, *, client: str = ""
) -> Conversation:
    """Conversation of a body. Raises BadRequest with the path of the field.

    A last message of the assistant is continued, unless it has no text. `client` is the product
    in the User-Agent.
    """
    if not body.messages:
        raise BadRequest("messages: at least one message is needed", "messages")
    request_fields.bound(len(body.messages), request_fields.MAX_MESSAGES, "messages", "messages")
    n_blocks = request_fields.n_parts(turn.content for turn in body.messages)
    request_fields.bound(n_blocks, request_fields.MAX_PARTS, "messages", "content blocks")
    request_fields.bound(len(body.tools or ()), request_fields.MAX_TOOLS, "tools", "tools")
    if body.thread is not None:
        raise NoThreads
    reason = ": no conversations are summed up here; send all messages"
    request_fields.refuse(body, ("compaction",), reason)
    if body.server_names and all(map(is_server_tool, body.tools or ())):
        raise BadRequest(
            f"mcp_servers[0]: {body.server_names[0]} is an MCP server, whose tools would run on "
            "Anthropic's servers and not here; let the client connect to it, and send its tools in "
            "tools",
            "mcp_servers[0]",
        )
    require_runnable(body.tools or (), body.tool_choice)
    declared = declared_tools(body)
    definitions = Definitions(declared)
    sent = _messages(body.messages, definitions, images)
    if client in CLAUDE_CODE:
        sent = _with_first_reminders(sent)
    messages = [*_system(body.system), *sent]
    if messages and _is_empty_answer(messages[-1]):
        messages.pop()
    messages = messages or [Message(Role.USER)]
    last = messages[-1]
    is_open = last.role is Role.ASSISTANT
    position = len(messages) - is_open
    return Conversation(
        messages=(
            *messages[:position],
            *format_instruction(response_format(body)),
            *messages[position:],
        ),
        tools=declared,
        thinking=THINKING.get(body.thinking.type) if body.thinking else None,
        template=_template(body),
        add_generation_prompt=not is_open,
        continue_final=is_open and not last.tool_calls,
    )


def require_answerable(parsed: Conversation) -> None:
    """Raise BadRequest when the last message calls a tool without its result."""
    if parsed.messages[-1].tool_calls:
        raise BadRequest(
            "messages: the last message calls a tool; a user message with its tool_result "
            "has to follow",
            "messages",
        )


def _is_empty_answer(message: Message) -> bool:
    return message.role is Role.ASSISTANT and not (message.text or message.tool_calls)


def _system(content: Content | None) -> tuple[Message, ...]:
    """System prompt: blocks joined, without billing headers."""
    blocks = read(content, "system")
    _require_place(blocks, "system", "system")
    text = "".join(drop_billing(block_text(block)) for block in blocks)
    return (Message(Role.SYSTEM, text),) if text else ()


def _messages(
    turns: list[MessageParam], definitions: Definitions, images: ImageReader
) -> list[Message]:
    newest = max((i for i, turn in enumerate(turns) if _is_asked(turn)), default=-1)
    answered = max((i for i, turn in enumerate(turns) if turn.role == "assistant"), default=-1)
    messages: list[Message] = []
    for i, turn in enumerate(turns):
        path = f"messages[{i}]"
        is_new = i == newest > answered
        seen = TEXT_ONLY
        if turn.role == "user":
            seen = images
        content, found_images = with_marks(turn.content, f"{path}.content", seen, is_new=is_new)
        blocks = read(content, f"{path}.content")
        _require_place(blocks, turn.role, f"{path}.content")
        match turn.role:
            case "user":
                if is_new:
                    _require_readable(blocks, f"{path}.content")
                user_messages = _user(blocks, definitions, f"{path}.content", images)
                messages += [
                    *user_messages[:-1],
                    structs.replace(
                        user_messages[-1], images=found_images or user_messages[-1].images
                    ),
                ]
            case "assistant":
                messages += _assistant(blocks) or (Message(Role.ASSISTANT),)
            case "system":
                messages += _late_system(blocks, definitions)
            case role:
                raise BadRequest(
                    f"{path}.role is {role!r}; known are {', '.join(ROLES)}", f"{path}.role"
                )
    return messages


def _is_asked(message: MessageParam) -> bool:
    """Whether a user sent the message, and not a tool.

    Documents and images beside the result of a tool become notes, since they are no choice of a
    user who could send something else.
    """
    if message.role != "user":
        return False
    if not isinstance(message.content, list):
        return True
    return all(
        isinstance(part, str) or part.get("type") != "tool_result" for part in message.content
    )


def _user(
    blocks: tuple[Block, ...], definitions: Definitions, path: str, images: ImageReader
) -> tuple[Message, ...]:
    """Messages of a user turn, tool results first, even if empty."""
    results = [
        _result(block, definitions, f"{path}[{i}]", images)
        for i, block in enumerate(blocks)
        if isinstance(block, ToolResult | ServerToolResult)
    ]
    text = "\n".join(part for block in blocks if (part := block_text(block)))
    return user_message(results, text) or (Message(Role.USER),)


def _assistant(blocks: tuple[Block, ...]) -> list[Message]:
    """Messages of the assistant, cut at results of a server's tools."""
    messages: list[Message] = []
    for is_result, group in groupby(blocks, lambda block: isinstance(block, ServerToolResult)):
        parts = tuple(group)
        if is_result:
            messages += map(_server_result, parts)
        else:
            messages.append(_said(parts))
    return messages


def _server_result(block: Any) -> Message:
    text = json.dumps(request_fields.readable(block.content), ensure_ascii=False)
    return Message(Role.TOOL, text, tool_call_id=block.tool_use_id)


def _said(blocks: tuple[Block, ...]) -> Message:
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingInput)]
    return Message(
        role=Role.ASSISTANT,
        text="".join(map(block_text, blocks)),
        reasoning="\n".join(thoughts) or None,
        tool_calls=tuple(
            ToolCall(block.id, block.name, parse_arguments(block.input))
            for block in blocks
            if isinstance(block, ToolUse)
        ),
    )


def _late_system(blocks: tuple[Block, ...], definitions: Definitions) -> tuple[Message, ...]:
    """System message in its place; tool changes are described in text."""
    text = "\n".join(line for block in blocks if (line := _instruction(block, definitions)))
    return (Message(Role.SYSTEM, text),) if text else ()


def _with_first_reminders(messages: list[Message]) -> list[Message]:
    """Move system messages behind the first question before it.

    Claude Code sends skills, agents and the date there, and again in each later request. For models
    whose names it knows it writes them as such reminders itself. Before the question they belong
    to the part of the prompt that is the same whatever a person types.
    """
    if not messages or messages[0].role is not Role.USER:
        return messages
    late = list(takewhile(lambda message: message.role is Role.SYSTEM, messages[1:]))
    texts = [*(reminder(message.text) for message in late), messages[0].text]
    first = structs.replace(messages[0], text=TURN_JOINT.join(texts))
    return [first, *messages[1 + len(late) :]]


def _instruction(block: Block, definitions: Definitions) -> str:
    match block:
        case ToolAddition():
            name = _name(block.tool) or _name(block.tool.get("definition"))
            if not name:
                return ""
            return definitions.text([name])
        case ToolRemoval():
            name = _name(block.tool)
            if not name:
                return ""
            return removal_note(name)
    return block_text(block)


def _result(
    result: ToolResult | ServerToolResult, definitions: Definitions, path: str, images: ImageReader
) -> Message:
    """Tool result; found tools are described in place, a failure becomes text."""
    if isinstance(result, ServerToolResult):
        return _server_result(result)
    parts: list[dict[str, Any]] = []
    path = f"{path}.content"
    content = result_content(result.content, tuple(KINDS))
    content, found_images = with_marks(content, path, images, is_new=False)
    for block in read(content, path):
        if isinstance(block, ToolReference):
            parts.append({"type": "tool_reference", "tool_name": block.tool_name})
        elif text := block_text(block) or _block_json(block):
            parts.append({"type": "text", "text": text})
    text = result_text(parts, definitions)
    if result.is_error:
        text = error_text(text)
    return Message(Role.TOOL, text, tool_call_id=result.tool_use_id, images=found_images)


def _block_json(block: Block) -> str:
    """JSON of a block without text; "" for an empty text."""
    if isinstance(block, TextInput):
        return ""
    return request_fields.part_json(to_builtins(block))


def _require_place(blocks: tuple[Block, ...], role: str, path: str) -> None:
    """Raise BadRequest for a block without meaning in this role."""
    for i, block in enumerate(blocks):
        if role in PLACES and not isinstance(block, PLACES[role]):
            kind = block.__struct_config__.tag
            raise BadRequest(
                f"{path}[{i}]: {kind} cannot stand in a message of the role {role}", f"{path}[{i}]"
            )


def _require_readable(blocks: tuple[Block, ...], path: str) -> None:
    """Raise BadRequest for an image, or for a document without text."""
    for i, block in enumerate(blocks):
        if isinstance(block, ImageInput) or (
            isinstance(block, DocumentInput) and _inside(block) is None
        ):
            kind = block.__struct_config__.tag
            raise BadRequest(
                f"{path}[{i}]: {kind} input is not supported by this model; send text",
                f"{path}[{i}]",
            )


def _template(body: MessagesBody) -> dict[str, Any]:
    if body.output_config and body.output_config.effort in EFFORTS:
        return {"reasoning_effort": EFFORTS[body.output_config.effort]}
    return {}


def response_format(body: MessagesBody) -> ResponseConstraint | None:
    """Output constraint of a body."""
    if body.output_config and body.output_config.format:
        return format_constraint(body.output_config.format, "output_config.format")
    return format_constraint(body.output_format, "output_format")


def read(content: Content | None, path: str) -> tuple[Block, ...]:
    """Blocks of a `content` field at the path `path`; strings included.

    Unknown kinds become their text, or JSON if they have none. Raises BadRequest with the path of a
    field that has the wrong type.
    """
    if isinstance(content, str):
        return (TextInput(content),) if content else ()
    return tuple(_read(content or [], path))


def block_text(block: Block) -> str:
    """Text of a block; "" for calls, results and reasoning."""
    match block:
        case TextInput():
            return block.text
        case ImageInput():
            return "[image omitted]"
        case DocumentInput():
            return _document(block)
        case SearchResult():
            lines = (block.title, block.source, *_texts(block.content))
            return "\n".join(filter(None, lines))
    return ""


def _read(content: list[Any], path: str) -> Iterator[Block]:
    for i, part in enumerate(content):
        raw = part
        if isinstance(part, str):
            raw = {"type": "text", "text": part}
        kind = raw.get("type")
        if not isinstance(kind, str):
            raise BadRequest(f"{path}[{i}].type: Field required", f"{path}[{i}].type")
        kind = _plain_kind(kind)
        if kind in KINDS:
            yield _typed(raw, kind, f"{path}[{i}]")
        else:
            yield TextInput(_unknown_text(raw))


def _plain_kind(kind: str) -> str:
    """Kind of a block, which may be named after a server's tool."""
    # What is uploaded to a container of Anthropic's cannot be read here.
    if kind == "container_upload":
        return "document"
    # Calls of a server's tools are named after where the tool runs, results after the tool.
    if kind.endswith("_tool_use"):
        return "tool_use"
    if kind.endswith("_tool_result"):
        return "server_tool_result"
    return kind


def _typed(raw: dict[str, Any], kind: str, path: str) -> Block:
    """Block of a known kind, null fields left out. Raises BadRequest."""
    fields = {key: value for key, value in raw.items() if value is not None}
    if kind == "text" and "text" in raw:
        fields.setdefault("text", "")
    block: Block = request_fields.converted({**fields, "type": kind}, cast(Any, Block), path)
    return block


def _document(document: DocumentInput) -> str:
    inside = _inside(document)
    if inside is None:
        return "[document omitted]"
    return "\n".join(filter(None, (document.title, document.context, inside)))


def _inside(document: DocumentInput) -> str | None:
    """Text of a document, None if its source carries none."""
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
    text = raw.get("text", raw.get("content"))
    return text if isinstance(text, str) else ""


def _unknown_text(raw: dict[str, Any]) -> str:
    """Text of a block of an unknown kind, or all of it."""
    if raw.get("type") == SEALED:
        return ""
    return _text(raw) or request_fields.part_json(raw)


OF_OPENAI = "function"
"""Type of tools in OpenAI's API."""
CHOICES = {
    "auto": ToolChoiceMode.AUTO,
    "any": ToolChoiceMode.REQUIRED,
    "tool": ToolChoiceMode.REQUIRED,
    "none": ToolChoiceMode.NONE,
}


def declared_tools(body: MessagesBody) -> tuple[Tool, ...]:
    """All tools in order; those added later count as deferred."""
    head = [
        _tool(spec, f"tools[{i}]", bool(spec.defer_loading))
        for i, spec in enumerate(body.tools or ())
        if not is_server_tool(spec)
    ]
    names = {tool.name for tool in head}
    return (*head, *(tool for tool in _joining(body) if tool.name not in names))


def tool_choice_mode(choice: ToolChoice | None, tools: Iterable[Tool]) -> ToolChoiceMode:
    """Tool choice of a request. Raises BadRequest."""
    if choice is None:
        return ToolChoiceMode.AUTO
    mode = read_known(CHOICES, choice.type, "tool_choice.type")
    if choice.type == "tool" and choice.name not in {tool.name for tool in tools}:
        raise BadRequest(f"tool_choice.name: no tool is named {choice.name!r}", "tool_choice.name")
    return mode


def _joining(body: MessagesBody) -> Iterator[Tool]:
    for i, turn in enumerate(body.messages):
        if turn.role != "system":
            continue
        for j, block in enumerate(read(turn.content, f"messages[{i}].content")):
            definition = block.tool.get("definition") if isinstance(block, ToolAddition) else None
            if isinstance(definition, dict) and _name(definition):
                yield _defined(definition, f"messages[{i}].content[{j}].tool.definition")


def _defined(definition: dict[str, Any], path: str) -> Tool:
    spec = request_fields.converted(definition, ToolParam, path)
    return _tool(spec, path, is_deferred=True)


def _tool(spec: ToolParam, path: str, is_deferred: bool) -> Tool:
    if not spec.name:
        form = ", and the others beside it, not in `function`" if spec.type == OF_OPENAI else ""
        raise BadRequest(f"{path}.name: Field required{form}", f"{path}.name")
    own = Tool(spec.name, spec.description or "", request_fields.schema_of(spec), is_deferred)
    return client_tool(spec, is_deferred) or own


def _name(tool: Any) -> str:
    match tool:
        case {"name": str(name)}:
            return name
    return ""
