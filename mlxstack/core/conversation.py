"""A conversation as every dialect means it, before it becomes tokens."""

from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from mlxstack.core.image import ImagePart


class Role(StrEnum):
    """Author of a message. The API folds `developer` into SYSTEM."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolCall(Struct, frozen=True):
    """Tool call of the model; unparsable `arguments` are a string."""

    id: str
    name: str
    arguments: dict[str, Any] | str


class Message(Struct, frozen=True):
    """One turn of speech. `tool_call_id` and `name` belong to role TOOL.

    `text` holds the mark of each of `images` where it stands.
    """

    role: Role
    text: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    images: tuple[ImagePart, ...] = ()


class InputGrammar(Struct, frozen=True):
    """Grammar of a custom tool's text; `syntax` is "regex" or "lark"."""

    syntax: str
    definition: str


class Tool(Struct, frozen=True):
    """Function the model may call; deferred ones are not in the prompt.

    With `input_grammar` its one argument is a text of this grammar.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    is_deferred: bool = False
    input_grammar: InputGrammar | None = None


class Conversation(Struct, frozen=True):
    """Input of the chat template.

    `thinking` None means the preset's default; `template` holds extra variables for the
    chat template; `continue_final` renders an open last assistant turn to be continued.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = None
    template: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final: bool = False
