"""The clients of a chaos: the three dialects, whole and streamed, patient or gone too soon."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
from msgspec import Struct

WAIT_S = 90.0
N_TOKENS = 5


class Told(Struct, frozen=True):
    """What a client heard. No status: the service vanished, or the client left first.

    Whole: it heard the end. Usage is in the engine's tokens.
    """

    status: int | None
    is_whole: bool = False
    body: Any = None
    message: dict[str, Any] | None = None
    n_prompt: int = 0
    n_generated: int = 0


GONE = Told(None)


class Wire:
    """Callable from many threads."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.Client(base_url=url, timeout=WAIT_S, limits=limits)

    def close(self) -> None:
        """Nobody speaks any more."""
        self._client.close()

    def ask(self, method: str, path: str, body: object) -> Told:
        """Anything but an answer of the model."""
        try:
            answer = self._client.request(method, path, json=body)
        except httpx.TransportError:
            return GONE
        return Told(answer.status_code, body=answer.json())

    def chat(self, path: str, body: dict[str, Any], leaves_after: int | None) -> Told:
        """An answer in OpenAI's shape; the client leaves after so many lines of a stream."""
        if not body.get("stream"):
            return self._whole(path, body, _openai)
        reply, lines = self._stream(
            path, {**body, "stream_options": {"include_usage": True}}, leaves_after
        )
        return _gathered(lines) if reply.status == 200 and reply.is_whole else reply

    def stranger(self, kind: str, text: str, leaves_after: int | None) -> tuple[Told, set[int]]:
        """Somebody without a name, and what may be answered."""
        fine = {200, 503, 529}
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "max_tokens": N_TOKENS, "temperature": 0}
        match kind:
            case "bad":
                return self.ask("POST", "/v1/chat/completions", {"messages": 7}), {400, 503}
            case "long":
                body = {**body, "messages": messages * 400}
                return self.ask("POST", "/v1/messages", {**body, "model": "any"}), {400, 503}
            case "messages":
                path = "/v1/messages"
                usage = _anthropic
                body = {**body, "model": "any"}
            case "responses":
                path = "/v1/responses"
                usage = _responses
                body = {"input": text, "max_output_tokens": N_TOKENS, "temperature": 0}
            case "completions":
                path = "/v1/completions"
                usage = _openai
                body = {"prompt": text, "max_tokens": N_TOKENS, "temperature": 0}
            case _:
                if leaves_after is None:
                    return self.chat("/v1/chat/completions", {**body, "stream": True}, None), fine
                path = "/v1/chat/completions"
                usage = _openai
        if leaves_after is None:
            return self._whole(path, body, usage), fine
        return self._stream(path, {**body, "stream": True}, leaves_after)[0], fine

    def _whole(self, path: str, body: dict[str, Any], usage: Any) -> Told:
        try:
            answer = self._client.post(path, json=body)
        except httpx.TransportError:
            return GONE
        content = answer.json()
        if answer.status_code != 200:
            return Told(answer.status_code, body=content)
        return usage(content)  # type: ignore[no-any-return]

    def _stream(
        self, path: str, body: dict[str, Any], leaves_after: int | None
    ) -> tuple[Told, list[Any]]:
        events: list[Any] = []
        try:
            with self._client.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    return Told(answer.status_code, body=answer.read()), events
                for event in _events(answer):
                    events.append(event)
                    if leaves_after is not None and len(events) >= leaves_after:
                        return GONE, events
        except httpx.TransportError:
            return GONE, events
        errors = [frame for frame in events if frame.get("error") or frame.get("type") == "error"]
        if errors:
            # A stream that began can only say in it that it was refused.
            return Told(503, body=errors), events
        return Told(200, is_whole=leaves_after is None), events


def _events(answer: httpx.Response) -> Iterator[Any]:
    for line in answer.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def _openai(body: Any) -> Told:
    usage = body["usage"]
    message = body["choices"][0].get("message")
    fields = message and {k: v for k, v in message.items() if v}
    return Told(200, True, body, fields, usage["prompt_tokens"], usage["completion_tokens"])


def _anthropic(body: Any) -> Told:
    usage = body["usage"]
    cached = usage.get("cache_read_input_tokens") or 0
    created = usage.get("cache_creation_input_tokens") or 0
    n_prompt = usage["input_tokens"] + cached + created
    return Told(200, True, body, None, n_prompt, usage["output_tokens"])


def _responses(body: Any) -> Told:
    usage = body["usage"]
    return Told(200, True, body, None, usage["input_tokens"], usage["output_tokens"])


def _gathered(events: list[Any]) -> Told:
    """A stream that was heard to its end, as the message that it was."""
    message: dict[str, Any] = {"role": "assistant"}
    usage: dict[str, int] = {}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            for key in ("content", "reasoning_content"):
                if choice["delta"].get(key):
                    message[key] = message.get(key, "") + choice["delta"][key]
    return Told(200, True, events, message, usage["prompt_tokens"], usage["completion_tokens"])
