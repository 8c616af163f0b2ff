"""Variables of the chat template."""

import json
from collections.abc import Mapping
from typing import Any

from mlxstack.core.conversation import Conversation
from mlxstack.core.errors import BadRequest
from mlxstack.text.template.switches import LEVELS, TemplateSwitches

STANDARD_SWITCH = "enable_thinking"
"""Template variable for thinking, which most templates enable by default."""
MAX_VARIABLES = 65_536
"""Bytes of JSON that the variables of a request may have."""


class TemplateVariables:
    """Variables of one model's template. Thread-safe.

    `thinking_default` None lets a model think if it can. `preset` are the variables of the preset;
    those of a conversation win.
    """

    def __init__(
        self,
        switches: TemplateSwitches,
        thinking_default: bool | None = None,
        preset: Mapping[str, Any] | None = None,
    ) -> None:
        self._switches = switches
        self._thinking_default = thinking_default
        self._preset = preset or {}

    def of(self, conversation: Conversation) -> dict[str, Any]:
        """All variables of a conversation. Raises BadRequest."""
        n_bytes = len(spelled(conversation.template))
        if n_bytes > MAX_VARIABLES:
            raise BadRequest(
                f"chat_template_kwargs have {n_bytes} bytes of JSON, at most {MAX_VARIABLES} are "
                "taken; long texts belong into the messages",
                "chat_template_kwargs",
            )
        switches = self._switches
        requested = dict(conversation.template)
        effort = requested.get("reasoning_effort")
        if isinstance(effort, str) and effort in LEVELS:
            requested |= switches.effort(effort)
        return {
            **switches.keep,
            **{name: True for name in switches.on if name == STANDARD_SWITCH},
            **self._preset,
            **self._thinking(self._thinking_default),
            **self._thinking(conversation.thinking),
            **requested,
        }

    def may_think(self, conversation: Conversation) -> bool:
        """Whether neither the request nor the preset switches thinking off."""
        values = (
            conversation.template.get(STANDARD_SWITCH),
            conversation.thinking,
            self._thinking_default,
        )
        return next((value for value in values if value is not None), True) is not False

    def _thinking(self, thinking: bool | None) -> dict[str, Any]:
        if thinking is None:
            return {}
        switch = self._switches.on if thinking else self._switches.off
        return {STANDARD_SWITCH: thinking, **switch}


def spelled(variables: Mapping[str, Any]) -> bytes:
    """Variables as bytes: equal ones are spelled alike."""
    return json.dumps(dict(variables), sort_keys=True, default=str).encode()
