"""Whether coding agents show receipts."""

from enum import StrEnum


class ReceiptMode(StrEnum):
    """Whether a client shows receipts; WRAP: below a user's own status line."""

    AUTO = "auto"
    WRAP = "wrap"
    OFF = "off"
