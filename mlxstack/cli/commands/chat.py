"""`chat`: a conversation with a model in the terminal."""

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.completion import service_argument
from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.output import note
from mlxstack.cli.service_request import Name, Url

if TYPE_CHECKING:
    from mlxstack.cli.chat_session import ChatSession, ChatTurn
    from mlxstack.cli.target import ServiceTarget

MAX_TOKENS = 2048
"""Default bound of an answer; small models do not always end."""

COMMANDS = {
    "/agent NAME": "continue this agent, or start it",
    "/new": "start a new conversation",
    "/system TEXT": "set the system prompt",
    "/edit": "write the prompt in $EDITOR",
    "/help": "show this",
    "/exit": "leave; so does Ctrl-D. Ctrl-C stops an answer.",
}
SAME = {"clear": "new", "reset": "new", "bye": "exit", "quit": "exit", "?": "help"}
"""Commands of similar tools."""

MORE_LINES = 'More lines: Alt-Enter, or between """ and """. A paste is one prompt.'


def chat(
    model: Annotated[
        str | None,
        service_argument("A service, preset, model id or folder (default: the running service)."),
    ] = None,
    name: Name = None,
    url: Url = None,
    agent: Annotated[
        str | None, typer.Option("--agent", help="Continue this agent, or start it.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    prompt: Annotated[
        str | None, typer.Option("-p", "--prompt", help="Answer this prompt and exit.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, metavar="N", help="Longest answer, in tokens.")
    ] = MAX_TOKENS,
) -> None:
    """Chat with a model in the terminal.

    Each turn shows reused and new tokens, and tokens per second.
    Piped input is one prompt: echo "Why is the sky blue?" | mlx-stack chat
    """
    import asyncio

    from mlxstack.cli.chat_session import ChatSession
    from mlxstack.cli.member_start import start_member
    from mlxstack.cli.target import one_name

    where = _service(one_name(model, name), url)
    start_member(where)
    session = ChatSession(where, agent, system, max_tokens)
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if prompt is None:
        asyncio.run(_talk(session))
    elif not prompt.strip():
        raise Misuse("the prompt is empty; give it with -p, or on the standard input")
    else:
        asyncio.run(_answer_once(session, prompt))


def _service(model: str | None, url: str | None) -> "ServiceTarget":
    from mlxstack.cli.start_offer import running_or_offered, service_of
    from mlxstack.cli.target import target
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    if url is not None:
        return target(home, None, url)
    if model is None:
        return running_or_offered(home, "a chat")
    return target(home, service_of(home, model), None)


async def _answer_once(session: "ChatSession", text: str) -> None:
    async with session:
        turn = await _streamed(session, text)
        note(turn.summary)
        if turn.is_stopped:
            raise KeyboardInterrupt


async def _streamed(session: "ChatSession", text: str) -> "ChatTurn":
    from mlxstack.cli.answer_printer import AnswerPrinter

    printer = AnswerPrinter()
    try:
        return await session.answer(text, printer.feed)
    finally:
        printer.finish()


async def _talk(session: "ChatSession") -> None:
    from mlxstack.cli.chat_input import PromptReader
    from mlxstack.core.errors import StackError

    reader = PromptReader()
    async with session:
        note(f"{session.title}. /help lists commands, Ctrl-D leaves.")
        while (text := reader.read()) is not None:
            try:
                # A path is no command.
                if text.startswith("/") and "/" not in text[1:].partition(" ")[0]:
                    if not await _command(session, text):
                        return
                elif text.strip():
                    await _turn(session, text)
            except (StackError, ConnectionError) as why:
                note(f"error: {why}")


async def _turn(session: "ChatSession", text: str) -> None:
    import shutil
    import textwrap

    turn = await _streamed(session, text)
    is_plain = "NO_COLOR" in os.environ
    summary = textwrap.fill(turn.summary, max(20, shutil.get_terminal_size().columns))
    note(summary, is_dim=not is_plain)


async def _command(session: "ChatSession", line: str) -> bool:
    """Run a command of the chat; False ends it."""
    verb, _, rest = line[1:].strip().partition(" ")
    match verb if SAME.get(verb) == "new" else SAME.get(verb, verb):
        case "exit":
            return False
        case "agent" if rest.strip():
            note(await session.continue_agent(rest.strip()))
        case "new":
            session.start_over()
            note("new conversation")
        case "system" if rest.strip():
            session.start_over(rest.strip())
            note("new conversation with this system prompt")
        case "edit":
            await _edit(session, rest)
        case "help":
            _help()
        case _:
            note(_unknown(verb))
    return True


async def _edit(session: "ChatSession", text: str) -> None:
    from mlxstack.cli.chat_input import edited

    prompt = edited(text)
    if prompt.strip():
        note(f"> {prompt}")
        await _turn(session, prompt)


def _help() -> None:
    wide = max(map(len, COMMANDS))
    for command, text in COMMANDS.items():
        note(f"{command:<{wide}}  {text}")
    note(MORE_LINES)


def _unknown(verb: str) -> str:
    from mlxstack.config.preset_schema import nearest

    for command in COMMANDS:
        name, _, argument = command[1:].partition(" ")
        if verb == name:
            return f"/{verb} needs {argument}"
    near = SAME.get(verb) or nearest(verb, [one[1:].split()[0] for one in COMMANDS])
    return f"unknown: /{verb}; " + (f"did you mean /{near}?" if near else "/help lists commands")
