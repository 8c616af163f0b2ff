"""Heads of clients, kept and computed before their first message."""

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from itertools import takewhile
from math import inf

from msgspec.structs import replace

from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.core.engine_events import FinishReason, RequestFinished, SlotAssigned
from mlxstack.core.errors import StackError
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.preset import Anticipation, Preset
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Caller, Priority, Request, TurnKind
from mlxstack.core.status import HeadView, StatusFrame
from mlxstack.features.heads.policy import (
    PRODUCTS,
    Head,
    HeadKey,
    OtherWork,
    last_head,
    may_compute,
)
from mlxstack.features.heads.store import HeadStore
from mlxstack.host.memory_pressure import PressureLevel, pressure_level
from mlxstack.service.parts.agent_registry import client_of, leading_reminders, work_folder
from mlxstack.service.parts.request_stream import RequestStream
from mlxstack.service.parts.service_feature import CompleteAnswer, ServiceFeature
from mlxstack.service.parts.stats import n_processing
from mlxstack.service.parts.text_processor import TextProcessor
from mlxstack.service.service import Service

log = logging.getLogger(__name__)

PAUSE_S = 0.5
"""Pause between two looks whether the service is idle."""
PATIENCE_S = 600.0
AGAIN_S = 600.0
"""Seconds in which a client that looks again gets no second start."""
RENEWED_S = 3600.0
"""Seconds after which the use of an unchanged head is written again."""
MAX_VIEWS = 4
PROBES = ("x", "y")
"""Two questions: what their prompts share is known before a person types."""


