"""Bounds and effort of reasoning, filled into requests that set none."""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from mlxstack.core.conversation import Conversation
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.preset import Preset
from mlxstack.core.request import TurnKind
from mlxstack.core.thinking import Effort
from mlxstack.features.thinking.policy import TemplateThinking, ThinkingLayer, decide, preset_layers
from mlxstack.service.parts.agent_registry import AgentSettings
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.service.parts.service_feature import ServiceFeature

if TYPE_CHECKING:
    from mlxstack.engine.chat_engine import ChatEngine
    from mlxstack.service.parts.text_processor import TextProcessor

REQUEST = "request"
LEVEL = "reasoning_effort"
"""Variable of a conversation for the level of effort, whatever its template calls it."""
WORDS = frozenset(Effort)


class ThinkingDefaults(ServiceFeature):
    """Bounds the reasoning of every answer by request, agent, client and preset."""

    def __init__(self) -> None:
        self._preset: Preset | None = None

    async def after_load(self, preset: Preset, engine: "ChatEngine", facts: ModelFacts) -> None:
        self._preset = preset

    def with_defaults(
        self,
        text_processor: "TextProcessor",
        settings: AgentSettings,
        conversation: Conversation,
        options: GenerationOptions,
    ) -> tuple[Conversation, GenerationOptions]:
        """Fill in budget, effort and switch of a model that reasons."""
        if self._preset is None or not text_processor.output_format.has_thoughts:
            return conversation, options
        caller = options.caller
        switches = text_processor.prompt_maker.template.switches
        layers = (
            ThinkingLayer(
                REQUEST, options.thinking_budget, _effort(conversation), conversation.thinking
            ),
            ThinkingLayer("agent", settings.thinking_budget, settings.effort),
            *preset_layers(
                self._preset, caller.client, is_subagent=caller.turn_kind is TurnKind.SUBAGENT
            ),
        )
        template = TemplateThinking(bool(switches.levels), bool(switches.off))
        decision = decide(layers, template)
        bound = decision.bound
        is_own = not conversation.template.keys() & switches.levels.keys()
        if decision.level is not None and bound.effort_by != REQUEST and is_own:
            variables = {**conversation.template, LEVEL: decision.level.value}
            conversation = replace(conversation, template=variables)
        # An effort that a client sends by habit does not switch on what the preset switches off.
        if decision.is_on is not None and bound.effort_by != REQUEST:
            conversation = replace(conversation, thinking=decision.is_on)
        return conversation, replace(options, thinking_budget=bound.budget, thinking=bound)


def _effort(conversation: Conversation) -> Effort | None:
    """Effort that a request sets; words of its template alone are none."""
    word = conversation.template.get(LEVEL)
    if isinstance(word, str) and word in WORDS:
        return Effort(word)
    return None
