"""The next turns of agents, begun in the pauses after their answers."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlxstack.core.errors import StackError
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.preset import Anticipation, Preset
from mlxstack.core.request import Request
from mlxstack.host.spare_power import has_spare_power
from mlxstack.service.parts.service_feature import CompleteAnswer, ServiceFeature

if TYPE_CHECKING:
    from mlxstack.engine.chat_engine import ChatEngine

log = logging.getLogger(__name__)

PAUSE_S = 0.5
"""Delay of an early turn in seconds; most tools return sooner."""


class EarlyTurns(ServiceFeature):
    """Begins next turns early.

    `may_begin` is called in a thread: whether this computer can do work that nothing waits for.
    """

    def __init__(self, may_begin: Callable[[], bool] = has_spare_power) -> None:
        self.may_begin = may_begin
        self.pauses: dict[str, asyncio.Task[None]] = {}
        """Pauses that have not ended, by agent."""
        self._is_on = False

    async def after_load(self, preset: Preset, engine: "ChatEngine", facts: ModelFacts) -> None:
        spec = preset.prefix_cache
        self._is_on = spec.enabled and spec.anticipate is Anticipation.AUTO

    def on_request(self, request: Request) -> None:
        """End the pause of an agent: its next request has come."""
        task = self.pauses.pop(request.display_name or "", None)
        if task is not None:
            task.cancel()

    def on_answer(self, answer: CompleteAnswer) -> None:
        """Begin the next turn, unless it comes first."""
        name = answer.request.display_name
        if not self._is_on or name is None or not answer.request.use_cache:
            return
        self.on_request(answer.request)
        task = self.pauses[name] = asyncio.create_task(self._begin(answer))
        task.add_done_callback(lambda ended: self._forget(name, ended))

    def before_unload(self) -> None:
        for task in self.pauses.values():
            task.cancel()

    async def _begin(self, answer: CompleteAnswer) -> None:
        await asyncio.sleep(PAUSE_S)
        if not await asyncio.to_thread(self.may_begin):
            return
        try:
            await begin_next_turn(answer)
        except StackError as error:
            log.debug("the next turn of %s is not expected: %s", answer.request.id, error)

    def _forget(self, name: str, ended: "asyncio.Task[None]") -> None:
        if self.pauses.get(name) is ended:
            del self.pauses[name]
        if not ended.cancelled() and (error := ended.exception()) is not None:
            log.error("early prefill failed", exc_info=error)


async def begin_next_turn(answer: CompleteAnswer) -> None:
    """Render and compute the expected next prompt.

    Raises as `TextProcessor.expected` does.
    """
    request = answer.request
    scope = (request.salt, request.display_name or "")
    prompt = await answer.text_processor.expected(answer.conversation, answer.message, scope)
    expected = Request(
        id=f"{request.id}-early",
        prompt=prompt,
        max_tokens=0,
        slot=answer.slot,
        caller=request.caller,
        display_name=request.display_name,
        arrived=time.monotonic(),
    )
    answer.engine.begin_early(expected, request.id)
