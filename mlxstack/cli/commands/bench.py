"""`bench dev`: benchmarks of mlx-stack itself, against targets and other servers."""

import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.commands import measure
from mlxstack.cli.commands.fleet import fleet
from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.output import as_json, note, say
from mlxstack.cli.verbs import Json, VerbApp
from mlxstack.core.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mlxstack.bench.dev.registry import BenchRequest
    from mlxstack.bench.report import BenchReport
    from mlxstack.bench.servers import ServerUnderTest

SCENES = ("turns", "crowds", "short", "joining", "picture", "counts", "team", "requests")
SCENES_HELP = f"Play this one only; again for more. {', '.join(SCENES)}."
NAMES = (
    "engine",
    "drafts",
    "early",
    "cache",
    "text",
    "serve",
    "peers",
    "start",
    "tui",
    "gateway",
    "person",
    "simulate",
    "all",
)

ONLY_FOR = {"--scenario": "simulate", "--draft": "drafts"}
"""Options of one benchmark."""

ModelOption = Annotated[
    str, typer.Option(help="`random` (26 M parameters), `demo`, a folder, or a hub id.")
]
MaxTokensOption = Annotated[
    int | None, typer.Option(min=2, help="serve, peers: tokens of an answer.")
]
UrlOption = Annotated[
    str | None, typer.Option(help="serve: a running service instead of one of our own.")
]
PeerOption = Annotated[
    str | None,
    typer.Option(help="serve: another OpenAI-compatible server beside it; it sees no key."),
]
DraftOption = Annotated[
    str | None, typer.Option(help="drafts: draft model or drafter of the folder in --model.")
]
ScenarioOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="simulate: agents, machine and limits, a YAML file."),
]


def bench(  # noqa: PLR0913, PLR0917 - each is an option that a person types
    benchmark: Annotated[
        str,
        typer.Argument(
            metavar="|".join(NAMES), help="Benchmark to run.", autocompletion=lambda: NAMES
        ),
    ],
    model: ModelOption = "random",
    passes: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 3,
    max_tokens: MaxTokensOption = None,
    url: UrlOption = None,
    vs: PeerOption = None,
    vs_model: Annotated[str, typer.Option(help="serve: the model's name there.")] = "default_model",
    scene: Annotated[list[str] | None, typer.Option(help=SCENES_HELP)] = None,
    scenario: ScenarioOption = None,
    draft: DraftOption = None,
    small: Annotated[bool, typer.Option("--small", help="Smoke test with a tiny model.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for docs.")] = False,
    svg: Annotated[
        Path | None, typer.Option(help="Folder for the charts, as SVG in light and dark.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure speed and memory of a checkout against targets.

    engine: our batch and mlx-lm's in one process. drafts: speculative decoding, with and without.
    early: the turn after a pause, begun early or not. cache: agents that come back, start together,
    are saved. text: the text work of a request. serve: a service under many agents. peers: the same
    beside mlx_lm.server, and vllm-mlx where it is on the PATH, on the same model; real text for a
    folder as --model. start: how soon the command answers. tui: what an attached dashboard costs.
    gateway: the way through a gateway against the one beside it. person: the first token of a turn
    beside three busy sub-agents. simulate: waiting times of agents on imagined hardware, by the
    real scheduler. all: every one but person, simulate and serve, whose scenes are in peers.
    """
    if find_spec("mlxstack.bench.dev") is None:
        raise Unsupported(
            "`mlx-stack bench dev` needs a checkout of the source: an installed package has no "
            "developers' benchmarks"
        )
    from mlxstack.bench.dev.registry import BenchRequest

    given = {"--scenario": scenario, "--draft": draft}
    _check(benchmark, scene or [], given, is_serve_only=bool(url or vs))
    own = _server("mlx-stack", url, model, _key())
    # The key opens our service; another server never sees it.
    peer = _server(vs or "", vs, vs_model, None)
    request = BenchRequest(
        _path(model), passes, max_tokens, small, own, peer, tuple(scene or ()), scenario,
        _path(draft) if draft else None,
    )  # fmt: skip
    reports = []
    for report in _measured(benchmark, request):
        reports.append(report)
        _draw(report, svg)
        if not json:
            _print(report, is_markdown=markdown)
    if json:
        as_json(reports)


def _path(model: str) -> str:
    """A folder as its whole path, which every process finds; other names as they are."""
    if Path(model).is_dir():
        return str(Path(model).resolve())
    return model


def _check(
    benchmark: str, scenes: list[str], given: "Mapping[str, object]", *, is_serve_only: bool
) -> None:
    """Raise Misuse for unknown names, and for options of another benchmark."""
    if benchmark not in NAMES:
        raise Misuse(f"there is no benchmark `{benchmark}`; there is {', '.join(NAMES)}")
    if is_serve_only and benchmark != "serve":
        raise Misuse("--url and --vs go with `bench dev serve`")
    for option, value in given.items():
        if value is not None and benchmark != ONLY_FOR[option]:
            raise Misuse(f"{option} goes with `bench dev {ONLY_FOR[option]}`")
    available = SCENES if benchmark in ("serve", "peers") else ()
    unknown = [scene for scene in scenes if scene not in available]
    if unknown:
        raise Misuse(
            f"no scene `{unknown[0]}` in {benchmark}; there is {', '.join(available) or 'none'}"
        )


def _measured(benchmark: str, request: "BenchRequest") -> "Iterator[BenchReport]":
    """Reports as they are finished: a failure keeps those before it."""
    import tempfile
    from datetime import UTC, datetime

    import httpx

    from mlxstack.bench.dev.registry import EVERYTHING, BenchContext, report
    from mlxstack.client.errors import Unreachable

    command = shlex.join(["mlx-stack", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(prefix="mlx-stack-bench-") as folder:
        today = datetime.now(UTC).date()
        inputs = BenchContext(Path(folder), dict(os.environ), today, command, note)
        names = EVERYTHING if benchmark == "all" else (benchmark,)
        try:
            for name in names:
                yield report(name, request, inputs)
        except httpx.TransportError as error:
            raise Unreachable(f"no answer from {error.request.url} ({error})") from error


def _key() -> str | None:
    from mlxstack.cli.target import key_of
    from mlxstack.host.services import KEY_VARIABLE

    return key_of(os.environ.get(KEY_VARIABLE), KEY_VARIABLE)


def _server(name: str, url: str | None, model: str, key: str | None) -> "ServerUnderTest | None":
    from mlxstack.bench.servers import ServerUnderTest
    from mlxstack.cli.target import address

    if url is not None:
        return ServerUnderTest(name, address(url), model, key)
    return None


def _draw(report: "BenchReport", folder: Path | None) -> None:
    from mlxstack.bench.svg_chart import write

    for file in write(report, folder) if folder is not None else ():
        note(f"wrote {file}")


def _print(report: "BenchReport", *, is_markdown: bool) -> None:
    from rich.console import Console

    from mlxstack.bench.report import markdown, show

    if is_markdown:
        say(markdown(report))
    else:
        show(report, Console(width=None if sys.stdout.isatty() else 160))


app = VerbApp(cls=measure.BenchGroup)
app.without_verb(measure.bench)
app.command("fleet")(fleet)
app.command("dev")(bench)
