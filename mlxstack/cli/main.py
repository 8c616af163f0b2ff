"""The `mlx-stack` command: its verbs, and how its errors reach a person."""

import io
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from mlxstack import __version__
from mlxstack.cli.commands import (
    agents,
    bench,
    cache,
    doctor,
    down,
    env,
    install,
    key,
    logs,
    mode,
    plan,
    presets,
    serve,
    slots,
    status,
    swap,
    template,
    tui,
    up,
)
from mlxstack.cli.exit_codes import Exit, Misuse, exit_of
from mlxstack.core.errors import StackError, Unauthorized
from mlxstack.host.restart_policy import launchd_code, take_launchd_flag

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    name="mlx-stack",
    help="Many coding agents, one model, one machine.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mlx-stack {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Many coding agents, one model, one machine."""


app.command("up")(up.up)
app.command("down")(down.down)
app.command("restart")(up.restart)
app.command("status")(status.status)
app.command("ps")(status.ps)
app.command("logs")(logs.logs)
app.add_typer(presets.app, name="presets")
app.command("env")(env.env)
app.command("run", context_settings=PASS_ON)(env.run)
app.command("plan")(plan.plan)
app.command("spec")(plan.spec)
app.command("install")(install.install)
app.command("uninstall")(install.uninstall)
app.command("key")(key.key)
app.command("doctor")(doctor.doctor)
app.command("tui")(tui.tui)
app.add_typer(bench.app, name="bench")
app.add_typer(mode.app, name="mode")
app.add_typer(slots.app, name="slots")
app.add_typer(agents.app, name="agents")
app.command("swap")(swap.swap)
app.command("template")(template.template)
app.add_typer(cache.app, name="cache")
app.command("serve", hidden=True)(serve.serve)


def main() -> None:
    """Run one verb, and exit with a code that the supervisor of the system understands."""
    is_launchd = take_launchd_flag(os.environ)
    try:
        _run()
    except SystemExit as end:
        if is_launchd and isinstance(end.code, int):
            sys.exit(launchd_code(end.code))
        raise


def _run() -> None:
    """Run one verb; an error is one sentence on stderr and an exit code (see `exits.py`)."""
    sys.stdout, sys.stderr = _tolerant(sys.stdout), _tolerant(sys.stderr)
    signal.signal(signal.SIGTERM, _leave)
    try:
        app()
    except (Misuse, StackError, ConnectionError) as why:
        typer.echo(f"error: {why}{_hint(why)}", err=True)
        sys.exit(exit_of(why))
    except OSError as why:
        where = f"{why.filename}: " if why.filename else ""
        remedy = "`mlx-stack doctor` looks at folders, disk and ports"
        typer.echo(f"error: {where}{why.strerror or why}; {remedy}", err=True)
        sys.exit(Exit.FAILED)
    except UnicodeEncodeError as why:
        typer.echo(f"error: {why.object!r} is no UTF-8, and only that is kept and sent", err=True)
        sys.exit(Exit.FAILED)
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)


class PipeWriter(io.FileIO):
    """Output that ends the process quietly once its reader has closed the pipe.

    Raises SystemExit, which passes through click and rich; both would make a failure of it.
    """

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write to the descriptor. Raises SystemExit where nothing reads it any more."""
        try:
            return super().write(data)
        except BrokenPipeError:
            # What is still buffered goes nowhere, without a word at the exit of the interpreter.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            sys.exit(Exit.PIPE_CLOSED)


def _tolerant(stream: TextIO) -> TextIO:
    """The stream with letters spelled out that its terminal lacks, and a pipe that may close."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        raw = PipeWriter(stream.fileno(), "wb", closefd=False)
    except OSError:
        stream.reconfigure(errors="backslashreplace")
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
    )


def _leave(number: int, _: object) -> None:
    """Like Ctrl-C: what was begun and is not finished is undone."""
    sys.exit(128 + number)


def _hint(error: Exception) -> str:
    if not isinstance(error, Unauthorized):
        return ""
    from mlxstack.cli.target import KEY_VARIABLE

    return f"; this command sends the key that {KEY_VARIABLE} holds"


if __name__ == "__main__":
    main()
