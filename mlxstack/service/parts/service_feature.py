"""Features of a service: what it does beside the answers to requests."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from prometheus_client import Metric

from mlxstack.core.conversation import Conversation, Message
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.preset import Preset
from mlxstack.core.request import Caller, Request, TurnReading
from mlxstack.core.status import RequestView, StatusFrame
from mlxstack.core.usage import UsageSums
from mlxstack.service.parts.agent_registry import AgentSettings
from mlxstack.service.parts.generation_options import GenerationOptions

if TYPE_CHECKING:
    from mlxstack.engine.chat_engine import ChatEngine
    from mlxstack.service.parts.text_processor import TextProcessor


class CompleteAnswer(Struct, frozen=True):
    """Complete answer to a request of a conversation."""

    engine: "ChatEngine"
    text_processor: "TextProcessor"
    request: Request
    conversation: Conversation
    message: Message
    slot: int


class ServiceFeature:
    """Feature of a service, whose hooks run on the event loop."""

    async def before_load(self, preset: Preset) -> None:
        """Before the model of a preset is loaded."""

    async def after_load(self, preset: Preset, engine: "ChatEngine", facts: ModelFacts) -> None:
        """After the model of a preset for text was loaded."""

    def read_turn(
        self, conversation: Conversation | None, options: GenerationOptions
    ) -> TurnReading | None:
        """Kind of a turn; None where this feature cannot tell."""
        return None

    def with_defaults(
        self,
        text_processor: "TextProcessor",
        settings: AgentSettings,
        conversation: Conversation,
        options: GenerationOptions,
    ) -> tuple[Conversation, GenerationOptions]:
        """Fill in what a request leaves open, before its prompt is made.

        `settings` are those of its agent.
        """
        return conversation, options

    def on_connection(self, caller: Caller) -> None:
        """When a program reads from the service, usually before its first request."""

    def on_request(self, request: Request) -> None:
        """Before a request goes to the engine."""

    def on_answer(self, answer: CompleteAnswer) -> None:
        """After a complete answer."""

    def on_end(self, request: Request, view: RequestView) -> None:
        """After any request ended, whatever its end."""

    def today(self) -> UsageSums | None:
        """Sums of the local day for dashboards, where it counts."""
        return None

    def metrics(self) -> Iterable[Metric]:
        """Families for /metrics."""
        return ()

    def with_status(self, frame: StatusFrame) -> StatusFrame:
        """The status with what the feature adds."""
        return frame

    def troubles(self) -> Sequence[str]:
        """Faults for /props, one text each."""
        return ()

    def before_unload(self) -> None:
        """Before the engine ends."""

    async def after_idle_unload(self) -> None:
        """After an idle model was unloaded, which comes back."""

    async def close(self) -> None:
        """At the end of the service."""
