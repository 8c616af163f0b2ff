"""Numbers about the service, taken from the engine's latest snapshot."""

from msgspec import Struct

from mlxstack.core.engine_snapshot import Counters, RequestPhase, SlotView, Snapshot
from mlxstack.core.request import Request
from mlxstack.service.response_parts import GenerationStarted, ResponsePart
from mlxstack.service.service import Service

START = Counters()
BUSY = frozenset({RequestPhase.PREFILLING, RequestPhase.RUNNING})


class SlotStatus(Struct, frozen=True):
    """A slot as the engine sees it, and the last ask that sat in it."""

    view: SlotView
    last: Request | None

    @property
    def is_processing(self) -> bool:
        """Whether somebody is being served in it."""
        return self.view.state in BUSY


def slots(service: Service) -> tuple[SlotStatus, ...]:
    """All slots, in the order of their ids."""
    views = service.engine.snapshot().slots
    return tuple(SlotStatus(view, service.last_in_slot.get(view.id)) for view in views)


def n_processing(snapshot: Snapshot) -> int:
    """How many slots serve somebody."""
    return sum(view.state in BUSY for view in snapshot.slots)


def prompt_rate(now: Counters, before: Counters = START) -> float:
    """Prompt tokens computed per second of prefill between two moments; 0 if there was none."""
    seconds = now.prompt_s - before.prompt_s
    tokens = now.n_prompt_tokens - before.n_prompt_tokens
    return tokens / seconds if seconds > 0 else 0.0


def decode_rate(now: Counters, before: Counters = START) -> float:
    """Tokens generated per second of decoding between two moments; 0 if there was none."""
    seconds = now.decode_s - before.decode_s
    tokens = now.n_generated_tokens - before.n_generated_tokens
    return tokens / seconds if seconds > 0 else 0.0


def saved_s(snapshot: Snapshot, part: ResponsePart) -> float:
    """Seconds of prefill that the reused tokens would have cost at the speed so far."""
    rate = prompt_rate(snapshot.counters)
    return part.n_cached / rate if isinstance(part, GenerationStarted) and rate > 0 else 0.0
