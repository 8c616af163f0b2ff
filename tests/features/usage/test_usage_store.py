"""Sums of requests, in any order of additions, crashes and restarts; prices, and reports."""

import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mlxstack.config.presets import builtin_folder
from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request
from mlxstack.core.status import RequestView
from mlxstack.core.usage import CloudPrice, UsageSums
from mlxstack.core.usage_key import UsageKey
from mlxstack.features.usage.prices import FILE, price_named, price_of, price_table
from mlxstack.features.usage.report import UsageQuery
from mlxstack.features.usage.service import entry_of
from mlxstack.features.usage.store import MAX_AGE_S, UsageEntry, UsageStore
from mlxstack.host.home import Home
from mlxstack.store.write_counter import WriteCounter, WriteKind

PRICE = CloudPrice("cloud", 2.0, 0.5, 10.0)
NOON = time.mktime((2026, 11, 29, 12, 0, 0, 0, 0, -1))
DAY_S = 86_400.0


class Crash(BaseException):
    """The process ends here."""


class CrashingStore(UsageStore):
    """Ends the process inside of a transaction, where `is_doomed`."""

    is_doomed = False

    def _add(self, connection: sqlite3.Connection, rows: list[tuple[object, ...]]) -> None:
        super()._add(connection, rows)
        if self.is_doomed:
            raise Crash


def entry(agent: str = "a", at: float = NOON, n_prompt: int = 10, n_cached: int = 4) -> UsageEntry:
    return UsageEntry(at, "demo", "curl", agent, 0, n_prompt, n_cached, 3, 1.5, 0.25)


def counted(sums: Iterable[UsageSums]) -> dict[str, tuple[int, int, int]]:
    return {row.key: (row.n_requests, row.n_prompt, row.n_cached) for row in sums}


def test_sums_are_divided_by_agent_client_model_and_local_day(tmp_path: Path) -> None:
    store = UsageStore(tmp_path / "usage.sqlite3")
    store.add([entry("a"), entry("b", n_prompt=99), entry("a", NOON + DAY_S)])
    since = NOON - 60
    assert counted(store.sums(since, UsageKey.AGENT, PRICE)) == {"b": (1, 99, 4), "a": (2, 20, 8)}
    assert counted(store.sums(since, UsageKey.CLIENT, PRICE)) == {"curl": (3, 119, 12)}
    days = store.sums(since, UsageKey.DAY, PRICE)
    assert [day.key for day in days] == ["2026-11-29", "2026-11-30"]
    assert store.total(NOON + 900, PRICE).n_requests == 1


def test_tokens_of_a_failed_request_have_no_price() -> None:
    request = Request("r", PromptTokens((1, 2)), 1)
    failed = entry_of(request, RequestView("r", n_prompt=1000, ended="failed"), "demo", NOON)
    assert failed == UsageEntry(NOON, "demo", "", "", n_failed=1)
    ended = RequestView("r", "bob", n_prompt=9, n_cached=4, ttft_s=1.0, decode_s=2.0, ended="eos")
    taken = entry_of(request, ended, "demo", NOON)
    assert (taken.n_prompt, taken.n_cached, taken.seconds) == (9, 4, 3.0)


@given(st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_the_price_of_reused_tokens_is_that_of_the_clouds_cache(
    n_read: int, n_cached: int, n_generated: int
) -> None:
    sums = UsageSums(n_prompt=n_read + n_cached, n_cached=n_cached, n_generated=n_generated)
    cost = (2 * n_read + 0.5 * n_cached + 10 * n_generated) / 1e6
    assert price_of(sums, PRICE) == pytest.approx(cost)


def test_old_rows_are_forgotten(tmp_path: Path) -> None:
    store = UsageStore(tmp_path / "usage.sqlite3", lambda: NOON)
    store.add([entry("old", NOON - MAX_AGE_S - 900)])
    later = UsageStore(tmp_path / "usage.sqlite3", lambda: NOON)
    later.add([entry("new")])
    assert set(counted(later.sums(0, UsageKey.AGENT, PRICE))) == {"new"}


def test_the_builtin_prices_are_dated_and_the_users_table_takes_their_place(tmp_path: Path) -> None:
    home = Home(tmp_path)
    builtin = price_table(home)
    assert datetime.fromisoformat(builtin.date)
    assert price_named(builtin, None).name == builtin.default
    own = home.presets / FILE
    own.parent.mkdir(parents=True)
    text = (builtin_folder() / FILE).read_text("utf-8")
    own.write_text(text.replace(builtin.default, "mine"), "utf-8")
    assert price_named(price_table(home), None).name == "mine"
    with pytest.raises(BadRequest, match="the table has mine"):
        price_named(price_table(home), "other")
    own.write_text(text.replace(f"default: {builtin.default}", "default: none-of-them"), "utf-8")
    with pytest.raises(SetupError, match="none-of-them"):
        price_table(home)


def test_a_report_has_the_bytes_written_on_each_day(tmp_path: Path) -> None:
    home = Home(tmp_path)
    store = UsageStore(home.usage_file)
    counter = WriteCounter(home.writes_file, lambda: NOON)
    store.add([entry()])
    counter.admit(WriteKind.KV, 100)
    query = UsageQuery(home, store, counter)
    report = query.report("1d", UsageKey.DAY, None, NOON)
    assert report.total.written_bytes == 100
    assert sum(row.written_bytes or 0 for row in report.rows) == 100
    assert query.report("1d", UsageKey.AGENT, None, NOON).rows[0].written_bytes is None
    with pytest.raises(BadRequest, match="7d"):
        query.report("soon", UsageKey.DAY, None, NOON)


class UsageMachine(RuleBasedStateMachine):
    """A store that is killed and restarted; the sums are those of the requests that it took."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="usage-"))
        self.n_lives = 0
        self.model: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        """Start a process over a copy of the files, as a killed one leaves them."""
        self.n_lives += 1
        home = self.root / str(self.n_lives)
        if self.n_lives > 1:
            shutil.copytree(self.root / str(self.n_lives - 1), home)
            (home / "usage.sqlite3-shm").unlink(missing_ok=True)
        else:
            home.mkdir()
        self.store = CrashingStore(home / "usage.sqlite3", lambda: NOON)

    @rule(
        agents=st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
        is_doomed=st.booleans(),
        n_cached=st.integers(0, 10),
    )
    def add(self, agents: list[str], is_doomed: bool, n_cached: int) -> None:
        """Add requests at once; a crash before the end of the transaction loses all of them."""
        self.store.is_doomed = is_doomed
        try:
            self.store.add([entry(agent, n_cached=n_cached) for agent in agents])
        except Crash:
            self.begin()
            return
        self.model.update(agents)

    @rule()
    def kill(self) -> None:
        self.begin()

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.begin()

    @invariant()
    def the_sums_are_those_of_the_requests(self) -> None:
        sums = self.store.sums(0, UsageKey.AGENT, PRICE)
        assert {row.key: row.n_requests for row in sums} == dict(self.model)
        total = self.store.total(0, PRICE)
        assert total.n_requests == self.model.total()
        assert total.n_prompt == 10 * self.model.total()
        assert total.seconds == pytest.approx(1.5 * self.model.total())

    def teardown(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


UsageMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
TestUsage = UsageMachine.TestCase
