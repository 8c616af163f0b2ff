"""A file as a prefix for POST /cache/prefixes."""

from pathlib import Path
from typing import Any

import msgspec

from mlxstack.core.errors import BadRequest


def prefix_in(file: Path) -> dict[str, Any]:
    """Messages of a chat (.json), else text. Raises BadRequest if unreadable."""
    try:
        file = file.expanduser()
        text = file.read_text("utf-8")
        if file.suffix == ".json":
            return {"messages": msgspec.json.decode(text)}
        return {"text": text}
    except (OSError, ValueError, RuntimeError) as error:
        raise BadRequest(f"{file} cannot be read: {error}") from error
