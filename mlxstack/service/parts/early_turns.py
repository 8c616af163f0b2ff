"""The next turns of agents, begun in the pauses after their answers."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from mlxstack.core.conversation import Conversation, Message
from mlxstack.core.errors import StackError
from mlxstack.core.request import Request
from mlxstack.host.spare_power import has_spare_power

if TYPE_CHECKING:
    from mlxstack.engine.chat_engine import ChatEngine
    from mlxstack.service.parts.text_processor import TextProcessor

log = logging.getLogger(__name__)

PAUSE_S = 0.5
"""Delay of an early turn in seconds; most tools return sooner."""


class Pause(Struct, frozen=True):
    """Pause after the complete answer to a request served in `slot`."""

    engine: "ChatEngine"
    text_processor: "TextProcessor"
    request: Request
    conversation: Conversation
    answer: Message
    slot: int

    async def begin(self) -> None:
        """Render and compute the expected next prompt. Raises as `make` does."""
        last = self.request
        scope = (last.salt, last.display_name or "")
        prompt = await self.text_processor.expected(self.conversation, self.answer, scope)
        expected = Request(
            id=f"{last.id}-early",
            prompt=prompt,
            max_tokens=0,
            slot=self.slot,
            caller=last.caller,
            display_name=last.display_name,
            arrived=time.monotonic(),
        )
        self.engine.begin_early(expected, last.id)


class EarlyTurns:
    """Begins next turns early. It belongs to the event loop.

    `may_begin` is called in a thread: whether this computer can do work that nothing waits for.
    """

    def __init__(self, may_begin: Callable[[], bool] = has_spare_power) -> None:
        self.may_begin = may_begin
        self.pauses: dict[str, asyncio.Task[None]] = {}
        """Pauses that have not ended, by agent."""

    def note_request(self, request: Request) -> None:
        """End the pause of an agent: its next request has come."""
        task = self.pauses.pop(request.display_name or "", None)
        if task is not None:
            task.cancel()

    def note_answer(self, pause: Pause) -> None:
        """Begin the next turn, unless it comes first."""
        name = pause.request.display_name
        if name is None or not pause.request.use_cache:
            return
        self.note_request(pause.request)
        task = self.pauses[name] = asyncio.create_task(self._begin(pause))
        task.add_done_callback(lambda done: self._forget(name, done))

    def stop(self) -> None:
        """Begin nothing of what was noted."""
        for task in self.pauses.values():
            task.cancel()

    async def _begin(self, pause: Pause) -> None:
        await asyncio.sleep(PAUSE_S)
        if not await asyncio.to_thread(self.may_begin):
            return
        try:
            await pause.begin()
        except StackError as error:
            log.debug("the next turn of %s is not expected: %s", pause.request.id, error)

    def _forget(self, name: str, done: "asyncio.Task[None]") -> None:
        if self.pauses.get(name) is done:
            del self.pauses[name]
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("a next turn could not be begun early", exc_info=error)
