"""Typed calls to a running service."""

from mlxstack.client.answers import (
    Chat,
    Choice,
    GenerationSettings,
    Health,
    NextToken,
    Props,
    Said,
    Slot,
    SlotErased,
    SlotRestored,
    SlotSaved,
    Usage,
)
from mlxstack.client.calls import Client
from mlxstack.client.errors import Unreachable
from mlxstack.client.feed import Lost, Message

__all__ = [
    "Chat",
    "Choice",
    "Client",
    "GenerationSettings",
    "Health",
    "Lost",
    "Message",
    "NextToken",
    "Props",
    "Said",
    "Slot",
    "SlotErased",
    "SlotRestored",
    "SlotSaved",
    "Unreachable",
    "Usage",
]
