"""Thoughts in `encrypted_content`: sealed for the way to the client and back, not secret.

Clients that keep no server-side state return this field but drop the readable thoughts, which
a model needs between the calls of one task.
"""

import base64

SEAL = "mlx-stack:"


def encode(thoughts: str) -> str:
    """What a client sends back untouched."""
    return SEAL + base64.urlsafe_b64encode(thoughts.encode()).decode()


def decode(content: str | None) -> str:
    """The thoughts inside; "" for nothing, and for what others have sealed."""
    if content is None or not content.startswith(SEAL):
        return ""
    try:
        return base64.urlsafe_b64decode(content.removeprefix(SEAL)).decode()
    except ValueError:
        return ""
