"""Markdown of answers in a terminal: blocks are printed once, the last one is redrawn."""

import io
import re
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from rich.console import Console

from mlxstack.cli.answer_markdown import MarkdownStream, finished
from mlxstack.cli.chat_input import CommandCompleter
from mlxstack.cli.commands.chat import COMMANDS

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ANSWER = """# Sorting

Some **bold** words, and `code`.

- one
- two

```python
def f(x):
    return x
```

| a | b |
|---|---|
| 1 | 2 |

See [this](https://example.com/page).
"""


def printed(pieces: list[str], height: int = 24) -> str:
    """Text of a terminal after an answer in pieces."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=60, height=height, highlight=False)
    stream = MarkdownStream(console)
    for piece in pieces:
        stream.feed(piece)
    stream.finish()
    return out.getvalue()


@pytest.mark.parametrize("size", [1, 7, len(ANSWER)])
def test_every_block_is_printed_once_however_it_comes(size: int) -> None:
    pieces = [ANSWER[i : i + size] for i in range(0, len(ANSWER), size)]
    shown = printed(pieces)
    assert "**" not in shown.rpartition("Sorting")[2], "Markdown is rendered"
    text = ESCAPES.sub("", shown)
    lines = [line.rstrip() for line in text.splitlines()]
    assert "def f(x):" in lines and "    return x" in lines, "code has no margin"
    assert "this (https://example.com/page)" in text, "an address is shown"


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("", ""),
        ("one\n\ntwo", "two"),
        ("one\n\n", "one\n\n"),
        ("one\n\n```\na\n\nb", "```\na\n\nb"),
        ("- a\n\n- b\n\n  c", "- a\n\n- b\n\n  c"),
        ("- a\n\nend\n\n|a|\n|-|\n|1|\n", "|a|\n|-|\n|1|\n"),
    ],
)
def test_the_last_block_is_not_finished(text: str, rest: str) -> None:
    assert text[finished(text) :] == rest


def test_a_block_that_is_higher_than_the_screen_is_printed_whole() -> None:
    lines = [f"line {n}" for n in range(200)]
    text = ESCAPES.sub("", printed(["```text\n", *(f"{line}\n" for line in lines), "```\n"], 10))
    shown = [line.strip() for line in text.splitlines() if line.strip()]
    assert shown[-len(lines) :] == lines


@pytest.mark.parametrize(
    ("typed", "offered"), [("/", len(COMMANDS)), ("/im", 1), ("/x", 0), ("hello", 0), ("/new a", 0)]
)
def test_commands_are_completed(typed: str, offered: int) -> None:
    completions = CommandCompleter(COMMANDS).get_completions(Document(typed), CompleteEvent())
    assert len(list(completions)) == offered


def test_files_are_completed_after_the_command_for_images(tmp_path: Path) -> None:
    (tmp_path / "picture.png").touch()
    document = Document(f"/image {tmp_path}/pic")
    (completion,) = CommandCompleter(COMMANDS).get_completions(document, CompleteEvent())
    assert completion.text == "ture.png"
