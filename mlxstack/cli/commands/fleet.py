"""`bench fleet`: sessions of agents on any server, in turns per minute."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.output import note, say
from mlxstack.cli.verbs import VerbResult
from mlxstack.core.errors import SetupError

if TYPE_CHECKING:
    from mlxstack.bench.fleet.play import FleetPlan
    from mlxstack.bench.fleet.session import RecordedSession
    from mlxstack.bench.report import BenchReport, Results

MAX_WIDTH = 64
"""Agents at a time."""
KEY_VARIABLE = "MLX_STACK_BENCH_KEY"

UrlsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="URL", help="Servers; none: the running service.")
]
ModelFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Start mlx-stack, mlx_lm.server and, where it is on the PATH, vllm-mlx on this model.",
    ),
]
ModelName = Annotated[
    str | None, typer.Option("--model-name", help="Name at the URLs; default: the first model.")
]
Widths = Annotated[str, typer.Option("--agents", help="Agents at a time, by commas.")]
Clients = Annotated[
    str | None, typer.Option("--clients", help="Sessions of these clients only, by commas.")
]
Sessions = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Sessions of your own, in the form of ours.")
]
Passes = Annotated[int, typer.Option(min=1, help="How often everything is played.")]
Turns = Annotated[int | None, typer.Option(min=1, help="Turns of each session; default: all.")]
Pauses = Annotated[float, typer.Option(min=0, help="Factor of the recorded pauses of tools.")]
AsText = Annotated[
    bool,
    typer.Option("--as-text", help="Send tools and calls as text: for templates without tools."),
]
Anthropic = Annotated[bool, typer.Option("--anthropic", help="Use Anthropic's Messages API.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown, for docs.")]
Svg = Annotated[Path | None, typer.Option(help="Folder for the chart, as SVG.")]


def fleet(  # noqa: PLR0913, PLR0917 - each is an option that a person types
    urls: UrlsArgument = None,
    model: ModelFolder = None,
    model_name: ModelName = None,
    agents: Widths = "1,2,4,8",
    clients: Clients = None,
    sessions: Sessions = None,
    passes: Passes = 1,
    turns: Turns = None,
    pauses: Pauses = 1.0,
    as_text: AsText = False,
    anthropic: Anthropic = False,
    markdown: Markdown = False,
    svg: Svg = None,
) -> VerbResult:
    """Play recorded sessions of coding agents; count turns per minute.

    Sessions of Claude Code, Codex and pi repair a small project: the same prompts for
    every server, answers of the recorded lengths, the pauses of tools between them. Each width
    plays as many sessions as the largest width has agents; a run shares no prompt with another.
    The key of another server is read from MLX_STACK_BENCH_KEY.
    """
    from mlxstack.bench.fleet.play import FleetPlan
    from mlxstack.bench.fleet.session import FOLDER
    from mlxstack.bench.fleet.wire import FleetDialect

    if urls and model is not None:
        raise Misuse("give URLs of running servers, or --model to start servers, not both")
    widths = _widths(agents)
    plan = FleetPlan(
        sessions=_sessions(sessions or FOLDER, clients),
        widths=widths,
        n_agents=max(widths),
        dialect=FleetDialect.ANTHROPIC if anthropic else FleetDialect.OPENAI,
        pauses=pauses,
        max_requests=turns,
        is_text=as_text,
    )
    report = _played(plan, passes, urls or [], model, model_name)
    if svg is not None:
        _draw(report, svg)
    return VerbResult(report, lambda: _print(report, is_markdown=markdown))


def _widths(text: str) -> tuple[int, ...]:
    """Widths in rising order. Raises Misuse for what is none."""
    try:
        widths = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise Misuse(f"--agents {text}: numbers by commas are needed, such as 1,2,4,8") from error
    if not 1 <= widths[0] <= widths[-1] <= MAX_WIDTH:
        raise Misuse(f"--agents {text}: 1 to {MAX_WIDTH} agents at a time are possible")
    return widths


def _sessions(folder: Path, clients: str | None) -> tuple["RecordedSession", ...]:
    """Sessions of a folder, of `clients` only. Raises Misuse for an unknown client."""
    from mlxstack.bench.fleet.session import sessions

    recorded = sessions(folder)
    if clients is None:
        return recorded
    by_client = {session.client: session for session in recorded}
    names = clients.split(",")
    unknown = [name for name in names if name not in by_client]
    if unknown:
        raise Misuse(f"no session of `{unknown[0]}`; there is {', '.join(by_client)}")
    return tuple(by_client[name] for name in names)


def _played(
    plan: "FleetPlan", passes: int, urls: list[str], model: Path | None, model_name: str | None
) -> "BenchReport":
    from datetime import UTC, datetime

    from mlxstack.bench.environment import conditions, ended
    from mlxstack.bench.report import BenchReport

    before = conditions(str(model or model_name or ""), datetime.now(UTC).date(), os.environ)
    if model is None:
        results = _on_servers(plan, passes, urls, model_name)
    else:
        results = _on_model(plan, passes, model)
    return BenchReport(
        name="bench fleet",
        command=shlex.join(["mlx-stack", *sys.argv[1:]]),
        conditions=ended(before),
        tables=results.tables,
        raw=results.raw,
        charts=results.charts,
    )


def _on_servers(
    plan: "FleetPlan", passes: int, urls: list[str], model_name: str | None
) -> "Results":
    import uvloop

    from mlxstack.bench.fleet.bench import FleetRequest, find_model, run_servers
    from mlxstack.cli.target import address, key_of

    async def play() -> "Results":
        if urls:
            key = key_of(os.environ.get(KEY_VARIABLE), KEY_VARIABLE)
            servers = [await find_model(address(url), model_name, key) for url in urls]
        else:
            own, key = _own_service()
            servers = [await find_model(own, model_name, key)]
        return await run_servers(FleetRequest(plan, passes, tuple(servers)), note)

    return uvloop.run(play())


def _own_service() -> tuple[str, str | None]:
    """URL and key of the running service."""
    from mlxstack.cli.target import target
    from mlxstack.host.home import home_from

    where = target(home_from(os.environ), None, None)
    return where.url, where.api_key


def _on_model(plan: "FleetPlan", passes: int, model: Path) -> "Results":
    import tempfile

    import uvloop

    from mlxstack.bench.environment import child_env
    from mlxstack.bench.fleet.bench import FleetRequest, run_model
    from mlxstack.bench.servers import Sandbox

    if not model.is_dir():
        raise SetupError(f"--model {model}: there is no such folder")
    with tempfile.TemporaryDirectory(prefix="mlx-stack-fleet-") as folder:
        stage = Sandbox(Path(folder), child_env(os.environ), str(model.resolve()), note)
        return uvloop.run(run_model(stage, FleetRequest(plan, passes)))


def _draw(report: "BenchReport", folder: Path) -> None:
    from mlxstack.bench.svg_chart import write

    for file in write(report, folder):
        note(f"wrote {file}")


def _print(report: "BenchReport", *, is_markdown: bool) -> None:
    from rich.console import Console

    from mlxstack.bench.report import markdown, show

    if is_markdown:
        say(markdown(report))
    else:
        show(report, Console(width=None if sys.stdout.isatty() else 160))
