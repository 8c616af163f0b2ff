"""A real engine on a tiny model, driven and listened to by a test."""

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from random import Random
from typing import Any

import mlx.core as mx
import msgspec
from msgspec.structs import replace

from mlxstack.core.engine_events import (
    Event,
    RequestFailed,
    RequestFinished,
    SlotAssigned,
    TokenSampled,
)
from mlxstack.core.interfaces import CheckStore, EngineStores
from mlxstack.core.preset import DeviceSpec, ModelSpec, Preset, SlotSpec, Speculation
from mlxstack.core.prompt_tokens import ImageSpan, PromptTokens, check_images
from mlxstack.core.request import Request
from mlxstack.engine.chat_engine import ChatEngine
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.features.drafts.engine.draft_coordinator import DraftCoordinator
from mlxstack.features.ranks.group import RankGroup
from mlxstack.features.ranks.parts import RankedParts
from mlxstack.policy.pass_layout import UNMEASURED, WidthCosts
from mlxstack.service.parts.agent_store import AgentStore
from mlxstack.store import slot_folder_registry
from mlxstack.store.agent_history import AgentFolders
from mlxstack.store.disk_quota import QuotaKVStore
from mlxstack.store.files import Disk
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.slot_files import SlotFileFolder
from tests.callers import with_caller
from tests.models import VOCAB
from tests.patience import PATIENCE_S, wait_until

WAIT_S = PATIENCE_S


def array_bytes() -> int:
    """Bytes of all arrays, without garbage that could be freed at any moment."""
    gc.collect()
    return int(mx.get_active_memory())


