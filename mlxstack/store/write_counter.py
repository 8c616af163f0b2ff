"""Write counter: bytes written by day, and the daily limit of KV.

Bytes are counted before they are written, in one transaction for all processes of a home: a crash
or a refused write makes the count too high, never too low.
"""

import logging
import sqlite3
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path

from mlxstack.core.errors import DiskFull, StackError
from mlxstack.core.formatting import size
from mlxstack.core.status import DayWrites
from mlxstack.store.database import Database
from mlxstack.store.files import Disk

log = logging.getLogger(__name__)

MAX_DAYS = 400
"""Days that are kept."""
DAY = "%Y-%m-%d"
SCHEMA = """
CREATE TABLE IF NOT EXISTS writes (
  day TEXT NOT NULL, kind TEXT NOT NULL, n_bytes INTEGER NOT NULL, PRIMARY KEY (day, kind)
) WITHOUT ROWID;
"""
ADD = """
INSERT INTO writes SELECT :day, :kind, :n_bytes WHERE :bound IS NULL OR :n_bytes <= :bound
ON CONFLICT (day, kind) DO UPDATE SET n_bytes = n_bytes + :n_bytes
WHERE :bound IS NULL OR n_bytes + :n_bytes <= :bound
"""
SUMS = """
SELECT day, SUM(n_bytes * (kind = 'kv')), SUM(n_bytes) FROM writes
WHERE day >= ? GROUP BY day ORDER BY day DESC LIMIT ?
"""


class WriteKind(StrEnum):
    """KV files and slot files, which are limited, or folders of agents."""

    KV = "kv"
    AGENTS = "agents"


class WriteCounter:
    """Counter of one home; `clock` returns Unix seconds. Callable from any thread."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.max_bytes: int | None = None
        """Bytes of KV a local day: that of the served preset. None for no limit."""
        self._database = Database(path, SCHEMA)
        self._clock = clock
        self._refused_on = ""
        self._day = ""
        self._is_failing = False

    def admit(self, kind: WriteKind, n_bytes: int) -> None:
        """Count bytes that are about to be written.

        Raises DiskFull beyond the limit, StackError where KV has one and cannot be counted.
        """
        bound = self.max_bytes if kind is WriteKind.KV else None
        day = self._today()
        fields = {"day": day, "kind": kind.value, "n_bytes": n_bytes, "bound": bound}
        try:
            is_counted = self._database.run(lambda c: self._add(c, fields))
        except StackError as error:
            if bound is not None:
                raise
            if not self._is_failing:
                log.warning("bytes written to disk are not counted: %s", error)
            self._is_failing = True
            return
        self._is_failing = False
        if not is_counted:
            raise self._exhausted(day)

    def check(self, n_bytes: int) -> None:
        """Raises DiskFull when today's limit is too low for so many bytes."""
        if self.max_bytes is None:
            return
        today = self.today()
        if today.kv_bytes + n_bytes > self.max_bytes:
            raise self._exhausted(today.day)

    def today(self) -> DayWrites:
        """Bytes written today. Raises StackError."""
        day = self._today()
        return next((sums for sums in self._sums(day, MAX_DAYS) if sums.day == day), DayWrites(day))

    def days(self, limit: int = MAX_DAYS) -> tuple[DayWrites, ...]:
        """Bytes of the last days with writes, the latest first. Raises StackError."""
        return self._sums("", limit)

    @property
    def trouble(self) -> str:
        """Effect of the limit; empty unless KV was refused today."""
        if self._refused_on != self._today() or self.max_bytes is None:
            return ""
        return (
            f"prefix_cache.disk.daily_write_bytes ({size(self.max_bytes)}) is used up: until "
            "midnight new KV stays in memory, is lost when it is evicted from there or the "
            "service ends, and is then computed again"
        )

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _today(self) -> str:
        return time.strftime(DAY, time.localtime(self._clock()))

    def _sums(self, since: str, limit: int) -> tuple[DayWrites, ...]:
        rows = self._database.read(lambda c: c.execute(SUMS, (since, limit)).fetchall())
        return tuple(DayWrites(*row) for row in rows)

    def _add(self, connection: sqlite3.Connection, fields: Mapping[str, object]) -> bool:
        if self._day != fields["day"]:
            oldest = time.strftime(DAY, time.localtime(self._clock() - MAX_DAYS * 86_400))
            connection.execute("DELETE FROM writes WHERE day < ?", (oldest,))
            self._day = str(fields["day"])
        return connection.execute(ADD, fields).rowcount == 1

    def _exhausted(self, day: str) -> DiskFull:
        self._refused_on = day
        return DiskFull(f"not saved: {self.trouble}; raise it in the preset to save more today")


class CountedDisk(Disk):
    """Disk that counts what is written in a counter, as one kind."""

    def __init__(self, counter: WriteCounter, kind: WriteKind) -> None:
        self._counter = counter
        self._kind = kind

    def admit(self, n_bytes: int) -> None:
        """Count a file. Raises as `WriteCounter.admit`."""
        self._counter.admit(self._kind, n_bytes)

    def check_limit(self, n_bytes: int) -> None:
        """Raises as `WriteCounter.check`."""
        if self._kind is WriteKind.KV:
            self._counter.check(n_bytes)
