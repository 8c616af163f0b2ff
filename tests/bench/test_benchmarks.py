"""Every benchmark from end to end on a tiny model: all rows are there and fit together."""

import asyncio
import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import msgspec
import pytest
import uvloop

from mlxstack.bench.dev import prefix_cache_scenarios
from mlxstack.bench.dev.drafts import TEXTS
from mlxstack.bench.dev.in_process_trials import measure, with_model
from mlxstack.bench.dev.registry import SMALL, BenchContext, BenchRequest, report
from mlxstack.bench.dev.serving_scenarios import SCENES, crowds
from mlxstack.bench.dev.serving_scenarios import SMALL as SERVE
from mlxstack.bench.dev.taken_path import check_path
from mlxstack.bench.dev.timed_request import TimedClient
from mlxstack.bench.dev.trials import BenchResult, LoadFiles, SingleFloor
from mlxstack.bench.dev.workload import Yardstick
from mlxstack.bench.report import BenchReport, ReportTable
from mlxstack.bench.servers import Sandbox, ServerUnderTest, service
from mlxstack.cli.commands import bench
from mlxstack.core.errors import BadRequest, Broken
from mlxstack.core.preset import SlotSpec

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]


def run(name: str, folder: Path, **more: object) -> BenchReport:
    scene = BenchContext(
        folder, dict(os.environ), date(2026, 11, 20), f"bench {name}", lambda _: None
    )
    wanted = BenchRequest(passes=1, is_small=True, **more)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        # uvloop starts programs itself: they would not be forked.
        patch.setattr(uvloop, "run", asyncio.run)
        return report(name, wanted, scene)


def stage(folder: Path) -> Sandbox:
    bare = Sandbox(folder, dict(os.environ), "", lambda _: None)
    build = msgspec.structs.replace(SMALL, folder=str(folder / "model"))
    return with_model(bare, "random", build)


def column(table: ReportTable, head: str) -> list[str]:
    at = table.columns.index(head)
    return [row[at] for row in table.rows]


def test_z1_z2_e17_engine(tmp_path: Path) -> None:
    told = run("engine", tmp_path)
    shapes, moves, speeds, exact, rule = told.tables
    assert len(rule.rows) == 3
    assert all(share.endswith("%") for n in (1, 2) for share in (row[1 + n] for row in rule.rows))
    assert column(exact, "Rows") == ["1", "2"]
    assert all(cost.endswith("%") for cost in column(exact, "Cost of a step"))
    assert column(shapes, "Contexts") == ["264/8/8", "32/32"]
    assert len(moves.rows) == 2
    assert len(speeds.rows) == 4
    assert column(speeds, "Whole engine")[2:] == ["-", "-"]
    bytes_alone = told.raw["uneven: alone bytes"]
    ours = told.raw["uneven: ours bytes"]
    assert ours[0] <= 1.05 * bytes_alone[0]
    assert len(told.targets) == 6
    assert all(min(values) > 0 for values in told.raw.values())


@pytest.mark.soak
def test_drafts(tmp_path: Path) -> None:
    told = run("drafts", tmp_path)
    (table,) = told.tables
    scenes = [f"{text} x {n}" for text in TEXTS for n in (1, 2)]
    assert column(table, "Scene") == [*scenes, "prose x 3", "mixed"]
    assert len(told.targets) == len(table.rows)
    for n in (1, 2):
        assert told.raw[f"on schema x {n}: passes"] < told.raw[f"off schema x {n}: passes"]
        assert told.raw[f"on copied x {n}: passes"] <= told.raw[f"off copied x {n}: passes"]
        assert told.raw[f"on schema x {n}: accepted"] > (0,)
        assert told.raw[f"off schema x {n}: drafted"] == (0,)
    for scene, gap in zip(column(table, "Scene"), column(table, "p99 gap"), strict=True):
        assert (gap != "-") == (scene == "mixed" or scene.startswith("prose"))
    counted = ("passes", "token_s", "gap_s")
    assert all(min(v) > 0 for name, v in told.raw.items() if name.endswith(counted))


@pytest.mark.soak
def test_drafts_on_real_text(tmp_path: Path) -> None:
    told = run("drafts", tmp_path, model=stage(tmp_path).model)
    (table,) = told.tables
    texts = ("prose", "edit", "calls")
    scenes = [f"{text} x {n}" for text in texts for n in (1, 2)]
    assert column(table, "Scene") == scenes
    assert [one.name for one in told.targets] == ["worst scene, against off"]
    assert told.raw["on calls x 1: drafted"] > (0,)


@pytest.mark.soak
def test_drafts_of_a_model_are_counted_apart(tmp_path: Path) -> None:
    model = stage(tmp_path).model
    told = run("drafts", tmp_path, model=model, draft=model)
    (table,) = told.tables
    for scene, counts in zip(column(table, "Scene"), column(table, "Of the model"), strict=True):
        (accepted,) = told.raw[f"on {scene}: model_accepted"]
        (drafted,) = told.raw[f"on {scene}: model_drafted"]
        assert counts == f"{accepted:.0f} of {drafted:.0f}"
        assert drafted <= told.raw[f"on {scene}: drafted"][0]
    assert sum(told.raw["on prose x 1: model_drafted"]) > 0


