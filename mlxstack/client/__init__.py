"""Typed calls to a running service."""

from mlxstack.client.client import Client
from mlxstack.client.errors import Unreachable
from mlxstack.client.types import (
    CallUsage,
    ChatResponse,
    ClientChoice,
    ClientMessage,
    FeedLost,
    GenerationSettings,
    HealthResponse,
    ListedModel,
    ListedModels,
    ModelStatus,
    NextToken,
    PropsResponse,
    ServerSentEvent,
    SlotErased,
    SlotResponse,
    SlotRestored,
    SlotSaved,
)

__all__ = [
    "CallUsage",
    "ChatResponse",
    "Client",
    "ClientChoice",
    "ClientMessage",
    "FeedLost",
    "GenerationSettings",
    "HealthResponse",
    "ListedModel",
    "ListedModels",
    "ModelStatus",
    "NextToken",
    "PropsResponse",
    "ServerSentEvent",
    "SlotErased",
    "SlotResponse",
    "SlotRestored",
    "SlotSaved",
    "Unreachable",
]
