"""Reports of usage: sums of requests, with the bytes written to disk."""

import time

from msgspec.structs import replace

from mlxstack.core.errors import BadRequest
from mlxstack.core.units import seconds_in
from mlxstack.core.usage import UsageReport, UsageSums
from mlxstack.core.usage_key import UsageKey
from mlxstack.features.usage.prices import price_named, price_table
from mlxstack.features.usage.store import UsageStore, quarter_of
from mlxstack.host.home import Home
from mlxstack.store.write_counter import DAY, WriteCounter


class UsageQuery:
    """Queries of the usage of a home."""

    def __init__(self, home: Home, store: UsageStore, counter: WriteCounter) -> None:
        self._home = home
        self._store = store
        self._counter = counter

    def report(self, since: str, by: UsageKey, price: str | None, now: float) -> UsageReport:
        """Usage of the last `since`, such as "7d". Raises StackError."""
        table = price_table(self._home)
        cloud = price_named(table, price)
        begin = quarter_of(now - _seconds(since))
        rows = self._store.sums(begin, by, cloud)
        first_day = time.strftime(DAY, time.localtime(begin))
        written = {sums.day: sums.n_bytes for sums in self._counter.days() if sums.day >= first_day}
        if by is UsageKey.DAY:
            rows = _with_writes(rows, written)
        total = replace(self._store.total(begin, cloud), written_bytes=sum(written.values()))
        return UsageReport(begin, by, rows, total, cloud, table.date, table.currency)


def _with_writes(rows: tuple[UsageSums, ...], written: dict[str, int]) -> tuple[UsageSums, ...]:
    """Add the bytes of each day, also of days without requests."""
    by_day = {day: UsageSums(day) for day in written} | {row.key: row for row in rows}
    return tuple(replace(by_day[day], written_bytes=written.get(day, 0)) for day in sorted(by_day))


def _seconds(since: str) -> float:
    seconds = seconds_in(since)
    if seconds is None:
        raise BadRequest(f"since is {since}, but must be a time such as 12h or 7d", "since")
    return seconds
