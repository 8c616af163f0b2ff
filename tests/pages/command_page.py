"""The page docs/cli.md, drawn from the verbs of the command."""

import inspect
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from mlxstack.cli.exit_codes import Exit
from mlxstack.cli.main import app

NAME = "mlx-stack"

ABOUT = """\
# Command line

Every verb of `mlx-stack` with its options. This page is written by `make docs` from the
command itself.

* `--json` prints JSON for programs; errors go to stderr, one line each.
* Tables fit the terminal: less important columns are left out where it is narrow, names and URLs
  are never cut. In a pipe every row is one line.
* `NO_COLOR` switches colors off. `mlx-stack --install-completion` adds completion of verbs,
  presets, services, agents and clients.
* A mistyped verb, preset or key is answered with the nearest one, and a verb of Ollama, LM Studio
  and others with its equivalent.
"""

VARIABLES = """\
## Variables

| variable | meaning |
|---|---|
| `MLX_STACK_HOME` | where everything is kept; `~/.mlx-stack`, if not set |
| `MLX_STACK_…` | a key of the preset, such as `MLX_STACK_SLOTS_COUNT` ([presets](presets.md)) |
| `MLX_STACK_API_KEY` | the key that every verb sends; needed where the preset has only digests |
| `MLX_STACK_PEER_KEY` | the key that a service sends to peers without a `key_file` |
| `MLX_STACK_CPU` | compute on the CPU of a Mac, if set: an error that remains is not the GPU's |
| `MLX_STACK_MEMORY` | the memory to plan and serve with instead of this machine's, such as `48GB` |
| `NO_COLOR` | no colors |

"""


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
