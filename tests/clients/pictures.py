"""Requests with images in the shapes of real clients, with words of ours.

As Claude Code 2.1, Codex 0.169 and opencode 1.18 sent them to `test_pictures.py`: a file that was
read, a file that was attached, and all of it again with the next question.
"""

import base64
from io import BytesIO
from typing import Any

from PIL import Image

from tests.api.anthropic import shapes
from tests.api.requests import prompt_of
from tests.api.responses import codex
from tests.clients.tapes import Request, Tape

AND_NOW = "and now?"


def png(color: str = "red") -> bytes:
    """A picture of one color."""
    out = BytesIO()
    Image.new("RGB", (64, 64), color).save(out, "PNG")
    return out.getvalue()


def picture_tapes(image: bytes) -> tuple[Tape, ...]:
    """A tape for each way of a client to send `image`; the last request goes on from an answer."""
    data = base64.b64encode(image).decode()
    return (
        _read_by_claude(data),
        _attached_to_codex(data),
        _viewed_by_codex(data),
        _opencode(data),
    )


def _read_by_claude(data: str) -> Tape:
    """`Read` of a PNG: the image stands in the result, without text."""
    first = shapes.opening("look at picture.png", max_tokens=64)
    source = {"type": "base64", "data": data, "media_type": "image/png"}
    result = shapes.result([{"type": "image", "source": source}])
    second = shapes.following(first, shapes.canned("ToolA", file_path="picture.png"), result)
    question = {"type": "text", "text": AND_NOW}
    third = shapes.following(second, [{"type": "text", "text": "A picture."}], question)
    return _tape("claude-code-read", "/v1/messages?beta=true", first, second, third)


def _attached_to_codex(data: str) -> Tape:
    """`codex exec -i`: the image stands between two texts that name it."""
    texts = ('<image name=[Image #1] path="picture.png">', "</image>", "what is it")
    opens, closes, asks = ({"type": "input_text", "text": text} for text in texts)
    asked = codex.said("user")
    asked["content"] = [opens, _input_image(data), closes, asks]
    first = codex.request(asked)
    return _tape("codex-attached", "/v1/responses", first, _codex_goes_on(first))


def _viewed_by_codex(data: str) -> Tape:
    """The tool `view_image`: its output is a list with the image alone."""
    call = {
        "type": "function_call",
        "status": "completed",
        "name": "view_image",
        "arguments": '{"path":"picture.png"}',
        "call_id": "call_1",
    }
    output = {"type": "function_call_output", "call_id": "call_1", "output": [_input_image(data)]}
    first = codex.request(codex.said("user", "look at picture.png"), call, output)
    return _tape("codex-viewed", "/v1/responses", first, _codex_goes_on(first))


def _codex_goes_on(first: dict[str, Any]) -> dict[str, Any]:
    answer = {**codex.said("assistant", "A picture."), "status": "completed"}
    return {**first, "input": [*first["input"], answer, codex.said("user", AND_NOW)]}


def _input_image(data: str) -> dict[str, Any]:
    url = f"data:image/png;base64,{data}"
    return {"type": "input_image", "image_url": url, "detail": "high"}


def _opencode(data: str) -> Tape:
    """`opencode run -f`: told as a tool that was called, in the message of the user."""
    texts = ('Called the Read tool with the following input: {"filePath":"picture.png"}',)
    before = [{"type": "text", "text": text} for text in (*texts, "Image read successfully")]
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    asked = [*before, image, {"type": "text", "text": '"look at this"'}]
    first = [{"role": "system", "content": prompt_of(500, 5)}, {"role": "user", "content": asked}]
    answer = {"role": "assistant", "content": "A picture."}
    whole = {
        "model": "local-model",
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    later = [*first, answer, {"role": "user", "content": AND_NOW}]
    bodies = [{**whole, "messages": messages} for messages in (first, later)]
    return _tape("opencode-attached", "/v1/chat/completions", *bodies)


def _tape(name: str, path: str, *bodies: dict[str, Any]) -> Tape:
    return Tape(name, tuple(Request("POST", path, {}, body) for body in bodies))
