"""`mlx-stack` alone in a terminal: state, recommended model, and three keys."""

import os
import shlex
import sys
import termios
import tty

import typer
from msgspec import Struct

from mlxstack.cli.commands.status import show, surveyed
from mlxstack.cli.output import note, say, spinner
from mlxstack.cli.start_offer import recommended
from mlxstack.core.errors import SetupError
from mlxstack.core.formatting import tokens
from mlxstack.host import services
from mlxstack.host.coding_clients import is_large_enough
from mlxstack.host.home import Home, home_from
from mlxstack.policy.memory.capacity_advice import AGENT_TOKENS

ENTER = ("\r", "\n")


class KeyCommand(Struct, frozen=True):
    """Key that runs a command, given without `mlx-stack`."""

    key: str
    arguments: tuple[str, ...]
    description: str


def choose() -> tuple[str, ...]:
    """Arguments of the command that the user picks by a key.

    Enter picks the first. Raises typer.Exit for any other key.
    """
    home = home_from(os.environ)
    show(surveyed(None, False), False)
    commands = _of_running(home) if services.running(home) else _of_idle(home)
    say("")
    for command in commands:
        say(
            f"  [{command.key}] mlx-stack {shlex.join(command.arguments):<40} {command.description}"
        )
    key = _pressed("\nPress a key; any other leaves. `mlx-stack --help` lists all commands.")
    if key in ENTER:
        key = commands[0].key
    picked = next((command for command in commands if command.key == key), None)
    if picked is None:
        raise typer.Exit
    say(f"> mlx-stack {shlex.join(picked.arguments)}")
    return picked.arguments


def _of_running(home: Home) -> tuple[KeyCommand, ...]:
    n_ctx = max(state.spec.n_ctx for state in services.running(home))
    client = KeyCommand("r", ("run", "claude"), "start Claude Code on it")
    if not is_large_enough("claude", n_ctx):
        client = KeyCommand("d", ("down",), "stop it")
    return (
        KeyCommand("c", ("chat",), "talk to the model"),
        client,
        KeyCommand("t", ("tui",), "watch agents, cache and memory"),
    )


def _of_idle(home: Home) -> tuple[KeyCommand, ...]:
    demo = KeyCommand("d", ("up", "demo"), "start the tiny model that comes with it")
    plan = KeyCommand("p", ("plan",), "see which models fit this machine")
    try:
        with spinner("looking for a model that fits this machine"):
            offer = recommended(home)
    except SetupError as error:
        note(f"note: {error.message}")
        return (demo, plan)
    size = f"{offer.n_agents} x {tokens(AGENT_TOKENS)} tokens"
    start = ("up", offer.preset, *offer.options)
    return (KeyCommand("u", start, f"start the recommended model, {size}"), demo, plan)


def _pressed(prompt: str) -> str:
    """The next key that is pressed after the prompt."""
    keyboard = sys.stdin.fileno()
    attributes = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard, termios.TCSAFLUSH)
        say(prompt)
        return os.read(keyboard, 1).decode(errors="replace")
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, attributes)
