"""Conversation of `chat`: the messages, and one streamed answer per turn."""

import asyncio
import signal
import time
from collections.abc import Callable
from typing import Any, Self

from msgspec import Struct

from mlxstack.cli.target import ServiceTarget
from mlxstack.client import CallUsage, ChatResponse, Client
from mlxstack.core.errors import NotFound
from mlxstack.core.formatting import printable_lines

Say = Callable[[str], None]


class ChatTurn(Struct, frozen=True):
    """Cost of an answer: tokens, seconds to first token, generation rate."""

    usage: CallUsage
    ttft_s: float
    tps: float
    is_stopped: bool = False

    @property
    def summary(self) -> str:
        """One line of reused and new prompt tokens, and generation rate."""
        if self.is_stopped:
            return "[stopped]"
        usage, cached = self.usage, self.usage.cached_tokens
        new, made = usage.prompt_tokens - cached, usage.completion_tokens
        rate = f", {self.tps:.1f} tok/s" if self.tps else ""
        return (
            f"[prompt: {cached} tokens reused, {new} new; first token after {self.ttft_s:.2f} s; "
            f"{made} tokens generated{rate}]"
        )


class ChatSession:
    """One conversation with one service. Raises what `Client` raises."""

    def __init__(self, where: ServiceTarget, agent: str | None, system: str | None) -> None:
        self._client = Client(where.url, where.api_key, member=where.member)
        self._agent = agent
        self._system = system
        self._messages: list[dict[str, Any]] = []
        self.title = where.url

    async def __aenter__(self) -> Self:
        props = await self._client.props()
        self.title = f"{props.model_alias or props.model_path} at {self._client.url}"
        if self._agent is not None:
            await self.continue_agent(self._agent)
        else:
            self.start_over()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__(None, None, None)

    def start_over(self, system: str | None = None) -> None:
        """Forget the messages and the agent."""
        self._system, self._agent = system or self._system, None
        self._messages = [{"role": "system", "content": self._system}] if self._system else []

    async def continue_agent(self, agent: str) -> str:
        """Load an agent's messages; returns a sentence with their count."""
        from mlxstack.cli.commands.slots import path_of

        path = path_of("v1", "agents", agent, "history")
        try:
            history = await self._client.get(path, dict[str, Any])
        except NotFound:
            self.start_over()
            self._agent = agent
            return f"new agent {agent}"
        self._agent, self._messages = agent, list(history["messages"])
        return f"{agent} continues after {len(self._messages)} messages"

    async def answer(self, text: str, say: Say) -> ChatTurn:
        """Stream the answer into `say`; Ctrl-C ends it, and keeps what came."""
        messages = [*self._messages, {"role": "user", "content": text}]
        received: list[str] = []

        def receive(piece: str) -> None:
            received.append(piece)
            say(printable_lines(piece))

        task = asyncio.ensure_future(self._stream(messages, receive, say))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, task.cancel)
        try:
            turn = await task
        except asyncio.CancelledError:
            turn = ChatTurn(CallUsage(), 0.0, 0.0, is_stopped=True)
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        if received:
            answer = {"role": "assistant", "content": "".join(received)}
            self._messages = [*messages, answer]
        return turn

    async def _stream(self, messages: list[dict[str, Any]], receive: Say, say: Say) -> ChatTurn:
        began = time.monotonic()
        first = tps = 0.0
        usage, is_thinking = CallUsage(), False
        more = {"agent": self._agent} if self._agent else {}
        async for chunk in self._client.chat_stream(messages, **more):
            usage = chunk.usage or usage
            tps = (chunk.timings or {}).get("predicted_per_second", tps)
            thought, content = _pieces(chunk)
            if not (thought or content):
                continue
            first = first or time.monotonic()
            if thought:
                say("" if is_thinking else "<think>\n")
                say(printable_lines(thought))
            elif is_thinking:
                say("\n</think>\n")
            is_thinking = bool(thought)
            if content:
                receive(content)
        if is_thinking:
            say("\n</think>\n")
        return ChatTurn(usage, max(0.0, first - began), tps)


def _pieces(chunk: ChatResponse) -> tuple[str, str]:
    """Reasoning and content of one chunk."""
    deltas = [choice.delta for choice in chunk.choices]
    thought = "".join(delta.reasoning_content or "" for delta in deltas)
    return thought, "".join(delta.content or "" for delta in deltas)
