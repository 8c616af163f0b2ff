"""Greedy chat completions of any server, until a deadline."""

import time
from collections.abc import Sequence
from typing import Any, Self

import httpx
from msgspec import Struct

from mlxstack.core.errors import Broken

PATH = "/v1/chat/completions"
MODELS = "/v1/models"
CONNECT_S = 10.0


class OutOfTime(Exception):
    """The time of a run is over."""


class ChatAnswer(Struct, frozen=True):
    """Message and usage of an answer."""

    message: dict[str, Any]
    finish_reason: str
    n_prompt: int
    n_generated: int
    n_cached: int = 0
    seconds: float = 0.0
    has_loop: bool = False
    """A repetition that the server ended."""


class ChatServer:
    """Client of one model behind an OpenAI address."""

    def __init__(self, url: str, model: str, deadline: float = float("inf")) -> None:
        self.deadline = deadline
        """Monotonic time at which a request ends, answered or not."""
        self._model = model
        self._http = httpx.Client(base_url=url, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        max_tokens: int,
        **more: Any,
    ) -> ChatAnswer:
        """Greedy answer. Raises OutOfTime, and Broken for an error of the server."""
        began = time.monotonic()
        left_s = self.deadline - began
        if left_s <= 0:
            raise OutOfTime
        body = {
            "model": self._model,
            "messages": list(messages),
            "tools": list(tools),
            "temperature": 0,
            "max_tokens": max_tokens,
            "chat_template_kwargs": {"enable_thinking": False},
            **more,
        }
        timeout = httpx.Timeout(min(left_s, 86_400.0), connect=min(left_s, CONNECT_S))
        try:
            reply = self._http.post(PATH, json=body, timeout=timeout)
        except httpx.TimeoutException as error:
            raise OutOfTime from error
        except httpx.TransportError as error:
            raise Broken(f"the server did not answer: {error!r}") from error
        if reply.is_error:
            raise Broken(f"the server refused a request: {reply.status_code} {reply.text[:500]}")
        answer = reply.json()
        choice = answer["choices"][0]
        usage = answer.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        return ChatAnswer(
            message=_without_empty(choice["message"]),
            finish_reason=choice.get("finish_reason") or "",
            n_prompt=usage.get("prompt_tokens") or 0,
            n_generated=usage.get("completion_tokens") or 0,
            n_cached=details.get("cached_tokens") or 0,
            seconds=time.monotonic() - began,
            has_loop=bool(usage.get("loops")),
        )


def _without_empty(message: dict[str, Any]) -> dict[str, Any]:
    """Message as it is sent again: role, text and calls."""
    answer = {"role": "assistant", "content": message.get("content") or ""}
    if message.get("tool_calls"):
        answer["tool_calls"] = message["tool_calls"]
    return answer


def first_model(url: str) -> str:
    """First model of a server. Raises Broken if it does not answer."""
    try:
        reply = httpx.get(f"{url.rstrip('/')}{MODELS}", timeout=CONNECT_S, trust_env=False)
        return str(reply.raise_for_status().json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise Broken(f"no server with a model answers at {url}: {error}") from error
