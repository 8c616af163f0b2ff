"""Puts a wish for JSON into words, so that the model knows what its answer is held to."""

import json
from typing import Any

from mlxstack.core.conversation import Message, Role


def asked_json(schema: dict[str, Any] | None) -> Message:
    """The last instruction before the answer."""
    line = "Answer with one JSON object and nothing else."
    if schema:
        line += f" It must match this JSON schema: {json.dumps(schema, ensure_ascii=False)}"
    return Message(Role.SYSTEM, line)
