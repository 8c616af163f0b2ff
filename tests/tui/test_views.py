"""What the screens say, without drawing them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxstack.core.engine_snapshot import Counters, RequestPhase, SlotView, Snapshot
from mlxstack.core.formatting import clipped, count, printable, share, short_time, size, span
from mlxstack.core.status import (
    AgentView,
    CacheView,
    MemoryView,
    MissView,
    RequestView,
    StatusFrame,
    TurnView,
)
from mlxstack.core.thinking import Effort, ThinkingBound
from mlxstack.tui.state import DashboardState, reduce
from mlxstack.tui.text_pages import page
from mlxstack.tui.views import agents, cache, costs, overview, phases, requests, tiles
from mlxstack.tui.views.first_tokens import first_tokens
from mlxstack.tui.views.formatting import bar, of_size, plot_stacked, rate
from mlxstack.tui.views.table_data import TableData, cell_text
from tests.tui import scenes


def seen(tape: tuple[object, ...]) -> DashboardState:
    model = DashboardState()
    for news in tape:
        model = reduce(model, news)  # type: ignore[arg-type]
    return model


def texts(table_data: TableData) -> list[list[str]]:
    return [[cell.text for cell in row.cells] for row in table_data.rows]


@pytest.mark.parametrize(
    ("given_", "wanted"),
    [(0, "0"), (999, "999"), (1000, "1.0k"), (99_940, "99.9k"), (131_072, "131k"), (3.2e6, "3.2M")],
)
def test_tokens_are_short(given_: int, wanted: str) -> None:
    assert count(given_) == wanted


def test_figures_are_short_and_honest() -> None:
    assert [size(n) for n in (0, 1023, 1024, 2**30 * 12.8)] == [
        "0 B", "1023 B", "1 KiB", "12.8 GiB",
    ]  # fmt: skip
    assert of_size(2**30 * 7.4, 2**30 * 12.8) == "7.4/12.8 GiB"
    assert of_size(2**20 * 45, 2**30) == "45 MiB/1.0 GiB"
    assert [span(s) for s in (0, 59.9, 60, 3720, 90_000)] == [
        "0s",
        "59s",
        "1m00s",
        "1h02m",
        "1d01h",
    ]
    assert [short_time(s) for s in (0.0031, 1.24, 12.44, 75)] == ["3ms", "1.24s", "12.4s", "1m15s"]
    assert [share(a, b) for a, b in ((999, 1000), (1000, 1000), (0, 0))] == ["99%", "100%", "-"]
    assert [rate(r) for r in (0, 4.21, 99.9, 1234)] == ["0.0", "4.2", "99.9", "1.2k"]


@given(st.floats(0, 1e12), st.floats(0, 1e12), st.integers(1, 60))
def test_a_bar_has_its_width_and_shows_its_part(part: float, whole: float, width: int) -> None:
    drawn = bar(part, whole, width)
    assert len(drawn) == width
    assert (drawn == "█" * width) or part < whole or not whole


@given(st.lists(st.none() | st.floats(0, 1e6), max_size=80), st.integers(1, 12))
def test_a_plot_has_its_size_and_is_blank_where_nothing_was_done(
    values: list[float | None], height: int
) -> None:
    lines = plot_stacked(values, [0.0] * len(values), height)
    assert [len(line) for line in lines] == [len(values)] * height
    assert [c == " " for c, _ in lines[-1]] == [not value for value in values]
    if any(values):
        assert ("█", 0) in lines[0]


@given(st.text())
def test_h6_no_name_can_hold_a_control_character(name: str) -> None:
    shown = printable(name)
    assert shown.isprintable()
    assert len(printable(name, 8)) <= 8


def test_h6_markup_and_escapes_are_spelled_out() -> None:
    assert printable(scenes.EVIL) == r"[red]rm -rf[/] \x1b[31m\u202eevil\n"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("scene", [scenes.busy, scenes.overloaded, scenes.disconnected])
def test_h6_plain_text_holds_no_control_character(scene: object, width: int) -> None:
    for line in page(seen(scene()), width).split("\n"):  # type: ignore[operator]
        assert line.isprintable()


def test_the_plain_page_tells_all_that_the_screens_tell() -> None:
    told = page(seen(scenes.overloaded()), 120)
    for heading in (
        "Slots",
        "Queue",
        "What cost time",
        "Hit rates",
        "Top prefixes",
        "Agents",
        "Requests",
    ):
        assert f"\n{heading}" in told
    assert "cron-9" in told
    assert "enter" not in told
    assert told.count("cron-") <= 64 + 3 + 10
    assert "Agents" not in page(seen(scenes.silent()), 120)


def test_a_verdict_against_batching_is_told() -> None:
    model = seen(scenes.overloaded())
    why = model.frame.snapshot.why_not_batching
    assert why is not None
    lines = ["".join(cell.text for cell in line) for line in overview.health(model, 120)]
    assert f"decoding slot by slot: {why}" in lines


def test_sections_that_are_not_reported_say_so() -> None:
    model = seen(scenes.silent())
    for table_data in (cache.rates, cache.prefixes, cache.misses):
        assert "does not report its prefix cache yet" in table_data(model, 80).note
    assert "does not report its agents yet" in agents.agents(model, 80).note
    assert "does not report its finished requests yet" in requests.requests(model, 80).note


def test_empty_sections_are_not_unreported_ones() -> None:
    model = seen(scenes.empty())
    assert cache.prefixes(model, 80).note == "Nothing is kept yet."
    small = replace(model.frame.service, n_ctx=4096)
    for frame, command in (
        (model.frame, "mlx-stack run claude"),
        (replace(model.frame, service=small), "mlx-stack chat"),
    ):
        note = agents.agents(DashboardState(frame=frame), 80).note
        assert note == f"No agent yet. Start one: {command}"
    assert requests.requests(model, 80).note == "No request has finished yet."


def test_the_census_tells_where_everybody_is_and_that_there_are_more() -> None:
    last = seen(scenes.busy()).frame
    head = agents.agents(DashboardState(frame=last), 80).title[1].text
    assert "4: 2 live, 1 parked, 1 on disk" in head
    many = DashboardState(frame=replace(last, n_agents=300))
    assert "the last 4 of 300" in agents.agents(many, 80).title[1].text


def test_z10_an_agent_shows_where_it_last_missed_and_what_was_sent_instead() -> None:
    told = "\n".join("".join(c.text for c in line) for line in agents.portrait(scenes.AGENTS[1]))
    assert "diverged at token 1312, 41s ago: Tuesday, 14:02 -> Tuesday, 14:09" in told


def test_a_cache_that_is_off_says_how_to_switch_it_on() -> None:
    model = seen((StatusFrame(at=1.0, cache=CacheView(is_enabled=False)),))
    assert "prefix_cache.enabled" in cache.prefixes(model, 80).note
    assert cache.budget(model, 80) == ()


def test_h2_slots_tell_state_fill_progress_speed_and_age() -> None:
    model = seen(scenes.busy())
    running, prefilling, idle = texts(overview.slots(model, 80))
    assert running == [
        "0", "* claude-main", "writing, 164 tokens, 31.4 tok/s", "█▍░░░░ 31.2k", "99%"
    ]  # fmt: skip
    assert prefilling[2:4] == ["prefill 6.9k of 9.8k", "▍░░░░░  6.9k"]
    head = "".join(cell.text for cell in overview.slots(model, 80).title)
    assert head == "Slots  2 of 3 busy, 128k tokens each"
    assert idle[2] == "idle 3m"
    _, wide, _ = texts(overview.slots(model, 120))
    assert wide[-1] == "diverged"


def test_a_turn_begun_early_is_a_state_of_its_own() -> None:
    begun = SlotView(0, 8192, n_tokens=5000, is_used=True, n_early=1200, n_early_left=800)
    for left, told in ((800, "begun early, 1.2k of 2.0k"), (0, "begun early, 1.2k of 1.2k")):
        slot = replace(begun, n_early_left=left)
        model = seen((StatusFrame(at=1.0, snapshot=Snapshot(slots=(slot,))),))
        assert texts(overview.slots(model, 80))[0][2] == told
    resting = replace(begun, n_early=0, n_early_left=0)
    model = seen((StatusFrame(at=1.0, snapshot=Snapshot(slots=(resting,))),))
    assert texts(overview.slots(model, 80))[0][2] == "idle 0s"


def test_images_are_counted_in_slots_and_requests() -> None:
    slot = SlotView(0, 8192, RequestPhase.RUNNING, "r", n_images=15, n_images_computed=1)
    plain = SlotView(1, 8192, RequestPhase.RUNNING, "s")
    counters = Counters(n_image_encodes=16)
    view = RequestView("r", n_prompt=9000, n_cached=8000, n_images=15, n_images_computed=1)
    snapshot = Snapshot(slots=(slot, plain), counters=counters)
    model = seen((StatusFrame(at=1.0, snapshot=snapshot, requests=(view, RequestView("s"))),))
    first, second = texts(overview.slots(model, 120))
    assert first[5] == "15, computed 1"
    assert second[5] == ""
    assert "15, computed 1" not in texts(overview.slots(model, 80))[0]
    (total,) = overview.totals(model, 80)
    assert "16 images encoded" in [cell.text for cell in total]
    assert "15, computed 1" in texts(requests.requests(model, 130))[0]
    why = ["".join(cell.text for cell in line) for line in requests.why(view)]
    assert f"    {'images':<26}15, computed 1" in why
    told = ["".join(cell.text for cell in line) for line in requests.response_headers(view)]
    assert "  x-mlx-stack-images: 15, computed 1" in told


def test_a_slot_tells_that_its_kv_is_read_from_disk() -> None:
    slot = SlotView(
        0, 8192, RequestPhase.PREFILLING, "r", n_prompt=5000, is_used=True, is_reading=True
    )
    model = seen((StatusFrame(at=1.0, snapshot=Snapshot(slots=(slot,))),))
    assert texts(overview.slots(model, 80))[0][2] == "reading KV from disk"
    assert tiles.n_to_compute(slot) == 0
    assert tiles.n_to_compute(replace(slot, is_reading=False)) == 5000


@pytest.mark.parametrize("scene", [scenes.empty, scenes.busy, scenes.overloaded])
def test_the_tile_of_memory_keeps_its_three_lines(scene: object) -> None:
    lines = tiles.memory(seen(scene()), 120)  # type: ignore[operator]
    assert [sum(len(cell.text) for cell in line) <= 50 for line in lines] == [True] * 3
    assert "GiB left of 36.0" in lines[1][0].text
    assert "parked" in "".join(cell.text for cell in lines[2])


def test_the_totals_take_one_line_of_a_wide_terminal() -> None:
    troubled, calm = (
        overview.totals(seen(one()), 120)[0] for one in (scenes.overloaded, scenes.empty)
    )
    assert all(sum(len(cell.text) for cell in line) < 120 for line in (troubled, calm))
    assert "refused" in troubled[-1].text
    assert "rows per step" in calm[-1].text


def test_ages_grow_while_the_snapshot_rests() -> None:
    last = seen(scenes.busy()).frame
    older = DashboardState(
        frame=StatusFrame(at=last.at, snapshot=last.snapshot, snapshot_age_s=60.0)
    )
    assert texts(overview.slots(older, 80))[2][2] == "idle 4m"
    assert texts(overview.queue(older, 80))[0][2] == "1m01s"


def test_h3_hit_rates_are_those_of_the_frame() -> None:
    minute, hour, whole = texts(cache.rates(seen(scenes.busy()), 80))
    assert minute == ["last minute", "14", "92%", "402k", "392k", "97%", "2m43s"]
    assert (hour[1], whole[1]) == ("611", "1.2k")


def test_z10_a_miss_shows_the_place_and_the_text_around_it() -> None:
    told = "\n".join("".join(c.text for c in line) for line in requests.why(scenes.REQUESTS[1]))
    assert "diverged, at token 1312; 8.2k tokens, 3.41s" in told
    assert "Tuesday, 14:02" in told
    assert "Tuesday, 14:09" in told
    headers = requests.response_headers(scenes.REQUESTS[1])
    assert "x-mlx-stack" not in told
    assert "x-mlx-stack-cache-prefix-tokens: 1280" in "".join(c.text for x in headers for c in x)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**5), st.integers(3, 80))
def test_turn_bars_fit_and_show_all_that_happened(a: int, b: int, c: int, width: int) -> None:
    drawn = agents.turn_bar(TurnView(a, b, c), a + b + c, width)
    assert len(drawn) <= width
    signs = ((a, agents.REUSED), (b, agents.COMPUTED), (c, agents.GENERATED))
    assert [sign in drawn for _, sign in signs] == [n > 0 for n, _ in signs]


def test_columns_fill_the_width_and_no_more() -> None:
    model = seen(scenes.busy())
    sheets = (
        overview.slots, overview.queue, costs.costs, cache.rates, cache.prefixes, cache.misses,
        agents.agents, requests.requests,
    )  # fmt: skip
    for width in (80, 112, 120, 200):
        for draw in sheets:
            assert sum(c.width + 2 for c in draw(model, width).columns) <= width, (draw, width)


def test_a_draft_model_is_named() -> None:
    model = seen(scenes.busy())
    named = replace(model.frame.snapshot, draft_model="org/small", is_batching=False)
    lines = overview.health(replace(model, frame=replace(model.frame, snapshot=named)), 80)
    assert [line[0].text.split(":")[0] for line in lines[1:]] == [
        "drafting with org/small",
        "decoding slot by slot",
    ]


def test_a_request_shows_the_bound_of_its_thoughts_and_the_layers_that_set_it() -> None:
    bound = ThinkingBound(2048, "agent", Effort.LOW, "client codex")
    lines = requests.why(RequestView("r", thinking=bound))
    text = "\n".join("".join(cell.text for cell in line) for line in lines)
    assert "at most 2,048 tokens (agent), effort low (client codex)" in text


def test_a_service_that_cannot_batch_says_why() -> None:
    lines = overview.health(seen(scenes.overloaded()), 80)
    assert "the self-check found" in lines[1][0].text


def test_the_phases_of_a_request_add_up_and_fill_a_bar() -> None:
    (_, slow, _, _) = scenes.REQUESTS
    told = ["".join(cell.text for cell in line).strip() for line in phases.rows(slow)]
    assert [" ".join(line.split()) for line in told] == [
        "· waited in the queue 410ms",
        "- waited for other prompts 6.40s",
        "▓ read or copied KV 9ms",
        "█ computed the prompt 3.55s",
        "░ the first token 30ms",
        "= first token after 10.4s",
        "░ generated 6.05s",
    ]
    assert sum(part.seconds for part in phases.first_token_parts(slow)) == pytest.approx(
        slow.ttft_s
    )
    drawn = "".join(cell.text for cell in phases.bar(slow, 40))
    assert len(drawn) == 40 and set(drawn) == set("·-▓█░")
    assert drawn == "".join(sorted(drawn, key="·-▓█░".index))


@given(st.lists(st.floats(0, 1e4), min_size=7, max_size=7), st.floats(0, 1e5), st.integers(7, 80))
def test_a_bar_of_phases_shows_all_that_took_time(
    seconds: list[float], longest_s: float, width: int
) -> None:
    queued, others, restore, prefill, beside, first, answer = seconds
    one = RequestView(
        "r", queued_s=queued, others_s=others, restore_s=restore, prefill_s=prefill,
        beside_s=beside, first_s=first, decode_s=first + answer,
    )  # fmt: skip
    longest_s = max(longest_s, phases.total_s(one))
    drawn = phases.bar(one, width, longest_s)
    assert sum(len(cell.text) for cell in drawn) <= width
    took = [part.sign for part in phases.parts(one) if part.seconds >= phases.MIN_S]
    assert len(drawn) == len(took) or sum(len(cell.text) for cell in drawn) == width


def test_a_wait_for_other_prompts_counts_as_lost_time() -> None:
    view = RequestView("r1", "ann", others_s=6.4, beside_s=2.0, age_s=10.0)
    found = costs.ranked(DashboardState(frame=StatusFrame(at=1.0, requests=(view,))))
    assert [(one.lost_s, one.reason) for one in found] == [
        (6.4, "waited for other prompts"),
        (2.0, "waited for decode steps of others"),
    ]


def test_agents_of_one_beginning_differ_where_they_are_cut() -> None:
    titles = {f"chat-{i}": "Project p4: list three tasks" for i in range(4)}
    views = tuple(AgentView(name, "parked") for name in titles)
    frame = StatusFrame(at=1.0, agents=views, titles=titles)
    for width in (80, 120):
        drawn = agents.agents(DashboardState(frame=frame), width)
        names = [cell_text(row.cells[0].text, drawn.columns[0]) for row in drawn.rows]
        assert len(set(names)) == 4
        assert all(len(name) == drawn.columns[0].width for name in names)


@given(st.text(max_size=80), st.integers(1, 60))
def test_a_text_that_is_cut_in_the_middle_keeps_both_ends(text: str, width: int) -> None:
    cut = clipped(text, width)
    assert len(cut) == min(len(text), width)
    head, _, tail = cut.partition("…")
    assert cut == text or (text.startswith(head) and text.endswith(tail))


def test_both_sides_of_a_miss_are_cut_alike_and_nothing_lost_shows_nothing() -> None:
    lost = MissView(
        "diverged", 3, "r1", n_lost=50, lost_s=1.0, text_cached="a" * 60, text_sent="b" * 60
    )
    new = MissView("new conversation", 3, "r2", text_cached="c" * 60, text_sent="d" * 60)
    frame = StatusFrame(at=1.0, cache=CacheView(misses=(new, lost)))
    for width in (80, 120, 144, 200):
        first, second = texts(cache.misses(DashboardState(frame=frame), width))
        before, after = first[4].split(" -> ")
        assert len(before) == len(after) and before.startswith("a") and after.startswith("b")
        assert second[4] == "-"


def test_reused_tokens_have_a_sign_of_their_own_without_color() -> None:
    lines = plot_stacked([2.0, 0.0], [2.0, 4.0], 4)
    assert [line[0][0] for line in lines] == ["▓", "▓", "█", "█"]
    assert [line[1][0] for line in lines] == ["▓"] * 4


def test_a_tile_has_a_unit_and_small_models_are_not_nothing() -> None:
    view = MemoryView(
        total_bytes=2**34, available_bytes=2**33, weights_bytes=25 * 2**20, workspace_bytes=2**29,
        pressure="calm",
    )  # fmt: skip
    lines = tiles.memory(DashboardState(frame=StatusFrame(at=1.0, memory=view)), 120)
    drawn, _, legend = ("".join(cell.text for cell in line) for line in lines)
    assert drawn.endswith(" - others 7.5 GiB")
    assert legend.startswith("█ weights 0.02 ▓ live 0.0 ")


def test_first_tokens_are_a_sparkline_with_percentiles() -> None:
    views = tuple(RequestView(f"r{i}", ttft_s=float(i)) for i in range(21))
    model = DashboardState(frame=StatusFrame(at=1.0, requests=views))
    (line,) = first_tokens(model, 120)
    told = "".join(cell.text for cell in line)
    assert len(line[1].text) == 20
    assert line[1].text[0] == "█" and line[1].text[-1] == "▁"
    assert "median 10.5s, 95% 20.0s, slowest 20.0s, of the last 20" in told
    assert first_tokens(DashboardState(frame=StatusFrame(at=1.0)), 120) == ()
