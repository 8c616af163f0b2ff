"""Bars, charts, names and orders as values."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxstack.core.engine_events import CacheMiss
from mlxstack.core.engine_snapshot import RequestPhase, SlotView, Snapshot, WaitingView
from mlxstack.core.formatting import age, span
from mlxstack.core.request import Priority
from mlxstack.core.status import CacheView, MissView, RequestView, StatusFrame
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views import cache, costs
from mlxstack.tui.views.formatting import plot_stacked, stacked
from mlxstack.tui.views.names import agent_name, prefix_name
from mlxstack.tui.views.table_data import (
    GAP,
    Column,
    DrawContext,
    TableData,
    TextCell,
    arranged,
    number,
    tabulated,
)
from tests.tui import shots


@given(st.lists(st.integers(0, 10**12), max_size=6), st.integers(0, 10**12), st.integers(6, 60))
def test_a_stacked_bar_fits_and_shows_every_part(parts: list[int], left: int, width: int) -> None:
    cells = stacked(parts, sum(parts) + left, width)
    assert sum(cells) <= width
    assert [n > 0 for n in cells] == [part > 0 for part in parts] or sum(cells) == width


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=40), st.integers(1, 8))
def test_a_stacked_chart_has_its_size_and_hides_no_computed_token(
    pairs: list[tuple[float, float]], height: int
) -> None:
    lines = plot_stacked([a for a, _ in pairs], [b for _, b in pairs], height)
    assert [len(line) for line in lines] == [len(pairs)] * height
    for i, (lower, _) in enumerate(pairs):
        column = [line[i] for line in lines]
        assert any(part in {0, 2} for char, part in column if char != " ") or not lower
    lower, upper = max(pairs, key=sum, default=(0.0, 0.0))
    if upper > lower and height > 1:
        assert any(part in {1, 2} for line in lines for _, part in line)


def test_a_chart_is_empty_where_nothing_was_seen_or_done() -> None:
    assert plot_stacked([None, 0.0], [None, 0.0], 1) == (((" ", 0), (" ", 0)),)


NUMBERS: tuple[Column[float | None], ...] = (number("time", 6, lambda seconds: seconds, span),)
NAMES: tuple[Column[str], ...] = (Column("name", 6, lambda name, _: TextCell(name)),)


def table_of(columns: Sequence[Column[Any]], values: Sequence[Any], width: int = 80) -> TableData:
    rows = [(str(value), value) for value in values]
    return tabulated((), columns, rows, DrawContext(DashboardState(), width), "")


def sorted_texts(columns: Sequence[Column[Any]], values: Sequence[Any]) -> list[str]:
    return [row.cells[0].text for row in arranged(table_of(columns, values), "", 0).rows]


def test_numbers_are_sorted_with_the_largest_first_whatever_their_texts_say() -> None:
    assert sorted_texts(NUMBERS, [59, 3720, None, 0.41, 192, 59.9]) == [
        "1h02m", "3m12s", "59s", "59s", "0s", "-",
    ]  # fmt: skip
    first, second = arranged(table_of(NUMBERS, [59, 59.9]), "", 0).rows
    assert (first.key, second.key) == ("59.9", "59")


def test_texts_are_sorted_without_case_and_empty_ones_come_last() -> None:
    assert sorted_texts(NAMES, ["codex", "-", "Aider", ""]) == ["Aider", "codex", "", "-"]


def test_a_sorted_table_holds_only_what_is_drawn() -> None:
    # Its values change with each frame, and would draw the same cells again.
    assert arranged(table_of(NUMBERS, [1.0, 2.0]), "", None).values == ()


def test_a_cell_is_as_wide_as_its_column_of_those_that_are_shown() -> None:
    columns: tuple[Column[str], ...] = (
        Column("wide", 10, lambda _, context: TextCell("x" * context.width), grows=True),
        Column("far", 30, lambda name, _: TextCell(name), min_screen=100),
        Column("image", 20, lambda _name, _: TextCell(""), is_optional=True),
    )
    (row,) = table_of(columns, ["a"], 60).rows
    assert [len(cell.text) for cell in row.cells] == [60 - GAP]


def test_both_texts_of_a_miss_are_cut_to_the_cells_of_their_column() -> None:
    miss = MissView("diverged", 7, text_cached="a" * 90, text_sent="b" * 90, n_lost=9, lost_s=1.0)
    state = DashboardState(frame=StatusFrame(at=1.0, cache=CacheView(misses=(miss,))))
    for width in (80, 120, 160):
        drawn = cache.misses(state, width)
        widths = {column.title: column.width for column in drawn.columns}
        place = [column.title for column in drawn.columns].index("cached -> sent")
        change = drawn.rows[0].cells[place].text
        assert widths["cached -> sent"] - 1 <= len(change) <= widths["cached -> sent"]


def test_agents_of_one_title_are_numbered() -> None:
    titles = {"claude-2b": "claude · shop", "claude-1a": "claude · shop", "codex-3": "codex · web"}
    model = DashboardState(frame=StatusFrame(at=1.0, titles=titles))
    shown = [agent_name(model, name) for name in ("claude-1a", "claude-2b", "codex-3", "own", None)]
    assert shown == ["claude · shop 1", "claude · shop 2", "codex · web", "own", "-"]


def test_a_prefix_without_a_name_has_its_first_words_and_its_user() -> None:
    frame = shots.working()[-1]
    assert isinstance(frame, StatusFrame)
    model = DashboardState(frame=frame)
    first, second, _ = shots.PREFIXES
    assert prefix_name(model, second) == "You are Codex, a coding agent (codex · infra)"
    assert prefix_name(model, replace(second, opening="")) == "prefix of codex · infra"
    assert prefix_name(model, replace(first, name="rules")) == "rules"


def test_costs_are_those_of_ten_minutes_ranked_by_seconds() -> None:
    lost = MissView("diverged", 7, text_cached="a", text_sent="b", n_lost=900, lost_s=2.0)
    requests = (
        RequestView("r1", "ann", queued_s=3.0, age_s=10.0),
        RequestView("r2", "bob", queued_s=0.01, age_s=20.0, miss=lost),
        RequestView("r3", "cyd", queued_s=9.0, age_s=601.0),
        RequestView("r4", "dan", age_s=5.0, miss=MissView("new conversation", 400)),
    )
    model = DashboardState(frame=StatusFrame(at=1.0, requests=requests))
    found = costs.ranked(model)
    assert [(one.request, one.lost_s) for one in found] == [("r1", 3.0), ("r2", 2.0)]
    assert found[1].reason == "prompt changed at token 7: `a` -> `b`"


def test_costs_of_now_come_first_and_less_than_a_second_is_none() -> None:
    snapshot = Snapshot(
        waiting=(
            WaitingView("r5", "eve", Priority.NORMAL, 100, 12.0),
            WaitingView("r6", "fay", Priority.NORMAL, 100, 0.9, pin=1),
        ),
        slots=(
            SlotView(0, 4096, RequestPhase.PREFILLING, "r7", "gus", n_prompt=1000, n_cached=200,
                     miss=CacheMiss("evicted", n_lost=400), elapsed_s=30.0),
            SlotView(1, 4096, RequestPhase.PREFILLING, "r8", "hal", n_prompt=1000, elapsed_s=30.0),
        ),
    )  # fmt: skip
    finished = (RequestView("r1", "ann", queued_s=60.0, age_s=10.0),)
    frame = StatusFrame(at=1.0, snapshot=snapshot, snapshot_age_s=2.0, requests=finished)
    found = costs.ranked(DashboardState(frame=frame))
    assert [(one.request, one.lost_s) for one in found] == [
        ("r7", 16.0), ("r5", 14.0), ("r1", 60.0)
    ]  # fmt: skip
    shown = costs.costs(DashboardState(frame=frame), 120)
    assert "now 30s, ten minutes 1m" in "".join(cell.text for cell in shown.title)


def test_an_age_is_coarse() -> None:
    ages = [age(s) for s in (0, 4.9, 59.9, 60, 3599, 3600, 86399, 86400, 9 * 86400)]
    assert ages == ["0s", "0s", "55s", "1m", "59m", "1h", "23h", "1d", "9d"]
