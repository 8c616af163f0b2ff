"""`chat`: a conversation with a model in the terminal."""

import os
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxstack.cli.completion import service_argument
from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.output import note
from mlxstack.cli.service_request import Name, Url

if TYPE_CHECKING:
    from mlxstack.cli.chat_images import ChatImage
    from mlxstack.cli.chat_session import ChatSession, ChatTurn
    from mlxstack.cli.target import ServiceTarget

MAX_TOKENS = 2048
"""Default bound of an answer; small models do not always end."""

COMMANDS = {
    "/agent NAME": "continue this agent, or start it",
    "/image FILE": "send an image with the next prompt; a file may also be dropped on the prompt",
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
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", metavar="FILE", help="Image for the first prompt; repeatable."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, metavar="N", help="Longest answer, in tokens.")
    ] = MAX_TOKENS,
) -> None:
    """Chat with a model in the terminal.

    Each turn shows reused and new tokens, and tokens per second.
    Piped input is one prompt: echo "Why is the sky blue?" | mlx-stack chat
    """
    from mlxstack.cli.chat_images import read_image
    from mlxstack.cli.chat_session import ChatSession
    from mlxstack.cli.gateway_member import start_member
    from mlxstack.cli.target import one_name

    images = [read_image(file) for file in image or ()]
    where = _service(one_name(model, name), url)
    start_member(where)
    session = ChatSession(where, agent, system, max_tokens)
    if prompt is None and not sys.stdin.isatty():
        prompt = sys.stdin.read()
    if prompt is None:
        _run(_talk(session, images))
    elif not prompt.strip():
        raise Misuse("the prompt is empty; give it with -p, or on the standard input")
    else:
        _run(_answer_once(session, prompt, images))


def _run(chat: Coroutine[Any, Any, None]) -> None:
    """Run the chat; SIGTERM cancels it, and ends the command."""
    import asyncio

    async def until_terminated() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await chat

    try:
        asyncio.run(until_terminated())
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)


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


async def _answer_once(session: "ChatSession", text: str, images: list["ChatImage"]) -> None:
    async with session:
        for image in images:
            session.attach(image)
        turn = await _streamed(session, text)
        note(turn.summary)
        if turn.is_stopped:
            raise KeyboardInterrupt


async def _streamed(session: "ChatSession", text: str) -> "ChatTurn":
    from mlxstack.cli.answer_printer import AnswerPrinter

    printer = AnswerPrinter(is_raw=session.is_base)
    try:
        return await session.answer(text, printer)
    finally:
        printer.finish()


async def _talk(session: "ChatSession", images: list["ChatImage"]) -> None:
    from mlxstack.cli.chat_input import PromptReader
    from mlxstack.core.errors import StackError

    reader = PromptReader(COMMANDS)
    async with session:
        note(f"{session.title}. /help lists commands, Ctrl-D leaves.")
        for image in images:
            _attach(session, image)
        while (text := await reader.read()) is not None:
            try:
                # A path is no command.
                if text.startswith("/") and "/" not in text[1:].partition(" ")[0]:
                    if not await _command(session, text):
                        return
                elif text.strip():
                    await _turn(session, _with_dropped_files(session, text))
            except (StackError, ConnectionError) as error:
                note(f"error: {error}")


def _attach(session: "ChatSession", image: "ChatImage") -> None:
    session.attach(image)
    note(f"{image.title} goes with the next prompt")


def _with_dropped_files(session: "ChatSession", text: str) -> str:
    """Attach the files that a prompt names; its text without folders."""
    from mlxstack.cli.chat_images import paths_in, read_image

    paths = paths_in(text)
    for path in paths.missing:
        note(f"there is no file {path}; the prompt is sent without an image")
    if paths.files and not session.accepts_images:
        note(f"{session.title} takes no images; the path is sent as text")
        return text
    for file in paths.files:
        _attach(session, read_image(file))
    return paths.text


async def _turn(session: "ChatSession", text: str) -> None:
    import shutil
    import textwrap

    turn = await _streamed(session, text)
    is_plain = "NO_COLOR" in os.environ
    summary = textwrap.fill(turn.summary, max(20, shutil.get_terminal_size().columns))
    note(summary, is_dim=not is_plain)


async def _command(session: "ChatSession", line: str) -> bool:
    """Run a command of the chat; False ends it."""
    from mlxstack.cli.chat_images import named_files, read_image

    verb, _, argument = line[1:].strip().partition(" ")
    match verb if SAME.get(verb) == "new" else SAME.get(verb, verb):
        case "exit":
            return False
        case "agent" if argument.strip():
            note(await session.continue_agent(argument.strip()))
        case "image" if argument.strip():
            for file in named_files(argument.strip()):
                _attach(session, read_image(file))
        case "new":
            session.start_over()
            note("new conversation")
        case "system" if argument.strip():
            session.start_over(argument.strip())
            note("new conversation with this system prompt")
        case "edit":
            await _edit(session, argument)
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
    from mlxstack.config.preset_reflection import nearest

    for command in COMMANDS:
        name, _, argument = command[1:].partition(" ")
        if verb == name:
            return f"/{verb} needs {argument}"
    near = SAME.get(verb) or nearest(verb, [usage[1:].split()[0] for usage in COMMANDS])
    if near:
        return f"unknown: /{verb}; did you mean /{near}?"
    return f"unknown: /{verb}; /help lists commands"
