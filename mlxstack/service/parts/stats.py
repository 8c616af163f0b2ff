"""Counters of a service, and rates computed from them."""

import time
from collections import deque

from msgspec.structs import replace

from mlxstack.core.commands import SlotCommandResult, SlotRestoreResult, SlotSaveResult
from mlxstack.core.engine_snapshot import Counters, RequestPhase, Snapshot
from mlxstack.core.status import ThroughputSample

START = Counters()
BUSY = frozenset({RequestPhase.PREFILLING, RequestPhase.RUNNING})
MAX_SAMPLES = 301
"""Five minutes, at one per second."""


class ServiceStats:
    """Counters that outlive the engines of a service; the service owns them."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self._started = time.monotonic()
        self.n_saved_bytes = 0
        """Newly written by saving slots."""
        self.n_restored_bytes = 0
        """Read by restoring slots."""
        self.n_cache_changes = 0
        """Changes of the prefix cache by hand."""
        self.n_unparsed_calls = 0
        """Tool calls that could not be parsed and were returned as text."""
        self.bytes_before_load = 0
        """Bytes that MLX held when the model was loaded."""
        self.load_began_at = time.monotonic()
        self.samples: deque[ThroughputSample] = deque(maxlen=MAX_SAMPLES)
        self._past = Counters()

    def add_engine(self, last: Counters) -> None:
        """Keep the counters of an ended engine."""
        self._past = self._past.plus(last)

    @property
    def uptime_s(self) -> float:
        """Seconds since the start, by the monotonic clock."""
        return time.monotonic() - self._started

    def total(self, now: Snapshot) -> Snapshot:
        """The snapshot, with the counters of the engines before."""
        return replace(now, counters=self._past.plus(now.counters))

    def note_slot_io(self, done: SlotCommandResult) -> None:
        """Count the bytes of a save or a restore."""
        if isinstance(done, SlotSaveResult):
            self.n_saved_bytes += done.n_written
        elif isinstance(done, SlotRestoreResult):
            self.n_restored_bytes += done.n_read

    def sample(self, now: Counters) -> None:
        """Add a sample of the throughput, for dashboards that connect later."""
        self.samples.append(
            ThroughputSample(
                time.time(), now.n_prompt_tokens, now.n_generated_tokens, now.n_cached_tokens
            )
        )


def n_processing(snapshot: Snapshot) -> int:
    """Number of slots with a request under way."""
    return sum(view.state in BUSY for view in snapshot.slots)


def prefill_speed(now: Counters, before: Counters = START) -> float:
    """Tokens per second of prefill between two samples; 0 without one."""
    seconds = now.prompt_s - before.prompt_s
    tokens = now.n_prompt_tokens - before.n_prompt_tokens
    if seconds <= 0:
        return 0.0
    return tokens / seconds


def decode_speed(now: Counters, before: Counters = START) -> float:
    """Tokens per second of decoding between two samples; 0 without it."""
    seconds = now.decode_s - before.decode_s
    tokens = now.n_generated_tokens - before.n_generated_tokens
    return tokens / seconds if seconds > 0 else 0.0
