"""Typed calls to a running service."""

from mlxstack.client.answers import (
    CallUsage,
    ChatResponse,
    ClientChoice,
    ClientMessage,
    GenerationSettings,
    HealthResponse,
    NextToken,
    PropsResponse,
    SlotErased,
    SlotResponse,
    SlotRestored,
    SlotSaved,
)
from mlxstack.client.calls import Client
from mlxstack.client.errors import Unreachable
from mlxstack.client.feed import FeedLost, ServerSentEvent

__all__ = [
    "CallUsage",
    "ChatResponse",
    "Client",
    "ClientChoice",
    "ClientMessage",
    "FeedLost",
    "GenerationSettings",
    "HealthResponse",
    "NextToken",
    "PropsResponse",
    "ServerSentEvent",
    "SlotErased",
    "SlotResponse",
    "SlotRestored",
    "SlotSaved",
    "Unreachable",
]
