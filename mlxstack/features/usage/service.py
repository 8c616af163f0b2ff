"""Usage of a service: counts finished requests in a thread."""

import asyncio
import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from mlxstack.core.errors import StackError
from mlxstack.core.preset import Preset
from mlxstack.core.request import Request
from mlxstack.core.status import RequestView
from mlxstack.core.usage import CloudPrice, UsageReport, UsageSums
from mlxstack.core.usage_key import UsageKey
from mlxstack.features.usage.prices import price_named, price_table
from mlxstack.features.usage.report import UsageQuery
from mlxstack.features.usage.store import UsageEntry, UsageStore
from mlxstack.host.home import Home
from mlxstack.service.parts.service_feature import ServiceFeature
from mlxstack.store.write_counter import WriteCounter

log = logging.getLogger("mlxstack.usage")

FAILED = "failed"
MAX_WAITING = 10_000
"""Requests that wait for a disk that refuses; beyond them the oldest are not counted."""


class Usage(ServiceFeature):
    """Counts the requests of a service."""

    def __init__(self, home: Home, counter: WriteCounter) -> None:
        self._home = home
        self._store = UsageStore(home.usage_file)
        self._query = UsageQuery(home, self._store, counter)
        self._model = ""
        self._price: CloudPrice | None = None
        self._waiting: deque[UsageEntry] = deque(maxlen=MAX_WAITING)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="usage")
        self._today = (UsageSums(), "")
        self._trouble = ""

    async def before_load(self, preset: Preset) -> None:
        self._model = preset.model.served_name
        self._writer.submit(self._flush)

    def on_end(self, request: Request, view: RequestView) -> None:
        """Note a request; the thread adds it."""
        self._waiting.append(entry_of(request, view, self._model, time.time()))
        self._writer.submit(self._flush)

    def today(self) -> UsageSums | None:
        sums, day = self._today
        return sums if day == _day() else UsageSums()

    def troubles(self) -> tuple[str, ...]:
        return (self._trouble,) if self._trouble else ()

    async def close(self) -> None:
        await asyncio.to_thread(self._writer.shutdown)
        self._store.close()

    async def report(self, since: str, by: UsageKey, price: str | None) -> UsageReport:
        """Usage of the home, after all requests that ended. Raises StackError."""
        report = self._writer.submit(self._query.report, since, by, price, time.time())
        return await asyncio.wrap_future(report)

    def _flush(self) -> None:
        """Add all waiting requests; refused ones go on waiting."""
        entries = [self._waiting.popleft() for _ in range(len(self._waiting))]
        try:
            if entries:
                self._store.add(entries)
        except StackError as error:
            self._waiting.extendleft(reversed(entries))
            self._note_trouble(f"usage is not counted: {error}")
            return
        try:
            self._today = self._sums_of_today(), _day()
            self._trouble = ""
        except StackError as error:
            self._note_trouble(f"usage is not shown: {error}")

    def _note_trouble(self, trouble: str) -> None:
        if trouble != self._trouble:
            log.warning("%s", trouble)
        self._trouble = trouble

    def _sums_of_today(self) -> UsageSums:
        if self._price is None:
            self._price = price_named(price_table(self._home), None)
        now = time.localtime()
        midnight = time.mktime((now.tm_year, now.tm_mon, now.tm_mday, 0, 0, 0, 0, 0, -1))
        return self._store.total(midnight, self._price)


def entry_of(request: Request, view: RequestView, model: str, ended_at: float) -> UsageEntry:
    """Entry of a finished request; a failed one has no tokens."""
    client = request.caller.client
    agent = view.agent or ""
    if view.ended == FAILED:
        return UsageEntry(ended_at, model, client, agent, n_failed=1)
    return UsageEntry(
        ended_at,
        model,
        client,
        agent,
        n_prompt=view.n_prompt,
        n_cached=view.n_cached,
        n_generated=view.n_generated,
        seconds=view.ttft_s + view.decode_s,
        saved_s=view.saved_s,
    )


def _day() -> str:
    return time.strftime("%Y-%m-%d")
