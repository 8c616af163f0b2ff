"""Kinds of turns as a feature of a service."""

from mlxstack.core.conversation import Conversation
from mlxstack.core.request import TurnReading
from mlxstack.features.turn_kinds.policy import read_turn
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.service.parts.service_feature import ServiceFeature


class TurnKinds(ServiceFeature):
    """Reads the kind of each turn from its headers and its prompt."""

    def read_turn(
        self, conversation: Conversation | None, options: GenerationOptions
    ) -> TurnReading | None:
        schema = options.response_format.schema if options.response_format else None
        properties = schema.get("properties") if schema else None
        names = tuple(properties) if isinstance(properties, dict) else ()
        return read_turn(dict(options.caller.marks), conversation, options.max_tokens, names)