@pytest.mark.soak
def test_early(tmp_path: Path) -> None:
    told = run("early", tmp_path)
    turns, beside = told.tables
    assert column(turns, "Turn after a pause")[:2] == [
        "reasoning, begun early: auto",
        "reasoning, begun early: off",
    ]
    raw = told.raw
    (begun,), (used,) = raw["auto: reasoning: begun"], raw["auto: reasoning: used"]
    assert 0 < used == begun
    assert raw["off: reasoning: begun"] == raw["auto: no reasoning: begun"] == (0.0,)
    assert raw["off: reasoning: computed"][0] > raw["auto: reasoning: computed"][0] + begun / 2
    assert raw["auto: reasoning: computed"] <= raw["auto: no reasoning: computed"]
    assert column(beside, "Begun early") == ["auto", "off"]
    assert raw["off: begun beside"] == (0.0,)
    assert len(raw["auto: gaps"]) > 20
    assert [one.bound for one in told.targets] == [1.2, 1.0, 0.8, 1.05, 1.05]


@pytest.mark.soak
def test_tui(tmp_path: Path) -> None:
    told = run("tui", tmp_path)
    sizes = ("80x24", "200x50")
    rows = ["no dashboard", *(f"a dashboard of {size}" for size in sizes)]
    assert column(told.tables[0], "Service") == rows
    assert len(told.raw["alone"]) == 2
    spent = "service cpu per token"
    (around,) = told.raw[f"{spent} alone"]
    for i, size in enumerate(sizes):
        (seen,), (frames,), (cpu,) = (told.raw[f"{k} {size}"] for k in ("watched", "frames", "cpu"))
        assert min(seen, cpu) > 0
        assert 0 <= frames <= 5
        (watched,) = told.raw[f"{spent} {size}"]
        cost = 100 * (watched / around - 1)
        assert told.targets[2 * i].value == pytest.approx(cost)
    assert [target.unit for target in told.targets] == ["%"] * 4


def test_start(tmp_path: Path) -> None:
    told = run("start", tmp_path)
    commands = column(told.tables[0], "Command")
    assert commands[:2] == ["python -c pass", "mlx-stack --help"]
    modules = [int(n.replace(",", "")) for n in column(told.tables[0], "Modules")]
    assert 10 < modules[0] < modules[1] < 250 < modules[2]
    assert [len(values) for values in told.raw.values()] == [1] * len(commands)
    assert [one.bound for one in told.targets] == [10.0]


def test_z13_text(tmp_path: Path) -> None:
    told = run("text", tmp_path)
    assert column(told.tables[0], "History") == ["500", "3,000"]
    assert set(told.raw) >= {"3000: scratch prompt_s", "3000: next hash_s"}


def test_k2_k5_d13_d19_cache(tmp_path: Path) -> None:
    told = run("cache", tmp_path)
    came, teams, saves, restores = told.tables
    n = len(prefix_cache_scenarios.SMALL.totals)
    assert len(came.rows) == 5 * n
    cached = dict(zip(came.columns, zip(*came.rows, strict=True), strict=True))
    computed = [int(c) for c in cached["Computed"] if c != "-"]
    cold, warm, hot, same = computed[-4:]
    assert cold > 4 * hot
    assert cold > 4 * warm
    assert cold > 4 * same
    assert (len(teams.rows), len(saves.rows), len(restores.rows)) == (1, 4, 3)
    assert next(t for t in told.targets if t.name.startswith("team start")).is_met
    assert next(t for t in told.targets if t.name.startswith("written")).is_met
    # Whether it is met is for the full command on a quiet machine to say.
    assert next(t for t in told.targets if t.name.startswith("hot TTFT saved")).value >= 0


@pytest.mark.soak
def test_k1_k3_serve_beside_another_server_and_count_tokens(tmp_path: Path) -> None:
    told = run("peers", tmp_path)
    titles = [table.title for table in told.tables]
    crowd = told.tables[titles.index("Agents at once")]
    assert column(crowd, "Server") == ["mlx-stack"] * 2 + ["mlx_lm.server"] * 2
    assert column(crowd, "Requests") == ["1", "2"] * 2
    assert column(crowd, "Total tokens") == ["12", "24"] * 2
    assert "Ours against mlx_lm.server" in titles
    counts = told.tables[titles.index("26 token counts at once while three agents decode")]
    assert column(counts, "Server") == ["mlx-stack"]
    assert len(told.targets) == 17
    taken = told.tables[titles.index("The path that each scene took")]
    assert column(taken, "Scene") == [f"mlx-stack: {scene}" for scene in SCENES]
    own = {n.removeprefix("mlx-stack: "): v for n, v in told.raw.items() if "path" in n}
    check_path(own, SCENES)
    with pytest.raises(Broken, match="scene `team`: no prompt token was reused"):
        check_path({**own, "path team: reused": (0.0,)}, SCENES)
    with pytest.raises(Broken, match="scene `crowds`: no two rows"):
        check_path({**own, "path crowds: rows": own["path crowds: steps"]}, SCENES)


