"""The `mlx-stack` command: its verbs and its errors."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer._click.exceptions import NoArgsIsHelpError, UsageError
from typer.core import TyperGroup

from mlxstack import __version__
from mlxstack.cli import help_text, places
from mlxstack.cli.commands import (
    agents,
    bench,
    cache,
    chat,
    doctor,
    down,
    env,
    install,
    key,
    logs,
    mode,
    models,
    plan,
    presets,
    pull,
    serve,
    slots,
    status,
    swap,
    template,
    tui,
    up,
    usage,
    verify,
    why,
)
from mlxstack.cli.exit_codes import Exit, Misuse, PipeClosed, exit_of
from mlxstack.cli.output import is_interactive, note, say
from mlxstack.cli.streams import prepare_streams
from mlxstack.cli.verbs import VerbApp
from mlxstack.control.final_exit_codes import launchd_code, take_launchd_flag
from mlxstack.core.errors import StackError, Unauthorized

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
HELP = "Serve one local model to many coding agents."
FIRST = "First session: up demo, chat, tui; then up MODEL, run claude."
NO_INTEGER = "Input should be a valid integer, unable to parse string as an integer"
AT_LEAST = re.compile(r"Input should be greater than or equal to (\S+)")

ROOT = "/"
"""Folder of a command whose own was deleted: every computer has it."""

NEAR = 60
"""Characters that are shown around one that cannot be encoded."""

HUB = "https://huggingface.co/mlx-community, then `mlx-stack up ID`"
UPDATE = "git pull in the clone, then `uv tool install --force .` (docs/installation.md)"

ELSEWHERE = {
    **dict.fromkeys(("start", "load", "server"), "mlx-stack up MODEL"),
    **dict.fromkeys(("unload", "kill", "quit"), "mlx-stack down"),
    "tags": "mlx-stack models",
    **dict.fromkeys(("get", "download"), "mlx-stack pull MODEL"),
    **dict.fromkeys(("remove", "delete"), "mlx-stack rm MODEL"),
    **dict.fromkeys(("integrations", "agent"), "mlx-stack run CLIENT"),
    **dict.fromkeys(("top", "monitor", "ui", "dashboard"), "mlx-stack tui"),
    **dict.fromkeys(("info", "health"), "mlx-stack status"),
    **dict.fromkeys(("generate", "prompt", "ask"), "mlx-stack chat"),
    **dict.fromkeys(("show", "config"), "mlx-stack presets show NAME"),
    **dict.fromkeys(("check", "diagnose"), "mlx-stack doctor"),
    **dict.fromkeys(("create", "new"), "mlx-stack presets new NAME --from MODEL"),
    **dict.fromkeys(("login", "signin"), "hf auth login"),
    **dict.fromkeys(("search", "find", "browse"), HUB),
    **dict.fromkeys(("update", "upgrade", "self-update"), UPDATE),
    "benchmark": "mlx-stack bench",
}
"""Verbs of similar tools, and their equivalents here.

Ollama, LM Studio, oMLX, Rapid-MLX and vLLM.
"""


def translated(arguments: list[str]) -> list[str]:
    """Arguments, with the verbs of similar tools in our own.

    `version`, `help VERB` and `launch CLIENT`.
    """
    match arguments:
        case ["version" | "-V", *_]:
            return ["--version"]
        case ["help", *verb]:
            return [*verb, "--help"]
        case ["launch", *client]:
            return ["run", *client]
    return arguments


class VerbGroup(TyperGroup):
    """Group that answers the verbs of other tools with their equivalent."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in groups."""
        help_text.write_groups(self, ctx, formatter)

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Context of a command line, with plain names of values."""
        help_text.name_types(self)
        return super().make_context(info_name, args, parent, **extra)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb. Raises UsageError for one that only other tools have."""
        verb = args[0]
        if verb == "serve" and not "".join(args[1:2]).endswith(".json"):
            ctx.fail(f"`serve` is internal; use `mlx-stack up {' '.join(args[1:2]) or 'MODEL'}`")
        if self.get_command(ctx, verb) is None and verb in ELSEWHERE:
            ctx.fail(f"there is no `{verb}` here; use {_as_code(ELSEWHERE[verb])}")
        return super().resolve_command(ctx, args)


