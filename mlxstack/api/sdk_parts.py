"""Parts of the Vercel AI SDK in the forms of the APIs."""

import base64
import binascii
from typing import Any

MEDIA_TYPES = ("mediaType", "mimeType")
"""Names of a part's media type, now and in older versions."""

Part = dict[str, Any]


def plain_part(part: Part) -> Part:
    """Part in the form of an API, if one has it."""
    match part:
        case {"type": "tool-call", "toolCallId": str(key), "toolName": str(name)}:
            arguments = part.get("input", part.get("args"))
            return {"type": "tool_use", "id": key, "name": name, "input": arguments}
        case {"type": "tool-result", "toolCallId": str(key)}:
            named = {"tool_use_id": key, "name": part.get("toolName")}
            return {"type": "tool_result", **named, **_result(part)}
        case {"type": "image", "image": image}:
            return {"type": "image", "data": image}
        case {"type": "file"}:
            return _file(part)
    return part


def _result(part: Part) -> Part:
    """Content of a result, and whether the tool failed."""
    match output := part.get("output", part.get("result")):
        case {"type": "text" | "json", "value": value}:
            return {"content": value}
        case {"type": "error-text" | "error-json", "value": value}:
            return {"content": value, "is_error": True}
        case {"type": "content", "value": list(parts)}:
            return {"content": list(map(_result_part, parts))}
        case {"type": "execution-denied", **rest}:
            reason = rest.get("reason")
            text = f": {reason}" if isinstance(reason, str) and reason else ""
            return {"content": f"denied by the user{text}"}
    return {"content": output, "is_error": part.get("isError")}


def _result_part(part: Any) -> Any:
    match part:
        case {"type": "media" | "file-data" | "image-data"}:
            return _file({**part, "type": "file"})
        case {"type": "image-url", "url": url}:
            return {"type": "image", "url": url}
    return part


def _file(part: Part) -> Part:
    """Image or text by the media type, else the file."""
    media_type = next((part[name] for name in MEDIA_TYPES if name in part), None)
    data = part.get("data", part.get("url"))
    if not isinstance(media_type, str) or not isinstance(data, str):
        return part
    if media_type.startswith("image/"):
        return {"type": "image", "data": data}
    if media_type.startswith("text/") and (text := _decoded(data)) is not None:
        name = part.get("filename")
        if isinstance(name, str) and name:
            text = f"{name}\n{text}"
        return {"type": "text", "text": text}
    return part


def _decoded(data: str) -> str | None:
    """Text of base64, or of a data URL with it."""
    head, _, encoded = data.rpartition(",")
    if head and not (head.startswith("data:") and head.endswith(";base64")):
        return None
    try:
        return base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
