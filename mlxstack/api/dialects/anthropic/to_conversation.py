"""From Anthropic's body to the conversation that it means."""

from typing import Any

from mlxstack.api import common_fields
from mlxstack.api.dialects.anthropic import tools
from mlxstack.api.dialects.anthropic.content_blocks import (
    Block,
    TextInput,
    ThinkingInput,
    ToolAddition,
    ToolReference,
    ToolRemoval,
    ToolResult,
    ToolUse,
    read,
    require_readable,
    words,
)
from mlxstack.api.dialects.anthropic.request_schema import Content, MessageParam, MessagesBody
from mlxstack.api.json_instruction import asked_json
from mlxstack.core.conversation import Conversation, Message, Role, ToolCall
from mlxstack.core.errors import BadRequest, Unsupported
from mlxstack.text.grammar.response_format import ResponseConstraint
from mlxstack.text.normalize_messages import (
    Definitions,
    drop_billing,
    error_text,
    parse_arguments,
    result_text,
    user_message,
)

ROLES = ("user", "assistant", "system")
THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}

# Templates know the three levels of GPT-OSS; Anthropic's higher ones are their highest.
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


def conversation(body: MessagesBody) -> Conversation:
    """Raises BadRequest with the path of the field that cannot work.

    A last turn of the assistant is to be continued (A-14), unless there is no text in it.
    """
    if not body.messages:
        raise BadRequest("messages: at least one message is needed", "messages")
    common_fields.bound(len(body.messages), common_fields.MOST_MESSAGES, "messages", "messages")
    n_blocks = common_fields.n_parts(turn.content for turn in body.messages)
    common_fields.bound(n_blocks, common_fields.MOST_PARTS, "messages", "content blocks")
    common_fields.bound(len(body.tools or ()), common_fields.MOST_TOOLS, "tools", "tools")
    declared = tools.declared(body)
    known = Definitions(declared)
    messages = [*_system(body.system), *_messages(body.messages, known)]
    if messages and _is_empty_answer(messages[-1]):
        messages.pop()
    messages = messages or [Message(Role.USER)]
    last = messages[-1]
    is_open = last.role is Role.ASSISTANT
    at = len(messages) - is_open
    return Conversation(
        messages=(*messages[:at], *_format(body), *messages[at:]),
        tools=declared,
        thinking=THINKING.get(body.thinking.type) if body.thinking else None,
        template=_template(body),
        add_generation_prompt=not is_open,
        continue_final=is_open and not last.tool_calls,
    )


def require_answerable(found: Conversation) -> None:
    """Raises BadRequest for a last turn that calls a tool: its result has to follow (A-14)."""
    if found.messages[-1].tool_calls:
        raise BadRequest(
            "messages: the last message calls a tool; a user message with its tool_result "
            "has to follow",
            "messages",
        )


def _is_empty_answer(message: Message) -> bool:
    return message.role is Role.ASSISTANT and not (message.text or message.tool_calls)


def _system(content: Content | None) -> tuple[Message, ...]:
    """Blocks simply follow each other, without billing headers (C-1, C-3)."""
    text = "".join(drop_billing(words(block)) for block in read(content, "system"))
    return (Message(Role.SYSTEM, text),) if text else ()


def _messages(turns: list[MessageParam], known: Definitions) -> list[Message]:
    newest = max((i for i, turn in enumerate(turns) if turn.role != "system"), default=-1)
    messages: list[Message] = []
    for i, turn in enumerate(turns):
        at = f"messages[{i}]"
        blocks = read(turn.content, f"{at}.content")
        match turn.role:
            case "user":
                if i == newest:
                    _require_readable(blocks, f"{at}.content")
                messages += _user(blocks, known, f"{at}.content")
            case "assistant":
                messages.append(_assistant(blocks))
            case "system":
                messages += _late_system(blocks, known)
            case role:
                raise BadRequest(
                    f"{at}.role is {role!r}; known are {', '.join(ROLES)}", f"{at}.role"
                )
    return messages


def _user(blocks: tuple[Block, ...], known: Definitions, at: str) -> tuple[Message, ...]:
    """Tool results first (A-10); a turn without anything is still a turn."""
    results = [
        _result(block, known, f"{at}[{i}]")
        for i, block in enumerate(blocks)
        if isinstance(block, ToolResult)
    ]
    text = "\n".join(said for block in blocks if (said := words(block)))
    return user_message(results, text) or (Message(Role.USER),)


def _assistant(blocks: tuple[Block, ...]) -> Message:
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingInput)]
    return Message(
        role=Role.ASSISTANT,
        text="".join(block.text for block in blocks if isinstance(block, TextInput)),
        reasoning="\n".join(thoughts) or None,
        tool_calls=tuple(
            ToolCall(block.id, block.name, parse_arguments(block.input))
            for block in blocks
            if isinstance(block, ToolUse)
        ),
    )


def _late_system(blocks: tuple[Block, ...], known: Definitions) -> tuple[Message, ...]:
    """Stays where it is (A-12); tools that come and go are told in words (A-21)."""
    text = "\n".join(line for block in blocks if (line := _instruction(block, known)))
    return (Message(Role.SYSTEM, text),) if text else ()


def _instruction(block: Block, known: Definitions) -> str:
    match block:
        case ToolAddition():
            return tools.addition(block, known)
        case ToolRemoval():
            return tools.removal(block)
    return words(block)


def _result(result: ToolResult, known: Definitions, at: str) -> Message:
    """Found tools are described in place (A-20); a failure is told in words (A-11)."""
    parts: list[dict[str, Any]] = []
    for block in read(result.content, f"{at}.content"):
        if isinstance(block, ToolReference):
            parts.append({"type": "tool_reference", "tool_name": block.tool_name})
        elif text := words(block):
            parts.append({"type": "text", "text": text})
    text = result_text(parts, known)
    if result.is_error:
        text = error_text(text)
    return Message(Role.TOOL, text, tool_call_id=result.tool_use_id)


def _require_readable(blocks: tuple[Block, ...], at: str) -> None:
    for i, block in enumerate(blocks):
        try:
            require_readable(block)
        except Unsupported as error:
            raise BadRequest(f"{at}[{i}]: {error.message}", f"{at}[{i}]") from None


def _template(body: MessagesBody) -> dict[str, Any]:
    effort = body.output_config.effort if body.output_config else None
    return {"reasoning_effort": EFFORTS[effort]} if effort in EFFORTS else {}


def response_format(body: MessagesBody) -> ResponseConstraint | None:
    """What the answer must look like."""
    wanted = (body.output_config and body.output_config.format) or body.output_format
    if wanted is None or wanted.type != "json_schema":
        return None
    return ResponseConstraint(wanted.schema or {}, param="output_config.format")


def _format(body: MessagesBody) -> tuple[Message, ...]:
    wanted = response_format(body)
    return () if wanted is None else (asked_json(wanted.schema),)
