"""Prompts typed into `chat`: lines, pastes, text of an editor."""

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import (
    CompleteEvent,
    Completer,
    Completion,
    PathCompleter,
    WordCompleter,
)
from prompt_toolkit.document import Document
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output, create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.utils import is_dumb_terminal

from mlxstack.core.errors import SetupError

BLOCK = '"""'
"""Opens and closes a prompt of several lines."""

IMAGE = "/image "


class PromptReader:
    """Reader of prompts from the terminal, with line editing and history.

    `commands` have a text each. Enter ends a prompt; Alt-Enter and a paste continue it.
    """

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_keys(),
            completer=CommandCompleter(commands),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            output=_output(),
        )

    async def read(self) -> str | None:
        """One prompt; None at the end of the input.

        Ctrl-C clears the line.
        """
        while True:
            try:
                text = await self._session.prompt_async()
            except EOFError:
                return None
            except KeyboardInterrupt:
                continue
            if text.lstrip().startswith(BLOCK):
                return re.sub(rf"{BLOCK}.*\Z", "", _inside(text), flags=re.DOTALL).strip("\n")
            return text


class CommandCompleter(Completer):
    """Completes commands of the chat, and files after `/image`."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        names = {command.partition(" ")[0]: text for command, text in commands.items()}
        self._names = WordCompleter(list(names), meta_dict=names, WORD=True)
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        """Completions of the text before the cursor."""
        text = document.text_before_cursor
        if text.startswith(IMAGE):
            yield from self._files.get_completions(Document(text.removeprefix(IMAGE)), event)
        elif text.startswith("/") and " " not in text:
            yield from self._names.get_completions(document, event)


def _output() -> Output | None:
    """Output that asks the terminal nothing; None where it is dumb."""
    if is_dumb_terminal():
        return None
    output = create_output(always_prefer_tty=True)
    if isinstance(output, Vt100_Output):
        # Menus alone need the place of the cursor, and some terminals do not tell it.
        output.enable_cpr = False
    return output


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def end(event: KeyPressEvent) -> None:
        """End the prompt; begin a line within open quotes."""
        buffer = event.current_buffer
        if buffer.text.lstrip().startswith(BLOCK) and BLOCK not in _inside(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _inside(text: str) -> str:
    """Text after the quotes that open a block."""
    return text.lstrip().removeprefix(BLOCK)


def edited(text: str = "") -> str:
    """Text as left in $VISUAL or $EDITOR. Raises SetupError."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="mlx-stack-") as folder:
        file = Path(folder) / "prompt.md"
        file.write_text(text, "utf-8")
        try:
            subprocess.run([*shlex.split(editor), str(file)], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SetupError(f"the editor `{editor}` failed ({error}); set EDITOR") from error
        return file.read_text("utf-8").strip("\n")
