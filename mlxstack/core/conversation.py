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
    """One turn of speech."""

    role: Role
    text: str = ""
    """With the mark of each of `images` where it stands."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Call that a message of role TOOL answers."""
    name: str | None = None
    """Tool of a message of role TOOL."""
    images: tuple[ImagePart, ...] = ()


class InputGrammar(Struct, frozen=True):
    """Grammar of a custom tool's text."""

    syntax: str
    """Either "regex" or "lark"."""
    definition: str


class Tool(Struct, frozen=True):
    """Function the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    is_deferred: bool = False
    """It is not in the prompt."""
    input_grammar: InputGrammar | None = None
    """Grammar of the text that is its one argument."""


class Conversation(Struct, frozen=True):
    """Input of the chat template."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = None
    """None means the preset's default."""
    template: dict[str, Any] = field(default_factory=dict)
    """Extra variables of the chat template."""
    add_generation_prompt: bool = True
    continue_final: bool = False
    """The last turn of the assistant is left open, to be continued."""
