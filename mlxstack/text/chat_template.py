"""The chat template of a model: renders conversations, and knows what it refuses."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import jinja2
import msgspec
from msgspec import Struct, field

from mlxstack.core.conversation import Message, Role, Tool, ToolCall
from mlxstack.core.errors import BadRequest, Unsupported
from mlxstack.text.normalize_messages import split_thoughts
from mlxstack.text.probes import USER, Turn, completed, find_traits
from mlxstack.text.special_token_escape import SpecialTokenEscaper
from mlxstack.text.special_tokens import SpecialTokens
from mlxstack.text.template_adaptation import TemplateCapabilities

REFUSALS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
RESERVED = frozenset(
    {
        "conversation", "messages", "tools", "documents", "chat_template", "tokenize", "padding",
        "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
        "return_assistant_tokens_mask", "sanitize_control_tokens", "add_generation_prompt",
        "continue_final_message",
    }
)  # fmt: skip


class TemplateInputs(Struct, frozen=True):
    """What a template is given beside the turns."""

    tools: tuple[Tool, ...] = ()
    variables: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final: bool = False


class ChatTemplate:
    """The template of a mlx-lm TokenizerWrapper. Callable by any thread."""

    def __init__(self, tokenizer: Any, special_tokens: SpecialTokens) -> None:
        self._tokenizer = tokenizer
        self._guard = SpecialTokenEscaper(special_tokens.structure, special_tokens.normalize)
        self._own_guard = SpecialTokenEscaper(
            special_tokens.structure - special_tokens.calls, special_tokens.normalize
        )
        self.capabilities = TemplateCapabilities()
        if tokenizer.has_chat_template:
            self.capabilities = self._find_traits()

    def render(self, messages: Iterable[Message], inputs: TemplateInputs) -> str:
        """The prompt text, guard marks included.

        Raises BadRequest with the words of a template that refuses, and Unsupported when the
        model has none.
        """
        if not self._tokenizer.has_chat_template:
            raise Unsupported("this model has no chat template; use the text completion endpoint")
        if reserved := RESERVED & inputs.variables.keys():
            names = ", ".join(sorted(reserved))
            raise BadRequest(f"{names} cannot be set for the template", "chat_template_kwargs")
        try:
            return self._render([self._turn(m) for m in messages], inputs)
        except REFUSALS as error:
            raise BadRequest(
                f"the chat template of this model refuses the conversation: {error}", "messages"
            ) from error

    def guarded(self, message: Message) -> str:
        """The text of a message as it appears in the rendered prompt."""
        guard = self._own_guard if message.role is Role.ASSISTANT else self._guard
        return guard.text(message.text)

    def _render(self, turns: list[Turn], inputs: TemplateInputs) -> str:
        text: str = self._tokenizer.apply_chat_template(
            turns,
            tools=self._tools(inputs.tools),
            tokenize=False,
            add_generation_prompt=inputs.add_generation_prompt and not inputs.continue_final,
            continue_final_message=inputs.continue_final,
            **self._guard.value(inputs.variables),
        )
        return text

    def _find_traits(self) -> TemplateCapabilities:
        # Some templates loop over the tools without a check; they accept an empty list.
        if self._accepts(USER) is None:
            self.capabilities = TemplateCapabilities(needs_tool_list=True)
            if self._accepts(USER) is None:
                self.capabilities = TemplateCapabilities()
        needs_tool_list = self.capabilities.needs_tool_list
        found = find_traits(self._accepts)
        return msgspec.structs.replace(found, needs_tool_list=needs_tool_list)

    def _accepts(self, *turns: Turn, tools: tuple[Tool, ...] = ()) -> str | None:
        try:
            return self._render(
                list(turns), TemplateInputs(tools=tools, add_generation_prompt=False)
            )
        except REFUSALS:
            return None

    def _tools(self, tools: tuple[Tool, ...]) -> list[dict[str, Any]] | None:
        made = [self._tool(tool) for tool in tools]
        return made if made or self.capabilities.needs_tool_list else None

    def _tool(self, tool: Tool) -> dict[str, Any]:
        whole = msgspec.structs.replace(
            tool, parameters=completed(tool.parameters, self.capabilities)
        )
        function: dict[str, Any] = self._guard.value(msgspec.structs.asdict(whole))
        del function["is_deferred"]
        return {"type": "function", "function": function}

    def _turn(self, message: Message) -> Turn:
        turn: Turn = {"role": message.role.value, "content": self.guarded(message)}
        if message.role is Role.ASSISTANT:
            turn |= self._thoughts(message)
            if message.tool_calls:
                turn["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.role is Role.TOOL:
            turn["tool_call_id"] = self._call_id(message.tool_call_id or "")
            turn["name"] = self._guard.text(message.name or "")
        return turn

    def _thoughts(self, message: Message) -> Turn:
        """The reasoning of a turn, also where a client left it inside the text (C-5)."""
        reasoning, start = message.reasoning, self._tokenizer.think_start
        if reasoning is not None:
            return {"reasoning_content": self._own_guard.text(reasoning)}
        if start is None:
            return {}
        thoughts, answer = split_thoughts(message.text, start, self._tokenizer.think_end)
        if thoughts is None:
            return {}
        guard = self._own_guard
        return {"reasoning_content": guard.text(thoughts), "content": guard.text(answer)}

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
        return call_id if _is_short(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]


def _is_short(call_id: str) -> bool:
    return len(call_id) == 9 and call_id.isalnum() and call_id.isascii()
