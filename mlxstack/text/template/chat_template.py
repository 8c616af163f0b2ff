"""Chat template of a model: rendering, and its capabilities."""

import hashlib
import json
import threading
from collections.abc import Sequence
from itertools import chain
from typing import Any, Protocol

from msgspec.structs import replace

from mlxstack.core.conversation import Conversation, Message, Role, Tool, ToolCall
from mlxstack.core.errors import BadRequest, Unsupported
from mlxstack.text.normalize_messages import split_thoughts
from mlxstack.text.rendering.renderers import (
    RENDERERS,
    TemplateRefusal,
    render_chat,
    template_source,
)
from mlxstack.text.template.adaptation import (
    TemplateCapabilities,
    ThoughtField,
    adapt_to_template,
    cautious,
)
from mlxstack.text.template.capabilities import TemplateProbe, find_capabilities
from mlxstack.text.template.switches import NO_SWITCHES, TemplateSwitches, find_switches
from mlxstack.text.template.tool_definitions import completed_tools
from mlxstack.text.template.tool_losses import RenderedConversation
from mlxstack.text.template.variables import spelled
from mlxstack.text.tokens.cached_tokenizer import common_length
from mlxstack.text.tokens.special_token_escape import SpecialTokenEscaper
from mlxstack.text.tokens.special_tokens import SpecialTokens

Turn = dict[str, Any]

REFUSALS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)
RESERVED = frozenset(
    {
        "conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding",
        "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
        "return_assistant_tokens_mask", "sanitize_control_tokens", "add_generation_prompt",
        "continue_final_message",
    }
)  # fmt: skip


# Ends the text of an open answer; like the mark of the escaper, no honest text contains it.
OPEN_END = "\ufdd4"
MAX_FINDINGS = 16


MAX_OPENINGS = 64
PROBE_CHAR = Message(Role.USER, "\ufdd1")
"""A noncharacter that no message starts with: it shows where the head of a prompt ends."""
PROBE_CALL = Message(Role.ASSISTANT, tool_calls=(ToolCall("call00000", "\ufdd1", {}),))

TemplateFindings = tuple[TemplateCapabilities, TemplateSwitches]
_findings: dict[bytes, TemplateFindings] = {}
"""Findings of the last templates, by digest."""


class MessageMarks(Protocol):
    """Marks in the texts of messages, for content that is no text."""

    def parts(self, text: str) -> list[dict[str, Any]] | None:
        """Content of a message as parts; None for a text without marks."""

    def placed(self, rendering: str) -> str:
        """The rendering with placeholders for all parts."""


