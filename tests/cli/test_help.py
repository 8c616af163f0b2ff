"""Help in plain words: groups of commands, types as a person writes them."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from mlxstack.cli.help_text import GROUPS
from mlxstack.cli.main import app

TYPES = re.compile(r"<(int|float|str|list|path|file|bool)|\{PRESET \||HUB ID \||\[\[")
ODD = (
    "may be left out if one",
    "A service anywhere",
    ", read again",
    "The same.",
    "machines for a rank",
)


def commands(group: Any, args: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield args
    for name, verb in group.commands.items():
        if hasattr(verb, "commands"):
            yield from commands(verb, (*args, name))
        elif not verb.hidden:
            yield (*args, name)


def shown(*args: str) -> str:
    done = CliRunner().invoke(app, [*args, "--help"], env={"COLUMNS": "100"})
    assert done.exit_code == 0
    return done.stdout


def test_commands_are_in_groups_and_none_is_missing() -> None:
    lines = shown().splitlines()
    heads = [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert heads == ["Options", *GROUPS]
    listed = {line.split()[0] for line in lines if re.match(r"  [a-z]", line)}
    verbs = {name for name, verb in get_command(app).commands.items() if not verb.hidden}  # type: ignore[attr-defined]
    assert verbs <= listed
    run = lines.index("Run:")
    models = lines.index("Models:")
    assert lines[run + 1].split()[0] == "up"
    assert any(line.startswith("  chat ") for line in lines[run:models])


@pytest.mark.parametrize("args", sorted(commands(get_command(app))), ids=" ".join)
def test_help_has_no_types_of_a_programmer_and_no_odd_sentences(args: tuple[str, ...]) -> None:
    text = shown(*args)
    assert not TYPES.search(text), text
    assert not [odd for odd in ODD if odd in text], text


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("restart",), "NAME  Service (default: the only one)."),
        (("tui",), "--url URL      URL of a remote service."),
        (("up",), "MODEL  Preset, hub id or model folder. Several get one address."),
        (("up",), "--slots N"),
        (("agents", "rewind"), "{AGENT} {N}"),
    ],
    ids=str,
)
def test_help_names_values_in_plain_words(args: tuple[str, ...], line: str) -> None:
    assert line in shown(*args)
