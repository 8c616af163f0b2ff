"""Plain help: commands in groups, and types in words of a person."""

from typing import Any

from typer.core import TyperArgument, TyperOption

GROUPS = {
    "Run": ("up", "down", "restart", "chat", "run", "env", "tui"),
    "Models": ("plan", "pull", "models", "rm", "presets", "swap"),
    "Agents and cache": ("agents", "slots", "cache"),
    "Inspect": ("status", "ps", "why", "logs", "bench", "doctor"),
    "Advanced": ("mode", "install", "uninstall", "key", "spec", "template", "verify"),
}
"""Headings of the help, and their commands in order."""

NUMBERS = {"int", "float", "int | None", "float | None"}
NAMED = {
    "name": "NAME",
    "named": "NAME",
    "service": "NAME",
    "names": "NAME",
    "url": "URL",
    "model": "MODEL",
    "agent": "AGENT",
    "key": "KEY",
    "n_messages": "N",
    "request": "REQUEST",
}
"""Parameters that are called after their content, not after its type."""


def write_groups(group: Any, ctx: Any, formatter: Any) -> None:
    """Write commands under their headings, others under the last one."""
    commands = {name: group.get_command(ctx, name) for name in group.list_commands(ctx)}
    visible = [name for name, verb in commands.items() if not verb.hidden]
    left = formatter.width - 6 - max(map(len, visible))
    grouped = {name for names in GROUPS.values() for name in names}
    ungrouped = tuple(name for name in visible if name not in grouped)
    for title, names in GROUPS.items():
        present = [name for name in names if name in visible]
        listed = present
        if title == "Advanced":
            listed = [*present, *ungrouped]
        with formatter.section(title):
            formatter.write_dl([(n, commands[n].get_short_help_str(left)) for n in listed])


def name_types(command: Any) -> None:
    """Name the values of all parameters below `command` in plain words."""
    for parameter in command.params:
        if (
            isinstance(parameter, TyperOption)
            and parameter.metavar is None
            and not parameter.is_flag
        ):
            parameter.metavar = NAMED.get(parameter.name) or _plain(parameter)
        elif isinstance(parameter, TyperArgument):
            # The name of an argument is its description already.
            parameter.metavar = (
                parameter.metavar or NAMED.get(parameter.name) or parameter.name.upper()
            )
            parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
    for verb in getattr(command, "commands", {}).values():
        name_types(verb)


def _plain(option: TyperOption) -> str:
    kind = option.type_descriptor
    if kind.is_path or kind.is_file:
        return "FILE"
    if kind.is_ranged or option.bare_type() in NUMBERS:
        return "N"
    return "TEXT"
