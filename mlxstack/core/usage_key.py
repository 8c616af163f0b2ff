"""Fields by which usage is divided."""

from enum import StrEnum


class UsageKey(StrEnum):
    """Field by which usage is divided."""

    AGENT = "agent"
    CLIENT = "client"
    MODEL = "model"
    DAY = "day"