class ClientHeads(ServiceFeature):
    """Keeps the last head of each client, for its next start."""

    def __init__(self, store: HeadStore) -> None:
        self.service: Service | None = None
        """Set by the assembly."""
        self._store = store
        self._is_on = False
        self._task: asyncio.Task[None] | None = None
        self._key: HeadKey | None = None
        """Head that the task computes."""
        self._begun_at: dict[HeadKey, float] = {}
        """Monotonic seconds of the last start, by head."""
        self._stream: RequestStream | None = None
        """The request that computes a head now."""
        self._views: dict[HeadKey, HeadView] = {}
        self._saves: set[asyncio.Task[None]] = set()

    @property
    def views(self) -> tuple[HeadView, ...]:
        """Heads of clients that started since the model was loaded."""
        return tuple(self._views.values())

    async def after_load(self, preset: Preset, engine: object, facts: ModelFacts) -> None:
        spec = preset.prefix_cache
        self._is_on = spec.enabled and spec.anticipate is Anticipation.AUTO and not preset.hosts
        self._views.clear()
        self._begun_at.clear()
        if self._is_on:
            await asyncio.to_thread(self._store.load)

    def on_request(self, request: Request) -> None:
        """Give way to a request; what was computed stays."""
        if self._stream is not None and request.id != self._stream.request.id:
            self._stream.cancel()

    def on_connection(self, caller: Caller) -> None:
        """Compute the head of a client that looks at the service."""
        client = PRODUCTS.get(caller.client)
        if client is not None:
            self.begin(HeadKey(client, caller.version, salt=caller.salt), AGAIN_S)

    def on_answer(self, answer: CompleteAnswer) -> None:
        """Keep the head of a client's conversation."""
        head = head_of(answer)
        if not self._is_on or head is None:
            return
        earlier = self._store.by_key.get(head.key)
        is_same = earlier is not None and earlier.conversation == head.conversation
        if is_same and earlier is not None and head.used_at < earlier.used_at + RENEWED_S:
            return
        # One at a time: the store has one thread.
        task = asyncio.create_task(self._save(head, tuple(self._saves)))
        self._saves.add(task)
        task.add_done_callback(self._saves.discard)

    def begin(self, key: HeadKey, again_s: float = 0.0) -> bool:
        """Compute a client's last head in the background; False without one.

        One that began less than `again_s` seconds ago is not computed again.
        """
        head = last_head(tuple(self._store.by_key.values()), key)
        if not self._is_on or head is None or self.service is None:
            return False
        is_running = self._task is not None and not self._task.done() and self._key == head.key
        now = time.monotonic()
        if is_running or now < self._begun_at.get(head.key, -inf) + again_s:
            return True
        self.before_unload()
        self._key = head.key
        self._begun_at[head.key] = now
        self._task = asyncio.create_task(self._compute(self.service, head))
        return True

    def before_unload(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            if self._key is not None:
                self._views.pop(self._key, None)

    async def close(self) -> None:
        await asyncio.gather(*self._saves, return_exceptions=True)

    def with_status(self, frame: StatusFrame) -> StatusFrame:
        return replace(frame, client_heads=self.views)

    async def _save(self, head: Head, before: tuple["asyncio.Task[None]", ...]) -> None:
        await asyncio.gather(*before, return_exceptions=True)
        await asyncio.to_thread(self._store.save, head)

    async def _compute(self, service: Service, head: Head) -> None:
        """Compute a head while the service is idle, at once or in parts."""
        key = head.key
        self._views.pop(key, None)
        view = HeadView(key.client, key.version, key.folder)
        self._show(key, view)
        try:
            text_processor = service.text_processor
            prompt = await prompt_of(text_processor, head.conversation)
            view = replace(view, n_tokens=len(prompt.tokens))
            began = time.monotonic()
            assigned = await self._run(service, text_processor, prompt, key)
            while assigned is None:
                await asyncio.sleep(PAUSE_S)
                assigned = await self._run(service, text_processor, prompt, key)
        except StackError as error:
            log.info("the head of %s was not computed: %s", key.client, error)
            self._show(key, replace(view, state="failed"))
            return
        seconds = time.monotonic() - began
        self._show(key, replace(view, state="ready", n_cached=assigned.n_cached, seconds=seconds))

    async def _run(
        self, service: Service, text_processor: TextProcessor, prompt: PromptTokens, key: HeadKey
    ) -> SlotAssigned | None:
        """Compute what is missing; None if others use the service. Raises StackError."""
        snapshot = service.snapshot()
        is_calm = await asyncio.to_thread(pressure_level) is PressureLevel.CALM
        if not may_compute(OtherWork(n_processing(snapshot), len(snapshot.waiting), is_calm)):
            return None
        request = Request(
            id=f"head-{uuid.uuid4().hex}",
            prompt=prompt,
            max_tokens=1,
            caller=Caller(salt=key.salt, priority=Priority.LOW),
            arrived=time.monotonic(),
            is_background=True,
        )
        assigned = None
        with service.open(request, text_processor) as stream:
            self._stream = stream
            try:
                while not isinstance(event := await stream.next(PATIENCE_S), RequestFinished):
                    if isinstance(event, SlotAssigned):
                        assigned = event
            finally:
                self._stream = None
        if event.reason is FinishReason.CANCELLED:
            return None
        return assigned

    def _show(self, key: HeadKey, view: HeadView) -> None:
        self._views[key] = view
        while len(self._views) > MAX_VIEWS:
            del self._views[next(iter(self._views))]


def head_of(answer: CompleteAnswer) -> Head | None:
    """Head of a known client's conversation; None for titles, sub-agents and others."""
    caller = answer.request.caller
    conversation = answer.conversation
    client = client_of(conversation, caller.session_hint)
    is_part = caller.turn_kind in (TurnKind.SUBAGENT, TurnKind.HELPER)
    if not client or not conversation.tools or is_part or caller.agent is not None:
        return None
    head = replace(
        conversation, messages=head_messages(conversation.messages), continue_final=False
    )
    if not head.messages:
        return None
    key = HeadKey(client, caller.version, work_folder(conversation), caller.salt)
    return Head(key, head, time.time())


def head_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Messages before the first word of a person.

    The last one may be the beginning of a user's message.
    """
    head: list[Message] = []
    for message in messages:
        if message.role is Role.SYSTEM:
            head.append(message)
            continue
        reminders = leading_reminders(message.text) if message.role is Role.USER else ""
        if reminders:
            head.append(Message(Role.USER, reminders))
        if not reminders or reminders != message.text:
            break
    return tuple(head)


async def prompt_of(text_processor: TextProcessor, head: Conversation) -> PromptTokens:
    """Tokens of a head, with its checkpoints.

    Raises BadRequest, or TooLong for one that fills a slot.
    """
    first, second = [await text_processor.prompt(_asked(head, text)) for text in PROBES]
    pairs = zip(first.tokens, second.tokens, strict=False)
    end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    positions = (*(p for p in first.checkpoint_positions if p < end), end)
    return PromptTokens(first.tokens[: end + 1], checkpoint_positions=positions)


def _asked(head: Conversation, text: str) -> Conversation:
    """A head with a question."""
    *messages, last = head.messages
    if last.role is Role.USER:
        return replace(head, messages=(*messages, replace(last, text=last.text + text)))
    return replace(head, messages=(*head.messages, Message(Role.USER, text)))
