"""Reasoning in the `encrypted_content` of an item."""

import base64

SEAL = "mlx-stack:"


def encode_reasoning(thoughts: str) -> str:
    """Encode reasoning for `encrypted_content`: not secret, only opaque.

    Clients that keep no server-side state return this field but drop readable reasoning, which a
    model needs between the calls of one task.
    """
    return SEAL + base64.urlsafe_b64encode(thoughts.encode()).decode()


def decode_reasoning(content: str | None) -> str:
    """Reasoning of an `encrypted_content`; "" for none and for foreign ones."""
    if content is None or not content.startswith(SEAL):
        return ""
    try:
        return base64.urlsafe_b64decode(content.removeprefix(SEAL)).decode()
    except ValueError:
        return ""