class ChatTemplate:
    """The template of a mlx-lm TokenizerWrapper. Callable by any thread."""

    def __init__(
        self,
        tokenizer: Any,
        special_tokens: SpecialTokens,
        thought_marks: tuple[str, str] | None = None,
        message_marks: MessageMarks | None = None,
    ) -> None:
        self._message_marks = message_marks
        self._lock = threading.Lock()
        self._openings: dict[bytes, str] = {}
        self._tokenizer = tokenizer
        self._guard = SpecialTokenEscaper(special_tokens.structure, special_tokens.normalize)
        self._own_guard = SpecialTokenEscaper(
            special_tokens.structure - special_tokens.calls, special_tokens.normalize
        )
        self._thought_opens, self._thought_closes = thought_marks or ("", "")
        self.capabilities = TemplateCapabilities()
        self.switches = NO_SWITCHES
        if tokenizer.has_chat_template:
            key = self._digest(special_tokens)
            findings = _findings.get(key) or self._probe()
            if len(_findings) >= MAX_FINDINGS:
                _findings.clear()
            _findings[key] = findings
            self.capabilities, self.switches = findings

    @property
    def source(self) -> str:
        """The template for conversations with tools, "" where it is no text."""
        return template_source(self._tokenizer, has_tools=True)

    def render(self, adapted: Conversation) -> str:
        """The prompt text of an adapted conversation, guard marks included.

        Raises BadRequest with the words of a template that refuses, TemplateOverrun for one that
        takes too long, and Unsupported when the model has none.
        """
        if not self._tokenizer.has_chat_template:
            raise Unsupported(
                "this model has no chat template: it is a base model, which continues text; send "
                "a prompt to /v1/completions"
            )
        if reserved := RESERVED & adapted.template.keys():
            names = ", ".join(sorted(reserved))
            raise BadRequest(f"{names} cannot be set for the template", "chat_template_kwargs")
        try:
            return self._render(adapted)
        except REFUSALS as error:
            raise BadRequest(
                f"the chat template of this model refuses the conversation: {error}", "messages"
            ) from error

    def write(self, conversation: Conversation) -> str:
        """The rendering of a conversation, adapted first. Raises as `render` does."""
        return self.render(_adapted(conversation, self.capabilities))

    def write_cautiously(self, conversation: Conversation) -> tuple[Conversation, str]:
        """The adapted conversation and its rendering.

        An order of turns that no probe has shown is written more and more cautiously, until the
        template takes it. Raises BadRequest with its first words.
        """
        if not conversation.messages:
            raise BadRequest("messages is empty; at least one message is needed", "messages")
        refusal: BadRequest | None = None
        for capabilities in chain((self.capabilities,), cautious(self.capabilities)):
            adapted = _adapted(conversation, capabilities)
            try:
                return adapted, self.render(adapted)
            except BadRequest as error:
                refusal = refusal or error
                if error.param != "messages":
                    break
        assert refusal is not None
        raise refusal

    def opening(self, variables: dict[str, Any]) -> str:
        """Text that opens the answer. Raises as `render` does."""
        key = hashlib.blake2b(spelled(variables), digest_size=16).digest()
        opening = self._openings.get(key)
        if opening is None:
            bare = Conversation((PROBE_CHAR,), template=variables)
            opened = self.render(bare)
            ended = self.render(replace(bare, add_generation_prompt=False))
            opening = opened[common_length(opened, ended) :]
            with self._lock:
                if len(self._openings) >= MAX_OPENINGS:
                    self._openings.clear()
                self._openings[key] = opening
        return opening

    def escape(self, text: str) -> str:
        """A text in which no special token is spelled."""
        return self._guard.text(text)

    def guarded(self, message: Message) -> str:
        """The text of a message as it appears in the rendered prompt."""
        if message.role is Role.ASSISTANT:
            return self._own_guard.text(message.text)
        return self._guard.text(message.text)

    def probe(self, probe: TemplateProbe, capabilities: TemplateCapabilities) -> str | None:
        """Rendering of a probe under other capabilities; None if refused."""
        return self.tried(probe.messages, probe.tools, {"enable_thinking": True}, capabilities)

    def rendered(
        self, capabilities: TemplateCapabilities, conversation: RenderedConversation
    ) -> str | None:
        """Rendering of a conversation under other capabilities; None if refused."""
        return self.tried(
            conversation.messages,
            conversation.tools,
            {"enable_thinking": True},
            capabilities,
            opens_answer=conversation.opens_answer,
        )

    def tried(
        self,
        messages: Sequence[Message],
        tools: tuple[Tool, ...],
        variables: dict[str, Any],
        capabilities: TemplateCapabilities | None = None,
        *,
        opens_answer: bool = False,
    ) -> str | None:
        """The rendering of a conversation; None if it is refused."""
        template = self if capabilities is None else self._under(capabilities)
        adapted = adapt_to_template(messages, template.capabilities, tools)
        tools = completed_tools(tools, template.capabilities)
        try:
            return template._render(
                Conversation(adapted, tools, template=variables, add_generation_prompt=opens_answer)
            )
        except REFUSALS:
            return None

    def _under(self, capabilities: TemplateCapabilities) -> "ChatTemplate":
        template = ChatTemplate.__new__(ChatTemplate)
        template.__dict__.update(self.__dict__)
        template.capabilities = capabilities
        return template

    def _probe(self) -> TemplateFindings:
        self.capabilities = find_capabilities(self.probe)
        try:
            variables = RENDERERS.free_variables(self.source)
        except TemplateRefusal:
            variables = {}
        switches = find_switches(self.tried, variables)
        return self.capabilities, switches

    def _digest(self, special_tokens: SpecialTokens) -> bytes:
        marks = [self._thought_opens, self._thought_closes]
        facts = [template_source(self._tokenizer, has_tools=False), self.source, marks,
                 sorted(special_tokens.structure), sorted(special_tokens.calls),
                 repr(dict(getattr(self._tokenizer, "special_tokens_map", {}))),
                 str(getattr(self._tokenizer, "_chat_template", None))]  # fmt: skip
        return hashlib.blake2b(json.dumps(facts).encode("utf-8", "surrogatepass")).digest()

    def _render(self, adapted: Conversation) -> str:
        is_open = adapted.continue_final
        turns = [self._turn(message) for message in adapted.messages]
        variables = {
            **self._guard.value(adapted.template),
            "messages": self._opened(turns) if is_open else turns,
            "tools": self._tools(adapted.tools),
            "add_generation_prompt": adapted.add_generation_prompt and not is_open,
        }
        text = render_chat(self._tokenizer, **variables)
        if self._message_marks is not None:
            text = self._message_marks.placed(text)
        return self._until_open_end(text) if is_open else text

    def _opened(self, turns: list[Turn]) -> list[Turn]:
        """Turns with a final mark, which protects trailing white space."""
        if not turns:
            raise ValueError("there is no message to continue")
        last = turns[-1]
        content = last["content"]
        if isinstance(content, list):
            return [*turns[:-1], {**last, "content": [*content[:-1], _marked(content[-1])]}]
        return [*turns[:-1], {**last, "content": content + OPEN_END}]

    def _until_open_end(self, text: str) -> str:
        end = text.rfind(OPEN_END)
        if end < 0:
            raise ValueError("the message to continue is not in the prompt")
        return text[:end].replace(OPEN_END, "")

    def _tools(self, tools: tuple[Tool, ...]) -> list[dict[str, Any]] | None:
        if tools and self.capabilities.takes_tools:
            return [self._tool(tool) for tool in tools]
        return [] if self.capabilities.needs_tool_list else None

    def _tool(self, tool: Tool) -> dict[str, Any]:
        function = {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        }
        return {"type": "function", "function": self._guard.value(function)}

    def _turn(self, message: Message) -> Turn:
        turn: Turn = {"role": message.role.value, "content": self.guarded(message)}
        if message.role is Role.ASSISTANT:
            turn |= self._thoughts(message)
            if message.tool_calls:
                turn["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.role is Role.TOOL:
            turn["tool_call_id"] = self._call_id(message.tool_call_id or "")
            turn["name"] = self._guard.text(message.name or "")
        if isinstance(turn["content"], str):
            turn["content"] = self._content(turn["content"])
        return turn

    def _content(self, text: str) -> str | list[Turn]:
        if self._message_marks is not None:
            parts = self._message_marks.parts(text)
            if parts is not None:
                return parts
        if self.capabilities.needs_parts:
            return [{"type": "text", "text": text}]
        return text

    def _thoughts(self, message: Message) -> Turn:
        """Reasoning of a turn, also from inside its text."""
        thoughts = message.reasoning
        answer = message.text
        if thoughts is None and self._thought_opens:
            thoughts, answer = split_thoughts(answer, self._thought_opens, self._thought_closes)
        if thoughts is None:
            return {}
        thought = self._own_guard.text(thoughts)
        text = self._own_guard.text(answer)
        match self.capabilities.thought_field:
            case ThoughtField.PART:
                parts = []
                if thought:
                    parts.append({"type": "thinking", "thinking": thought})
                if text or not thought:
                    parts.append({"type": "text", "text": text})
                return {"content": parts}
            case ThoughtField.REASONING:
                return {"reasoning": thought, "content": text}
        return {"reasoning_content": thought, "thinking": thought, "content": text}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments: Any = self._own_guard.value(call.arguments)
        if isinstance(arguments, str) and not self.capabilities.takes_strings:
            arguments = {"raw": arguments}
        if isinstance(arguments, dict) and not self.capabilities.takes_objects:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {
            "id": self._call_id(call.id),
            "type": "function",
            "function": {"name": self._guard.text(call.name), "arguments": arguments},
        }

    def _call_id(self, call_id: str) -> str:
        if not self.capabilities.needs_short_ids:
            return self._guard.text(call_id)
        if _is_short(call_id):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]


def closed(conversation: Conversation, messages: Sequence[Message]) -> Conversation:
    """Other messages with the same inputs, after which nothing follows."""
    return replace(
        conversation, messages=tuple(messages), add_generation_prompt=False, continue_final=False
    )


def _adapted(conversation: Conversation, capabilities: TemplateCapabilities) -> Conversation:
    messages = adapt_to_template(conversation.messages, capabilities, conversation.tools)
    tools = conversation.tools and completed_tools(conversation.tools, capabilities)
    return replace(conversation, messages=messages, tools=tools)


def _marked(part: Turn) -> Turn:
    if "text" in part:
        return {**part, "text": part["text"] + OPEN_END}
    return part


def _is_short(call_id: str) -> bool:
    return len(call_id) == 9 and call_id.isalnum() and call_id.isascii()
