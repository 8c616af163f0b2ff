"""The page docs/cli.md, drawn from the verbs of the command."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from mlxstack.cli.exit_codes import Exit
from mlxstack.cli.main import app

NAME = "mlx-stack"

ABOUT = Path(__file__).with_name("command_about.md").read_text(encoding="utf-8")

VARIABLES = Path(__file__).with_name("command_variables.md").read_text(encoding="utf-8")


def page() -> str:
    """The whole page."""
    return "\n".join([ABOUT, *_verbs(get_command(app), NAME), VARIABLES + _exits()])


def _verbs(group: Any, before: str) -> Iterator[str]:
    mark = "##" if before == NAME else "###"
    for name, verb in group.commands.items():
        if verb.hidden:
            continue
        path = f"{before} {name}"
        inner = hasattr(verb, "commands")
        args = [
            path,
            *(_argument(parameter) for parameter in verb.params if not _is_option(parameter)),
        ]
        description = inspect.cleandoc(verb.help or "")
        if inner:
            description += (
                "\n\nIts verbs: " + ", ".join(f"`{verb_name}`" for verb_name in verb.commands) + "."
            )
        usage = " ".join([*args, "[OPTIONS]"] if verb.params and not inner else args)
        yield f"{mark} {path}\n\n{description}\n\n```\n{usage}\n```\n{_table(verb.params)}"
        if inner:
            yield from _verbs(verb, path)


def _is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name.upper()).strip("[]")
    name += "..." if parameter.nargs == -1 else ""
    return name if parameter.required else f"[{name}]"


def _table(params: list[Any]) -> str:
    rows = [_row(parameter) for parameter in params if not parameter.hidden]
    return "\n".join(["", "| word | meaning |", "|---|---|", *rows, ""]) if rows else ""


def _row(parameter: Any) -> str:
    word = _argument(parameter)
    if _is_option(parameter):
        takes = (
            ""
            if parameter.is_flag
            else " " + (parameter.metavar or parameter.opts[-1].strip("-").upper())
        )
        word = ", ".join((*parameter.opts, *parameter.secondary_opts)) + takes
    has_default = _is_option(parameter) and parameter.default and not callable(parameter.default)
    default = f" Default: {parameter.default}." if has_default else ""
    cells = (f"`{word}`", f"{parameter.help or ''}{default}")
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _exits() -> str:
    text = inspect.cleandoc(Exit.__doc__ or "").partition("\n\n")[2]
    meanings = dict(part.split(": ", 1) for part in text.replace("\n", " ").rstrip(".").split(". "))
    rows = "".join(f"| {code.value} | {meanings[code.name]} |\n" for code in Exit)
    return f"## Exit codes\n\n| code | meaning |\n|---|---|\n{rows}"
