"""Converts a Responses API body to a conversation and generation options."""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any

import msgspec
from msgspec import Struct, structs

from mlxstack.api import request_fields
from mlxstack.api.custom_tools import INPUT, call_arguments
from mlxstack.api.dialects.openai_chat.messages import (
    ROLES,
    ChatMessageParam,
    ContentReader,
    ToolCallParam,
    has_inner_messages,
    read_call,
    read_history,
    read_latest_user,
    read_system,
    result_content,
    spread_message,
    with_marks,
)
from mlxstack.api.dialects.openai_chat.to_conversation import effort
from mlxstack.api.dialects.openai_responses.encrypted_reasoning import decode_reasoning
from mlxstack.api.dialects.openai_responses.request_schema import (
    InputItem,
    Item,
    ResponsesBody,
    items_of,
)
from mlxstack.api.dialects.openai_responses.tool_names import ADDED, FOUND, ToolNames
from mlxstack.api.request_fields import read_known
from mlxstack.api.response_format import ResponseFormat, format_constraint, format_instruction
from mlxstack.core.conversation import Conversation, Message, Role, ToolCall
from mlxstack.core.errors import BadRequest, UnknownResponse
from mlxstack.core.image import ImagePart
from mlxstack.text.grammar.schema_grammar import ResponseConstraint
from mlxstack.text.images.marks import mark_of
from mlxstack.text.images.reader import KINDS, TEXT_ONLY, ImageReader
from mlxstack.text.normalize_messages import TEXT_PARTS, parse_arguments

UPDATE = "configuration_update"
"""An item that holds settings from there on."""


# Fields that need a server that stores responses.
STATEFUL = ("conversation", "prompt", "background")


def conversation(
    body: ResponsesBody, box: ToolNames, images: ImageReader = TEXT_ONLY
) -> Conversation:
    """Conversation of a body. Raises BadRequest with the path of the field."""
    if body.previous_response_id:
        raise UnknownResponse(body.previous_response_id)
    reason = ": no responses are stored here; send the whole input"
    request_fields.refuse(body, STATEFUL, reason)
    n_items = request_fields.n_parts([body.input])
    request_fields.bound(
        n_items, request_fields.MAX_MESSAGES + request_fields.MAX_CALLS, "input", "items"
    )
    request_fields.bound(len(box.tools), request_fields.MAX_TOOLS, "tools", "tools")
    instruction = format_instruction(response_format(body))
    messages = (*instruction_messages(body.instructions), *_input(body, box, images), *instruction)
    if not messages:
        items = items_of(body)
        kinds = ", ".join(dict.fromkeys(str(item.get("type")) for item in items))
        problem = "is empty"
        if kinds:
            problem = f"has items of the type {kinds} only"
        raise BadRequest(f"input {problem}; at least one message is needed", "input")
    level = (body.reasoning or {}).get("effort")
    thinking, template = effort(
        body.chat_template_kwargs, level if isinstance(level, str) else None
    )
    return Conversation(messages=messages, tools=box.tools, thinking=thinking, template=template)


def response_format(body: ResponsesBody) -> ResponseConstraint | None:
    """Output constraint of a body. Raises BadRequest."""
    form = (body.text or {}).get("format")
    if not form:
        return format_constraint(body.response_format, "response_format")
    spec = request_fields.converted(form, ResponseFormat, "text.format")
    return format_constraint(spec, "text.format")


def instruction_messages(instructions: str | list[Item] | None) -> tuple[Message, ...]:
    """Instructions as the first system message, or as their own items."""
    if isinstance(instructions, list):
        return messages(instructions, ToolNames(), field="instructions")
    if instructions:
        return (Message(Role.SYSTEM, read_system(instructions, "instructions")),)
    return ()


def _input(body: ResponsesBody, box: ToolNames, images: ImageReader) -> tuple[Message, ...]:
    if isinstance(body.input, str):
        return (Message(Role.USER, body.input),)
    return messages(body.input, box, images)


class PlacedItem(Struct, frozen=True):
    """Item with the path of the field that it was sent in."""

    path: str
    item: Item


Reader = Callable[[InputItem, str, ToolNames], Message]

JOINT = "\n\n"