def _as_code(text: str) -> str:
    command, comma, remark = text.partition(", ")
    if command.startswith(("mlx-stack", "hf ")):
        return f"`{command}`{comma}{remark}"
    return text


app = VerbApp(
    name="mlx-stack",
    cls=VerbGroup,
    help=HELP,
    epilog=FIRST,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(is_asked: bool) -> None:
    if is_asked:
        say(f"mlx-stack {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Serve one local model to many coding agents."""


for verb in (
    up.up, down.down, up.restart, status.status, status.ps, logs.logs, pull.pull, models.models,
    models.rm, env.env, env.run, plan.plan, plan.spec, install.install, install.uninstall, key.key,
    doctor.doctor, verify.verify, tui.tui, chat.chat, swap.swap, template.template,
    usage.usage, why.why,
):  # fmt: skip
    app.command(context_settings=PASS_ON if verb is env.run else None)(verb)
app.command(hidden=True, context_settings=PASS_ON)(serve.serve)
app.command("stop", hidden=True)(down.down)
for alias in ("ls", "list"):
    app.command(alias, hidden=True)(models.models)
for group in (presets, bench, mode, slots, agents, cache):
    app.add_typer(group.app, name=group.__name__.rpartition(".")[2])


def main() -> None:
    """Run one verb; the exit code suits launchd where launchd started it."""
    # The hub's client takes an empty address or folder for one that was set.
    for name in [name for name in os.environ if name.startswith("HF_") and not os.environ[name]]:
        del os.environ[name]
    is_launchd = take_launchd_flag(os.environ)
    prepare_streams()
    try:
        _leave_deleted_folder()
        places.settle(os.environ)
        _run()
    except PipeClosed:
        sys.exit(Exit.PIPE_CLOSED)
    except SystemExit as end:
        if is_launchd and isinstance(end.code, int):
            sys.exit(launchd_code(end.code))
        raise


def _run() -> None:
    """Run a verb; errors become one stderr line and exit code."""
    # As Ctrl-C does, so that unfinished work is undone.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        sys.exit(app(_arguments(), standalone_mode=False))
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(Exit.USAGE)
    except UsageError as error:
        note(f"error: {_one_line(error)}")
        sys.exit(Exit.USAGE)
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except typer.Abort:
        sys.exit(Exit.INTERRUPTED)
    except (Misuse, StackError, ConnectionError) as error:
        note(f"error: {error}{_hint(error)}")
        sys.exit(exit_of(error))
    except OSError as error:
        where = ""
        if error.filename:
            where = f"{error.filename}: "
        remedy = "`mlx-stack doctor` checks folders, disk and ports"
        note(f"error: {where}{error.strerror or error}; {remedy}")
        sys.exit(Exit.FAILED)
    except UnicodeEncodeError as error:
        near = error.object[max(0, error.start - NEAR) : error.end + NEAR]
        note(f"error: {near!r} is not valid UTF-8")
        sys.exit(Exit.FAILED)
    except KeyboardInterrupt:
        sys.exit(Exit.INTERRUPTED)


def _arguments() -> list[str]:
    """Arguments of the command line, or those that the first screen gives."""
    arguments = sys.argv[1:]
    if arguments or not (is_interactive() and sys.stdout.isatty()):
        return translated(arguments)
    from mlxstack.cli.first_screen import choose

    return [*choose()]


def _leave_deleted_folder() -> None:
    """Change to the root folder if the current folder was deleted."""
    try:
        Path.cwd()
    except OSError as error:
        os.chdir(ROOT)
        note(f"warning: the current folder is not there ({error.strerror}); paths begin at {ROOT}")


def _one_line(error: UsageError) -> str:
    """Message for an unparsable command line, with a help pointer."""
    message = " ".join(error.format_message().split()).rstrip(".")
    message = message.replace(NO_INTEGER, "not a whole number")
    message = AT_LEAST.sub(r"must be at least \1", message)
    if "mlx-stack " in message or error.ctx is None:
        return message
    return f"{message}; see `{error.ctx.command_path} --help`"


def _hint(error: Exception) -> str:
    if not isinstance(error, Unauthorized):
        return ""
    from mlxstack.host.services import KEY_VARIABLE

    return f"; this command sends the key that {KEY_VARIABLE} holds"


if __name__ == "__main__":
    main()
