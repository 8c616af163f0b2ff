"""Usage store: sums of requests by quarter of an hour, in SQLite."""

import sqlite3
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.usage import CloudPrice, UsageSums
from mlxstack.core.usage_key import UsageKey
from mlxstack.features.usage.prices import price_of
from mlxstack.store.database import Database

QUARTER_S = 900
"""Seconds of a row: the days of all time zones begin at one."""
MAX_AGE_S = 400 * 86_400
"""Age of the oldest rows."""
MAX_ROWS = 500_000
"""Rows in the file, about 60 MB; the oldest go first."""
MAX_REPORTED = 1000
"""Rows of one report."""
US = 1e6
SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
  quarter INTEGER NOT NULL, model TEXT NOT NULL, client TEXT NOT NULL, agent TEXT NOT NULL,
  n_requests INTEGER NOT NULL, n_failed INTEGER NOT NULL, n_prompt INTEGER NOT NULL,
  n_cached INTEGER NOT NULL, n_generated INTEGER NOT NULL, us INTEGER NOT NULL,
  saved_us INTEGER NOT NULL, PRIMARY KEY (quarter, model, client, agent)
) WITHOUT ROWID;
"""
SUMS = ("n_requests", "n_failed", "n_prompt", "n_cached", "n_generated", "us", "saved_us")
ADD = f"""
INSERT INTO usage VALUES (?, ?, ?, ?, {", ".join("?" * len(SUMS))})
ON CONFLICT DO UPDATE SET {", ".join(f"{name} = {name} + excluded.{name}" for name in SUMS)}
"""
ALL = ", ".join(f"COALESCE(SUM({name}), 0)" for name in SUMS)
COLUMNS = {
    UsageKey.AGENT: "agent",
    UsageKey.CLIENT: "client",
    UsageKey.MODEL: "model",
    UsageKey.DAY: "date(quarter, 'unixepoch', 'localtime')",
}


class UsageEntry(Struct, frozen=True):
    """One finished request; `at` is Unix seconds."""

    at: float
    model: str
    client: str
    agent: str
    n_failed: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_generated: int = 0
    seconds: float = 0.0
    saved_s: float = 0.0


class UsageStore:
    """Sums of a home's services, for any thread.

    Every method raises StackError.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._database = Database(path, SCHEMA)
        self._clock = clock
        self._pruned_at = 0.0

    def add(self, entries: Iterable[UsageEntry]) -> None:
        """Add requests, all or none."""
        rows = [_row(entry) for entry in entries]
        self._database.run(lambda connection: self._add(connection, rows))

    def sums(self, since: float, by: UsageKey, price: CloudPrice) -> tuple[UsageSums, ...]:
        """Sums by key since the quarter of `since`.

        Days are in order, other keys by tokens, the most first.
        """
        ordering = "1" if by is UsageKey.DAY else "SUM(n_prompt + n_generated) DESC, 1"
        query = (
            f"SELECT {COLUMNS[by]}, {ALL} FROM usage WHERE quarter >= ? "
            f"GROUP BY 1 ORDER BY {ordering} LIMIT {MAX_REPORTED}"
        )
        rows = self._database.read(lambda c: c.execute(query, (quarter_of(since),)).fetchall())
        return tuple(_priced(_sums(*row), price) for row in rows)

    def total(self, since: float, price: CloudPrice) -> UsageSums:
        """Sums of all requests since the quarter of `since`."""
        query = f"SELECT '', {ALL} FROM usage WHERE quarter >= ?"
        row = self._database.read(lambda c: c.execute(query, (quarter_of(since),)).fetchone())
        return _priced(_sums(*row), price)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def _add(self, connection: sqlite3.Connection, rows: list[tuple[object, ...]]) -> None:
        now = self._clock()
        if now >= self._pruned_at + 86_400:
            _prune(connection, quarter_of(now - MAX_AGE_S))
            self._pruned_at = now
        connection.executemany(ADD, rows)


def quarter_of(at: float) -> int:
    """Begin of the quarter of an hour, in Unix seconds."""
    return int(at // QUARTER_S) * QUARTER_S


def _prune(connection: sqlite3.Connection, oldest: int) -> None:
    connection.execute("DELETE FROM usage WHERE quarter < ?", (oldest,))
    query = "SELECT quarter FROM usage ORDER BY quarter DESC LIMIT 1 OFFSET ?"
    row = connection.execute(query, (MAX_ROWS,)).fetchone()
    if row is not None:
        connection.execute("DELETE FROM usage WHERE quarter <= ?", row)


def _row(entry: UsageEntry) -> tuple[object, ...]:
    return (
        quarter_of(entry.at),
        entry.model,
        entry.client,
        entry.agent,
        1,
        entry.n_failed,
        entry.n_prompt,
        entry.n_cached,
        entry.n_generated,
        round(US * entry.seconds),
        round(US * entry.saved_s),
    )


def _sums(
    key: str,
    n_requests: int,
    n_failed: int,
    n_prompt: int,
    n_cached: int,
    n_generated: int,
    us: int,
    saved_us: int,
) -> UsageSums:
    return UsageSums(
        key, n_requests, n_failed, n_prompt, n_cached, n_generated, us / US, saved_us / US
    )


def _priced(sums: UsageSums, price: CloudPrice) -> UsageSums:
    return replace(sums, price=price_of(sums, price))
