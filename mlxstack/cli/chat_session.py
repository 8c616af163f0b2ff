"""Conversation of `chat`: the messages, and one streamed answer per turn."""

import asyncio
import signal
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol, Self

from msgspec import Struct

from mlxstack.cli.chat_images import ChatImage
from mlxstack.cli.target import ServiceTarget
from mlxstack.client.client import Client
from mlxstack.client.types import CallUsage, ChatResponse
from mlxstack.core.errors import NotFound, Unsupported


class AnswerSink(Protocol):
    """Receiver of a streamed answer."""

    def think(self, piece: str) -> None:
        """Take a piece of the reasoning."""

    def answer(self, piece: str) -> None:
        """Take a piece of the answer."""


class ChatTurn(Struct, frozen=True):
    """Cost of an answer: tokens, seconds to first token, generation rate."""

    usage: CallUsage
    ttft_s: float
    tps: float
    is_stopped: bool = False
    is_cut: bool = False
    """At `max_tokens`."""

    @property
    def summary(self) -> str:
        """One line of reused and new prompt tokens, and generation rate."""
        if self.is_stopped:
            return "[stopped]"
        usage = self.usage
        cached = self.usage.cached_tokens
        new = usage.prompt_tokens - cached
        generated = usage.completion_tokens
        rate = ""
        if self.tps:
            rate = f", {self.tps:.1f} tok/s"
        cut = ""
        if self.is_cut:
            cut = "; cut there, --max-tokens N allows more"
        ended = "".join(f"; ended repetition: {stop}" for stop in usage.loops)
        if any(not stop.is_thought for stop in usage.loops):
            ended += "; ask again, or take a larger model or one of more bits"
        return (
            f"[prompt: {cached} tokens reused, {new} new; first token after {self.ttft_s:.2f} s; "
            f"{generated} tokens generated{rate}{cut}{ended}]"
        )


class ChatSession:
    """One conversation with one service. Raises what `Client` raises."""

    def __init__(
        self, where: ServiceTarget, agent: str | None, system: str | None, max_tokens: int
    ) -> None:
        self._client = Client(where.url, where.api_key, member=where.member)
        self._agent = agent
        self._system = system
        self._max_tokens = max_tokens
        self._text = ""
        self._images: list[ChatImage] = []
        self.accepts_images = False
        self.is_base = False
        self._messages: list[dict[str, Any]] = []
        self.title = where.url

    async def __aenter__(self) -> Self:
        props = await self._client.props()
        self.title = f"{props.model_alias or props.model_path} at {self._client.url}"
        self.is_base = props.is_base_model
        self.accepts_images = props.modalities.get("vision", False) and not self.is_base
        if self.is_base:
            self.title += ", a base model: it continues your text"
            if self._agent or self._system:
                raise Unsupported("a base model has no agents and no system prompt")
        if self._agent is not None:
            await self.continue_agent(self._agent)
        else:
            self.start_over()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__(None, None, None)

    def start_over(self, system: str | None = None) -> None:
        """Forget the messages, the text, the images and the agent."""
        self._text = ""
        self._images = []
        self._system = system or self._system
        self._agent = None
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    async def continue_agent(self, agent: str) -> str:
        """Load an agent's messages; returns a sentence with their count."""
        from mlxstack.cli.service_request import path_of

        path = path_of("v1", "agents", agent, "history")
        try:
            history = await self._client.get(path, dict[str, Any])
        except NotFound:
            self.start_over()
            self._agent = agent
            return f"new agent {agent}"
        self._agent, self._messages = agent, list(history["messages"])
        return f"{agent} continues after {len(self._messages)} messages"

    def attach(self, image: ChatImage) -> None:
        """Send an image with the next prompt. Raises Unsupported."""
        if not self.accepts_images:
            raise Unsupported(
                f"{self.title} takes no images; `mlx-stack presets` lists models that do"
            )
        self._images.append(image)

    async def answer(self, text: str, sink: AnswerSink) -> ChatTurn:
        """Stream the answer into `sink`; Ctrl-C ends it, and keeps what came.

        A base model continues all text so far. Raises CancelledError when the task of the chat is
        cancelled.
        """
        parts = [image.part for image in self._images]
        self._images = []
        content: Any = text
        if parts:
            content = [*parts, {"type": "text", "text": text}]
        messages = [*self._messages, {"role": "user", "content": content}]
        prompt = f"{self._text}\n{text}" if self._text else text
        received: list[str] = []
        task = asyncio.ensure_future(self._stream(messages, prompt, received, sink))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            turn = await task
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is not None and own.cancelling():
                raise
            turn = ChatTurn(CallUsage(), 0.0, 0.0, is_stopped=True)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        if received:
            answer = {"role": "assistant", "content": "".join(received)}
            self._messages, self._text = [*messages, answer], prompt + "".join(received)
        return turn

    def _chunks(
        self, messages: list[dict[str, Any]], prompt: str
    ) -> AsyncGenerator[ChatResponse, None]:
        if self.is_base:
            return self._client.text_stream(prompt, max_tokens=self._max_tokens)
        more = {"agent": self._agent} if self._agent else {}
        return self._client.chat_stream(messages, max_tokens=self._max_tokens, **more)

    async def _stream(
        self, messages: list[dict[str, Any]], prompt: str, received: list[str], sink: AnswerSink
    ) -> ChatTurn:
        began = time.monotonic()
        first = tps = 0.0
        usage = CallUsage()
        is_cut = False
        async with aclosing(self._chunks(messages, prompt)) as chunks:
            async for chunk in chunks:
                usage = chunk.usage or usage
                tps = (chunk.timings or {}).get("predicted_per_second", tps)
                is_cut = is_cut or any(choice.finish_reason == "length" for choice in chunk.choices)
                thought, content = _pieces(chunk)
                if not (thought or content):
                    continue
                first = first or time.monotonic()
                if thought:
                    sink.think(thought)
                if content:
                    received.append(content)
                    sink.answer(content)
        return ChatTurn(usage, max(0.0, first - began), tps, is_cut=is_cut)


def _pieces(chunk: ChatResponse) -> tuple[str, str]:
    """Reasoning and content, or continued text, of one chunk."""
    deltas = [choice.delta for choice in chunk.choices]
    thought = "".join(delta.reasoning_content or "" for delta in deltas)
    content = "".join((choice.delta.content or "") + choice.text for choice in chunk.choices)
    return thought, content
