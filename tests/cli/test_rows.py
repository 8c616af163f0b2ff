"""Rows of `cache`, `logs` and `slots` have the names and the counts of the dashboard."""

import pytest

from mlxstack.cli.commands import agents, cache, slots
from mlxstack.cli.service_request import ServiceOptions
from mlxstack.client.types import SlotResponse
from mlxstack.core.formatting import count
from mlxstack.core.status import CacheView, MissSums, MissView, PrefixView, RequestView, StatusFrame
from mlxstack.host.log_lines import LogLine, with_name
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views import names

TITLES = {"chat-1": "Project p4: list three tasks", "codex-2": "codex · infra"}
PREFIXES = (
    PrefixView("p1", "rules", 19_840, 3_720, 212, 60.0, is_pinned=True),
    PrefixView("p2", "learned-261433fd", 2_039, 900, 1_300, 60.0, ("codex-2",), opening="You are"),
    PrefixView("p3", "", 2_039, 900, 3, 60.0, ("chat-1",)),
)
DIVERGED = MissView(
    "diverged", 11, "r1", "chat-1", text_shared="Today is Tuesday 14:0", text_cached="2.",
    text_sent="9.", n_lost=2_039, lost_s=11.1,
)  # fmt: skip


def test_prefixes_have_the_names_of_the_dashboard() -> None:
    model = DashboardState(frame=StatusFrame(at=1.0, titles=TITLES))
    told = cache.render(CacheView(prefixes=PREFIXES), TITLES)
    for prefix in PREFIXES:
        name = names.prefix_name(model, prefix)
        assert name in told and cache._row(prefix, TITLES)[0] == name
    assert "prefix of Project p4: list three tasks" in told
    assert "2.0k tokens" in told and "1.3k hits" in told
    assert "2,039" not in told and "Cache" not in told


def test_a_miss_shows_the_cache_before_the_request_as_the_dashboard_does() -> None:
    view = CacheView(misses=(DIVERGED,), losses=(MissSums("diverged", 1_000, 2_039, 11.1),))
    told = cache.render(view, TITLES)
    assert (
        "Project p4: list three tasks: diverged at token 11, after `Today is Tuesday 14:0`: "
        "`2.` -> `9.`; lost 2.0k tokens, 11.1s"
    ) in told
    assert " 1.0k  lost 2.0k tokens, 11.1s" in told


def test_why_tells_phases_that_add_up() -> None:
    view = RequestView("r1", ttft_s=10.9, queued_s=0.2, others_s=6.4, prefill_s=4.3)
    assert cache._phases(view) == [
        "first token after 10.9s: waited in the queue 200ms, waited for other prompts 6.40s, "
        "computed the prompt 4.30s"
    ]
    assert cache._phases(RequestView("r2", queued_s=2.0)) == []


def test_an_empty_cache_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_cache_view", lambda _: CacheView())
    result = cache.top(ServiceOptions())
    assert result.value == () and result.text == "Nothing is kept yet."


def test_slots_and_agents_count_as_the_dashboard_does() -> None:
    slot = SlotResponse(
        id=0, n_ctx=4096, is_processing=False, n_tokens=2_039, cached_tokens=1_990, agent="chat-1"
    )
    row = slots._row(slot, TITLES)
    assert row[2:6] == (TITLES["chat-1"], count(2_039), "4k", "2.0k")
    one = {
        "id": "ann", "place": "parked", "slot": None, "n_tokens": 2_039, "n_requests": 3,
        "cached_share": 0.5, "saved_s": 1.0, "idle_s": 1.0, "n_bytes": 9, "priority": "normal",
    }  # fmt: skip
    assert agents._row(one, "ann")[:2] == ("ann", "ann")
    assert agents._row(one, "ann")[4] == "2.0k"


def test_a_line_of_the_log_has_the_name_of_its_agent() -> None:
    line = LogLine(message="request finished", fields={"agent": "chat-1", "prompt": 2_039})
    assert with_name(line, TITLES).fields["agent"] == TITLES["chat-1"]
    assert with_name(line, {}) is line
    assert with_name(LogLine(message="ready"), TITLES).message == "ready"