def messages(
    items: list[Item], box: ToolNames, images: ImageReader = TEXT_ONLY, field: str = "input"
) -> tuple[Message, ...]:
    """Messages of the items of a field. Raises BadRequest.

    Reasoning, text and calls of the assistant without another message between them are one turn.
    Parts of a content that stand among the items are one message of the user. An item of an unknown
    type is read as its JSON.
    """
    ran = {str(item.get(REQUEST)) for item in items if item.get("type") == "mcp_call"}
    placed = [
        PlacedItem(f"{field}[{i}]", inner)
        for i, item in enumerate(items)
        for inner in _inner_items(item, f"{field}[{i}]")
    ]
    last = max((n for n, place in enumerate(placed) if _is_asked(place.item)), default=-1)
    answered = max((n for n, place in enumerate(placed) if _is_answer(place.item)), default=-1)
    read: list[Message] = []
    for is_part, group in groupby(enumerate(placed), lambda pair: _is_question_part(pair[1].item)):
        numbered = list(group)
        if is_part:
            is_latest = numbered[-1][0] == last
            reader = read_latest_user if is_latest else read_history
            is_new = is_latest and last > answered
            places = [place for _, place in numbered]
            read.append(_asked_in_parts(places, reader, images, is_new=is_new))
            continue
        for n, place in numbered:
            path, item = place.path, place.item
            kind = _type(item, path)
            if kind in APPROVALS and str(item.get(APPROVALS[kind])) in ran:
                continue
            if n == last:
                is_new = last > answered
                read.append(
                    _with_images(_new_question, item, kind, path, box, images, is_new=is_new)
                )
            else:
                read += _read(item, kind, path, box, images)
    return tuple(_turns(read))


def _inner_items(item: Item, path: str) -> Iterator[Item]:
    """Items of a message with calls, results or reasoning inside."""
    is_message = item.get("type") in (None, "message") and "role" in item
    has_more = has_inner_messages(item.get("content")) or any(map(item.get, OF_CHATS))
    if not (is_message and has_more):
        yield item
        return
    for message in spread_message(request_fields.converted(item, ChatMessageParam, path)):
        if message.reasoning_content:
            text = {"type": "reasoning_text", "text": message.reasoning_content}
            yield {"type": "reasoning", "content": [text]}
        if message.role == "tool":
            key = message.tool_call_id
            yield {"type": "function_call_output", "call_id": key, "output": message.content}
        elif message.content:
            yield {"role": message.role, "content": message.content}
        calls = list(message.tool_calls or ())
        if message.function_call and not calls:
            calls = [ToolCallParam(function=message.function_call)]
        for call in calls:
            yield {"role": message.role, "tool_calls": [msgspec.to_builtins(call)]}


def _read(
    item: Item, kind: str, path: str, box: ToolNames, images: ImageReader
) -> tuple[Message, ...]:
    """Messages of an item that is not the newest question."""
    if kind in READERS:
        return (_with_images(READERS[kind], item, kind, path, box, images, is_new=False),)
    if kind in HOSTED:
        return _hosted_call(request_fields.converted(item, InputItem, path))
    if kind in ANSWER_PARTS:
        return (Message(Role.ASSISTANT, read_history([_whole_part(item, path)], path)),)
    if kind in READ_ELSEWHERE:
        return ()
    if kind in SEALED:
        raise BadRequest(
            f"{path}.type: {kind} is not supported, only OpenAI's servers can read it; "
            "send the items that it stands for, or a summary of them in a message",
            f"{path}.type",
        )
    if kind in INNER_PARTS:
        raise BadRequest(
            f"{path}.type: {kind} is a part of another item and not an item; "
            "send it in an item of the type reasoning",
            f"{path}.type",
        )
    return (Message(Role.USER, _json(request_fields.readable(item))),)


def _with_images(
    reader: Reader,
    item: Item,
    kind: str,
    path: str,
    box: ToolNames,
    images: ImageReader,
    *,
    is_new: bool,
) -> Message:
    """Message of an item with the images that it shows."""
    is_content = _is_asked(item)
    name = "content" if is_content else "output"
    fields = _with_parts(item)
    seen = images
    if not is_content and kind not in SHOWING:
        seen = TEXT_ONLY
    content = fields.get(name)
    if not is_content:
        content = result_content(content)
    fields[name], found_images = with_marks(content, f"{path}.{name}", seen, is_new=is_new)
    message = reader(request_fields.converted({**fields, "type": kind}, InputItem, path), path, box)
    if found_images:
        return structs.replace(message, images=found_images)
    return message


def _is_question_part(item: Item) -> bool:
    return item.get("type") in QUESTION_PARTS


def _asked_in_parts(
    places: list[PlacedItem], read: ContentReader, images: ImageReader, *, is_new: bool
) -> Message:
    """Message of the user whose parts stand among the items."""
    texts: list[str] = []
    shown_images: list[ImagePart] = []
    for place in places:
        path, part = place.path, place.item
        if images.accepts_images and part["type"] in KINDS:
            image = images.new(part, path) if is_new else images.earlier(part)
            if isinstance(image, ImagePart):
                shown_images.append(image)
                texts.append(mark_of(image))
            else:
                texts.append(image)
        else:
            texts.append(read([_whole_part(part, path)], path))
    return Message(Role.USER, "\n".join(texts), images=tuple(shown_images))