@pytest.mark.soak
def test_peers_on_a_folder_speak_real_text(tmp_path: Path) -> None:
    folder = stage(tmp_path).model
    told = run("peers", tmp_path, model=folder, scenes=("turns", "crowds"))
    names = [target.name for target in told.targets]
    for row in ("cold prompt's TTFT", "next turn's TTFT", "TTFT of the last of 2 newcomers"):
        assert any(name.startswith(f"{row}, against mlx_lm.server") for name in names)
    assert [name for name in names if name.startswith("decode of 2 agents, against")]
    assert "same prompt again, against in process" in names
    assert "decode of 1, against mlx_lm.server" in names
    (ours,), (theirs,) = (told.raw[f"{name}: n cold"] for name in ("mlx-stack", "mlx_lm.server"))
    assert ours == theirs, "the same prompt"


async def test_k1_a_sequential_run_has_no_speedup(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(SERVE, crowd=(1,), n_answer=60)
    slots = SlotSpec(count=1, n_ctx=512)
    async with service(stage(tmp_path), "x", slots) as server, TimedClient(server) as caller:
        await crowds(caller, plan, Yardstick(), "warm up")
        first = await crowds(caller, plan, Yardstick(), "a")
        second = await crowds(caller, plan, Yardstick(), "b")
    assert first["crowd 1: tokens"] == second["crowd 1: tokens"] == (60.0,)
    for figures in (first, second):
        (latency,) = figures["crowd 1: latency"]
        assert latency <= figures["crowd 1: seconds"][0], "the run is its one request"


async def test_a_server_that_refuses_is_an_error_in_words(tmp_path: Path) -> None:
    async with service(stage(tmp_path), "x", SlotSpec(count=1, n_ctx=512)) as server:
        other = TimedClient(ServerUnderTest("other", server.url + "/nowhere", "m"))
        with pytest.raises(Broken, match="other answered HTTP 404"):
            await other.yardstick()
        await other.close()


def test_a_child_that_breaks_says_why(tmp_path: Path) -> None:
    bare = Sandbox(tmp_path, dict(os.environ), str(tmp_path / "none"), lambda _: None)
    with pytest.raises(Broken, match="there is no folder"):
        measure(bare, [SingleFloor(1, 2)])
    assert measure(bare, [LoadFiles(str(tmp_path))])[0].of("mx.load", "bytes") == (0.0,)
    with pytest.raises(KeyError, match="nothing of nobody"):
        BenchResult().of("nobody", "nothing")


def test_the_command_prints_json() -> None:
    command = [
        sys.executable,
        "-m",
        "mlxstack.cli.main",
        "bench",
        "dev",
        "text",
        "--small",
        "--json",
    ]
    done = subprocess.run([*command, "--passes", "1"], capture_output=True, check=True)
    (told,) = msgspec.json.decode(done.stdout, type=list[BenchReport])
    assert told.name == "bench dev text"
    assert told.command.endswith("bench dev text --small --json --passes 1")


@pytest.mark.parametrize(
    "args", [["none"], ["cache", "--url", "http://127.0.0.1:1"], ["serve", "--scene", "dinner"]]
)
def test_the_command_refuses_what_makes_no_sense(args: list[str]) -> None:
    command = [sys.executable, "-m", "mlxstack.cli.main", "bench", "dev", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


def test_one_scene_alone_with_what_it_needs(tmp_path: Path) -> None:
    told = run("serve", tmp_path, scenes=("joining",))
    assert [table.title for table in told.tables] == [
        "Time to first token",
        "A cold prompt of 260 tokens joins",
        "The path that each scene took",
    ]
    assert len(told.targets) == 3
    (chart,) = told.charts
    assert [bar.value for bar in chart.bars] == [max(told.raw["mlx-stack: gaps joining"])]
    with pytest.raises(BadRequest, match="no scene `dinner`; there is turns, crowds"):
        run("serve", tmp_path / "again", scenes=("dinner",))


def test_an_image_joins_three_decoding_agents(tmp_path: Path) -> None:
    told = run("serve", tmp_path, scenes=("picture",))
    shown, taken = told.tables
    assert shown.title == "A picture of 64 x 64 pixels joins"
    # 3 x 3 features with a token after each row, and the words around them.
    assert told.raw["mlx-stack: n picture"][0] >= 12
    assert column(taken, "Scene") == ["mlx-stack: picture"]
    (target,) = told.targets
    assert target.name == "worst gap while a picture joins, against max_stall_ms"
    assert max(told.raw["mlx-stack: gaps shown"]) > 0


def test_the_command_names_every_scene() -> None:
    assert bench.SCENES == tuple(SCENES) == SERVE.scenes


@pytest.mark.soak
def test_gateway(tmp_path: Path) -> None:
    told = run("gateway", tmp_path)
    ways, idle = told.tables
    assert column(ways, "Way") == ["direct", "gateway"] and idle.rows[0][0] == "20"
    assert len(told.targets) == 3
    assert all(min(values) > 0 for values in told.raw.values())
