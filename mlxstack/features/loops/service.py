"""Names repeated calls of a conversation."""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from mlxstack.core.conversation import Conversation
from mlxstack.features.loops.repeated_calls import repeated_call
from mlxstack.service.parts.agent_registry import AgentSettings
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.service.parts.service_feature import ServiceFeature

if TYPE_CHECKING:
    from mlxstack.service.parts.text_processor import TextProcessor


class CallNotes(ServiceFeature):
    """Notes repeated calls at requests, whose prompts stay as they are."""

    def with_defaults(
        self,
        text_processor: "TextProcessor",
        settings: AgentSettings,
        conversation: Conversation,
        options: GenerationOptions,
    ) -> tuple[Conversation, GenerationOptions]:
        """Add the call that the last turns repeated, if there is one."""
        repeated = repeated_call(conversation.messages)
        if repeated is not None:
            options = replace(options, repeated_call=repeated)
        return conversation, options
