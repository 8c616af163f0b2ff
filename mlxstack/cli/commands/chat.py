"""`chat`: a conversation with a model in the terminal."""

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.commands.slots import Url
from mlxstack.cli.completion import service_names
from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.output import note

if TYPE_CHECKING:
    from mlxstack.cli.chat_session import ChatSession
    from mlxstack.cli.target import ServiceTarget

HELP = """/agent NAME  continue this agent, or start it    /new     start a new conversation
/system TEXT  set the system prompt                /help    show this
/exit         leave; so does Ctrl-D. Ctrl-C stops an answer."""


def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A service, preset, model id or folder (default: the running service).",
            autocompletion=service_names,
        ),
    ] = None,
    url: Url = None,
    agent: Annotated[
        str | None, typer.Option("--agent", help="Continue this agent, or start it.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="Answer this prompt and exit.")
    ] = None,
) -> None:
    """Chat with a model in the terminal.

    Each turn shows reused and new tokens, and tokens per second.
    Piped input is one prompt: echo "Why is the sky blue?" | mlx-stack chat
    """
    import asyncio

    from mlxstack.cli.chat_session import ChatSession
    from mlxstack.cli.services.member_start import start_member

    where = _service(model, url)
    start_member(where)
    session = ChatSession(where, agent, system)
    text = prompt if prompt is not None else _piped()
    if text is None:
        asyncio.run(_talk(session))
    elif not text.strip():
        raise Misuse("the prompt is empty")
    else:
        asyncio.run(_answer_once(session, text))


def _service(model: str | None, url: str | None) -> "ServiceTarget":
    from mlxstack.cli.services.start_offer import running_or_offered, service_of
    from mlxstack.cli.target import target
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    if url is not None:
        return target(home, None, url)
    if model is None:
        return running_or_offered(home, "a chat")
    return target(home, service_of(home, model), None)


def _piped() -> str | None:
    return None if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()


async def _answer_once(session: "ChatSession", text: str) -> None:
    async with session:
        turn = await session.answer(text, lambda piece: typer.echo(piece, nl=False))
        typer.echo()
        note(turn.summary)
        if turn.is_stopped:
            raise KeyboardInterrupt


async def _talk(session: "ChatSession") -> None:
    async with session:
        note(f"{session.title}. /help lists commands, Ctrl-D leaves.")
        while (line := _read_line()) is not None:
            if line.startswith("/"):
                if not await _command(session, line):
                    return
            elif line.strip():
                await _turn(session, line)


async def _turn(session: "ChatSession", text: str) -> None:
    from mlxstack.core.errors import StackError

    try:
        turn = await session.answer(text, lambda piece: typer.echo(piece, nl=False))
    except (StackError, ConnectionError) as why:
        note(f"error: {why}")
        return
    typer.echo()
    is_plain = "NO_COLOR" in os.environ
    note(turn.summary if is_plain else typer.style(turn.summary, dim=True))


def _read_line() -> str | None:
    """Input line; None at the end. Ctrl-C clears the line."""
    import readline  # noqa: F401 - gives input() its line editing

    while True:
        try:
            return input("> ")
        except EOFError:
            typer.echo()
            return None
        except KeyboardInterrupt:
            typer.echo()


async def _command(session: "ChatSession", line: str) -> bool:
    """Run a command of the chat; False ends it."""
    verb, _, rest = line[1:].strip().partition(" ")
    match verb:
        case "exit" | "quit" | "bye":
            return False
        case "agent" if rest.strip():
            note(await session.continue_agent(rest.strip()))
        case "new":
            session.start_over()
            note("new conversation")
        case "system" if rest.strip():
            session.start_over(rest.strip())
            note("new conversation with this system prompt")
        case _:
            note(HELP)
    return True