def _whole_part(part: Item, path: str) -> Item:
    """A part that has its text. Raises BadRequest."""
    name = "refusal" if part["type"] == "refusal" else "text"
    if part["type"] in (*TEXT_PARTS, "refusal") and not isinstance(part.get(name), str):
        raise BadRequest(f"{path}.{name}: Field required", f"{path}.{name}")
    return part


def configured(body: ResponsesBody) -> ResponsesBody:
    """Body with the settings of its last configuration updates."""
    settings: dict[str, dict[str, Any] | None] = {"reasoning": body.reasoning, "text": body.text}
    for i, item in enumerate(items_of(body)):
        if item.get("type") != UPDATE:
            continue
        for name, setting in settings.items():
            changed = item.get(name) or {}
            if not isinstance(changed, dict):
                raise BadRequest(f"input[{i}].{name} must be an object", f"input[{i}].{name}")
            settings[name] = {**(setting or {}), **changed} or setting
    return structs.replace(body, **settings)


def _type(item: Item, path: str) -> str:
    kind = item.get("type") or ("message" if "role" in item else None)
    if not isinstance(kind, str):
        raise BadRequest(f"{path}.type must name the type of the item", f"{path}.type")
    return kind


def _is_asked(item: Item) -> bool:
    is_message = item.get("type") in (None, "message") and item.get("role") == "user"
    return is_message or _is_question_part(item)


def _is_answer(item: Item) -> bool:
    kind = item.get("type")
    is_call = kind in ("reasoning", *ANSWER_PARTS) or (
        isinstance(kind, str) and kind.endswith("_call")
    )
    return is_call or item.get("role") == "assistant"


def _with_parts(item: Item) -> Item:
    """Copy of an item, its one screenshot as a list of parts."""
    output = item.get("output")
    if item.get("type") != "computer_call_output" or not isinstance(output, dict):
        return {**item}
    return {**item, "output": [{**output, "type": "input_image"}]}


def _new_question(item: InputItem, path: str, _: ToolNames) -> Message:
    return Message(Role.USER, read_latest_user(item.content, f"{path}.content"))


def _message(item: InputItem, path: str, box: ToolNames) -> Message:
    role = read_known(ROLES, item.role or "", f"{path}.role")
    read = read_history
    if role is Role.SYSTEM:
        read = read_system
    calls: tuple[ToolCall, ...] = ()
    if item.tool_calls:
        names = box.custom_names
        calls = tuple(read_call(call, names) for call in item.tool_calls)
    return Message(
        role,
        read(item.content, f"{path}.content"),
        tool_calls=calls,
        tool_call_id=item.tool_call_id,
    )


def _reasoning(item: InputItem, path: str, _: ToolNames) -> Message:
    thoughts = (
        read_history(item.content, f"{path}.content")
        or decode_reasoning(item.encrypted_content)
        or read_history(item.summary, f"{path}.summary")
    )
    return Message(Role.ASSISTANT, reasoning=thoughts or None)


def _named_call(item: InputItem, path: str, box: ToolNames) -> Message:
    name = _given(item, "name", path)
    spoken = box.spoken(name, item.namespace)
    arguments = parse_arguments(item.arguments)
    if item.type == "custom_tool_call":
        arguments = {INPUT: item.input or ""}
    elif box.is_custom(spoken):
        arguments = call_arguments(item.arguments)
    return _calling(ToolCall(_call_id(item), spoken, arguments))


def _built_in_call(item: InputItem, path: str, _: ToolNames) -> Message:
    arguments = _given(item, CALL_FIELDS.get(item.type, "action"), path)
    name = item.type.removesuffix("_call")
    return _calling(ToolCall(_call_id(item), name, parse_arguments(arguments)))


def _computer_call(item: InputItem, _: str, __: ToolNames) -> Message:
    arguments = item.action
    if arguments is None:
        arguments = {"actions": item.actions or []}
    return _calling(ToolCall(_call_id(item), "computer", parse_arguments(arguments)))


def _hosted_call(item: InputItem) -> tuple[Message, Message]:
    """Call that OpenAI's servers ran and its result, of one item."""
    fields = {"queries": item.queries, "code": item.code}
    present_fields = {name: value for name, value in fields.items() if value is not None}
    arguments = parse_arguments(item.arguments or item.action or present_fields)
    name = item.name or item.type.removesuffix("_call")
    call_id = item.id or ""
    results = (item.output, item.outputs, item.results, item.error, item.status, "completed")
    result = next(candidate for candidate in results if candidate is not None)
    text = result if isinstance(result, str) else _json(result)
    return _calling(ToolCall(call_id, name, arguments)), _result(text, call_id)