class Listener:
    """Collects the events of every ask, and waits for them."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = {}
        self.log: list[Event] = []
        self.why_lost: Callable[[], str] = str
        """Why no more events can come; empty while they can."""
        self._queue: SimpleQueue[Event] = SimpleQueue()

    def deliver(self, events: tuple[Event, ...]) -> None:
        for event in events:
            self._queue.put(event)

    def wait(self, condition: Any) -> None:
        """Take events in until `condition()` is true."""
        end = time.monotonic() + WAIT_S
        while not condition():
            is_late = time.monotonic() > end
            is_lost = bool(why := self.why_lost())
            try:
                event = self._queue.get(timeout=0.01 if is_late or is_lost else 1.0)
            except Empty:
                if is_late or is_lost:
                    raise AssertionError(f"nothing came; {why} so far {self.events}") from None
                continue
            self.events.setdefault(event.request, []).append(event)
            self.log.append(event)


class Driver:
    """Short words for long scenes."""

    def __init__(self, engine: ChatEngine, listener: Listener) -> None:
        self.engine = engine
        self.listener = listener
        self._ids = (f"ask-{n}" for n in itertools.count())
        self._n_submitted = 0

    def submit(
        self,
        tokens: tuple[int, ...],
        n: int = 16,
        *,
        images: tuple[ImageSpan, ...] = (),
        checkpoint_positions: tuple[int, ...] = (),
        **more: Any,
    ) -> str:
        # The service names a request after its agent, too.
        more = {"display_name": more.get("agent"), "arrived": time.monotonic(), **more}
        prompt = PromptTokens(tokens, images, checkpoint_positions)
        ask = Request(next(self._ids), prompt, n, **with_caller(more))
        self.engine.submit(ask)
        self._n_submitted += 1
        return ask.id

    def until_accepted(self) -> None:
        """Wait until all that was submitted has a slot or is in the queue."""
        wait_until(lambda: self.engine.snapshot().counters.n_requests >= self._n_submitted)

    def expect(
        self,
        tokens: tuple[int, ...],
        after: str,
        slot: int = 0,
        images: tuple[ImageSpan, ...] = (),
        **more: Any,
    ) -> None:
        """Begin the next turn after an ask early."""
        prompt = PromptTokens(tokens, images)
        fields = {"slot": slot, "arrived": time.monotonic(), **more}
        ask = Request(f"{after}-early", prompt, 0, **with_caller(fields))
        self.engine.begin_early(ask, after)

    @property
    def n_early(self) -> tuple[int, int, int]:
        """Tokens that were begun early, used and wasted."""
        now = self.engine.snapshot().counters
        return now.n_early_tokens, now.n_early_used, now.n_early_wasted

    def events(self, ask: str, kind: Any) -> list[Any]:
        return [e for e in self.listener.events.get(ask, []) if isinstance(e, kind)]

    def until(self, ask: str, kind: Any, n: int = 1) -> Any:
        """Wait for the n-th event of this kind, and return it."""
        self.listener.wait(lambda: len(self.events(ask, kind)) >= n)
        return self.events(ask, kind)[n - 1]

    def finish(self, ask: str) -> RequestFinished:
        """Wait for the end; a failure is raised."""
        end = self.until(ask, (RequestFinished, RequestFailed))
        if isinstance(end, RequestFailed):
            raise end.error
        return end

    def tokens(self, ask: str) -> list[int]:
        return [e.token for e in self.events(ask, TokenSampled)]

    def answer(self, tokens: tuple[int, ...], n: int = 16, **more: Any) -> list[int]:
        """Submit, wait, and return what was generated."""
        ask = self.submit(tokens, n, **more)
        self.finish(ask)
        return self.tokens(ask)

    def cold(self, tokens: tuple[int, ...], n: int = 16, **more: Any) -> list[int]:
        """The same, computed from nothing."""
        return self.answer(tokens, n, use_cache=False, **more)

    def seated(self, ask: str) -> SlotAssigned:
        return self.until(ask, SlotAssigned)

    def catch_up(self) -> None:
        """Wait until all that the answers left is packed and on disk; nobody may be speaking."""
        wait_until(
            lambda: self.engine.trouble or not is_busy(self.engine),
            "the engine does not come to rest",
        )
        assert not self.engine.trouble, self.engine.trouble
        # Between two steps, which submit writes as well.
        disk_tier = self.engine.loaded.disk_tier
        self.engine.run(lambda _: disk_tier.catch_up()).result(timeout=WAIT_S)

    def context(self, slot: int) -> tuple[int, ...]:
        return tuple(self.engine.loaded.loop.slots[slot].tokens)


def is_busy(engine: ChatEngine) -> bool:
    """Whether what was posted before this call is still being worked on."""
    return engine.run(lambda loop: loop.is_busy).result(timeout=WAIT_S)


def draft_freely(driver: Driver) -> None:
    """Let rows be drafted for whatever passes of the target and of the draft model cost."""
    drafts = driver.engine.loaded.loop.batch.proposer
    assert isinstance(drafts, DraftCoordinator)
    drafts.costs = UNMEASURED
    if drafts.model is not None:
        free = WidthCosts((1,), (1e-30,))
        drafts.model.record = replace(drafts.model.record, costs=free, credit=1e9)


def preset_of(model: Path, **more: Any) -> Preset:
    """Three slots of 1,024 tokens, no drafts, no keep-warm passes; `more` replaces sections."""
    preset = Preset(
        model=ModelSpec(id=str(model)),
        slots=SlotSpec(count=3, n_ctx=1024),
        speculation=Speculation.OFF,
        device=DeviceSpec(keep_warm_s=0),
    )
    return msgspec.structs.replace(preset, **more)


@contextmanager
def running(
    preset: Preset,
    home: Path,
    memory_bytes: int | None = None,
    disk: Disk | None = None,
    ranks: RankGroup | None = None,
    checks: CheckStore | None = None,
) -> Iterator[Driver]:
    """A started engine over stores in `home`; stopped at the end."""
    listener = Listener()
    shelf = SlotFileFolder(home / "slots", disk)
    slot_folder_registry.note(home / "kv", shelf.directory, disk)
    agents = AgentFolders(home / "agents", disk)
    vault = QuotaKVStore(DiskKVStore(home / "kv", disk), agents, preset.prefix_cache.disk)
    library = AgentStore(agents)
    library.serve("tiny", is_writing=True)
    engine = ChatEngine(
        preset,
        EngineStores(vault, shelf, library, checks),
        listener.deliver,
        parts=RankedParts(ranks) if ranks is not None else None,
        memory_bytes=memory_bytes,
    )
    listener.why_lost = lambda: engine.trouble
    contexts: Sequence[SlotContext] = ()
    try:
        engine.start().result(timeout=WAIT_S)
        contexts = engine.loaded.loop.slots
        yield Driver(engine, listener)
    finally:
        # Its thread restores MLX's limits, also after a load that failed.
        engine.stop(drain_s=1).result(timeout=WAIT_S)
    for context in contexts:
        check_context(context)


def check_context(context: SlotContext) -> None:
    """Every layer that counts its tokens has as many as the context, which knows its images."""
    check_images(context.tokens, context.images)
    offsets = {int(leaf.offset) for leaf in context.leaves if hasattr(leaf, "offset")}
    assert offsets <= {len(context)}, f"KV of {offsets} tokens, but {len(context)} are known"


def prompt(n: int, seed: int = 0) -> tuple[int, ...]:
    """`n` random tokens."""
    random = Random(seed)
    return tuple(random.randrange(VOCAB) for _ in range(n))