def _output(item: InputItem, path: str, _: ToolNames) -> Message:
    return _result(read_history(item.output, f"{path}.output"), _call_id(item))


def _found_tools(item: InputItem, _: str, __: ToolNames) -> Message:
    """Tools that a search found, as they were sent.

    The item of a search by OpenAI's servers has an id of its own and not that of its call.
    """
    return _result(_json(item.tools or []), item.call_id)


def _agent_message(item: InputItem, path: str, _: ToolNames) -> Message:
    """Message of another agent of Codex, whose role no template has."""
    text = read_history(item.content, f"{path}.content")
    return Message(Role.USER, f"Message from {item.author or 'another agent'}:\n{text}")


def _patch_output(item: InputItem, path: str, _: ToolNames) -> Message:
    """Log of a patch after its status."""
    lines = (item.status, read_history(item.output, f"{path}.output"))
    return _result("\n".join(filter(None, lines)), _call_id(item))


def _approval(item: InputItem, path: str, _: ToolNames) -> Message:
    """Approval or refusal of the user, as the result of the call."""
    text = "denied by the user"
    if _given(item, "approve", path):
        text = "approved, but not run here"
    answer = ": ".join(filter(None, (text, item.reason)))
    return _result(answer, _given(item, REQUEST, path))


def _given(item: InputItem, field: str, path: str) -> Any:
    """Value of a field. Raises BadRequest without one."""
    if (value := getattr(item, field)) is None:
        raise BadRequest(f"{path}.{field}: Field required", f"{path}.{field}")
    return value


def _result(text: str, call_id: str | None) -> Message:
    return Message(Role.TOOL, text, tool_call_id=call_id)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call_id(item: InputItem) -> str:
    return item.call_id or item.id or ""


def _calling(call: ToolCall) -> Message:
    return Message(Role.ASSISTANT, tool_calls=(call,))


READERS: dict[str, Reader] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _named_call,
    "custom_tool_call": _named_call,
    "local_shell_call": _built_in_call,
    "shell_call": _built_in_call,
    "apply_patch_call": _built_in_call,
    "tool_search_call": _built_in_call,
    "computer_call": _computer_call,
    "function_call_output": _output,
    "custom_tool_call_output": _output,
    "local_shell_call_output": _output,
    "shell_call_output": _output,
    "apply_patch_call_output": _patch_output,
    "computer_call_output": _output,
    FOUND: _found_tools,
    "agent_message": _agent_message,
    "mcp_approval_request": _named_call,
    "mcp_approval_response": _approval,
}
REQUEST = "approval_request_id"
APPROVALS = {"mcp_approval_request": "id", "mcp_approval_response": REQUEST}
"""Items about a call of an MCP server, by the field of their id.

They are left out where the call follows.
"""
CALL_FIELDS = {"apply_patch_call": "operation", "tool_search_call": "arguments"}

HOSTED = frozenset(
    {
        "mcp_call",
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
    }
)
OF_CHATS = (
    "reasoning_content", "reasoning", "thinking_blocks", "reasoning_details", "function_call"
)  # fmt: skip
"""Fields of messages of chats, which some clients send among items."""
SEALED = frozenset(
    {"compaction", "compaction_summary", "context_compaction", "compaction_trigger", "program"}
)
"""Items that hold turns which the service cannot see, or ask OpenAI's servers for one."""


QUESTION_PARTS = ("input_text", "text", "input_audio", "file", "input_file", *sorted(KINDS))
ANSWER_PARTS = ("output_text", "refusal")
INNER_PARTS = frozenset({"reasoning_text", "summary_text", "encrypted_content"})
"""Parts of a content that some clients send among the items."""
READ_ELSEWHERE = frozenset({ADDED, UPDATE, "item_reference", "mcp_list_tools"})
"""Items that are no part of the conversation.

The tools of an MCP server are offered by OpenAI's servers only.
"""


def _turns(read: list[Message]) -> Iterator[Message]:
    """Join neighbors of the assistant; reasoning on its own is dropped."""
    for is_assistant, neighbors in groupby(read, lambda message: message.role is Role.ASSISTANT):
        if not is_assistant:
            yield from neighbors
        elif (turn := _joined(list(neighbors))).text or turn.tool_calls:
            yield turn


def _joined(parts: Sequence[Message]) -> Message:
    return structs.replace(
        parts[0],
        text=JOINT.join(message.text for message in parts if message.text),
        reasoning=JOINT.join(message.reasoning for message in parts if message.reasoning) or None,
        tool_calls=tuple(chain.from_iterable(message.tool_calls for message in parts)),
    )


SHOWING = frozenset({"function_call_output", "custom_tool_call_output", "computer_call_output"})
"""Items whose `output` may hold images."""
