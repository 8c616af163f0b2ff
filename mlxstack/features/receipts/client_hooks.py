"""Receipts in coding agents: a status line, a plugin and an extension."""

import json
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.features.receipts import receipt_line
from mlxstack.features.receipts.mode import ReceiptMode
from mlxstack.features.receipts.receipt_line import KEY_VARIABLE, MODEL_VARIABLE, URL_VARIABLE, WRAP
from mlxstack.host.coding_clients import ClientSetup, Endpoint

FOLDER = Path(receipt_line.__file__).parent
PLUGIN = FOLDER / "opencode_plugin.js"
EXTENSION = FOLDER / "pi_extension.js"
EXTENSION_NAME = "mlx-stack-receipt.js"
KEPT = "your own status line is kept; `--receipt wrap` adds the receipt of each turn below it"


class UserPlace(Struct, frozen=True):
    """Where a client looks for its user's own settings."""

    home: Path
    project: Path


def with_receipt(
    client: str, setup: ClientSetup, service: Endpoint, mode: ReceiptMode, place: UserPlace
) -> ClientSetup:
    """Setup of a client that shows receipts, where it can show any."""
    add = HOOKS.get(client)
    if add is None or mode is ReceiptMode.OFF:
        return setup
    variables = {
        URL_VARIABLE: service.url,
        KEY_VARIABLE: service.key,
        MODEL_VARIABLE: service.model,
    }
    setup = replace(setup, variables=setup.variables | variables)
    return add(setup, mode, place)


def status_line_of(place: UserPlace) -> dict[str, Any] | None:
    """A user's own status line in Claude Code; the project's goes first."""
    files = (
        place.project / ".claude" / "settings.local.json",
        place.project / ".claude" / "settings.json",
        place.home / "settings.json",
    )
    lines = (_status_line(file) for file in files)
    return next((line for line in lines if line is not None), None)


def claude_place(variables: Mapping[str, str], project: Path) -> UserPlace:
    """Places of Claude Code's settings."""
    home = variables.get("CLAUDE_CONFIG_DIR")
    return UserPlace(Path(home) if home else Path.home() / ".claude", project)


def _status_line(file: Path) -> dict[str, Any] | None:
    try:
        line = json.loads(file.read_text())["statusLine"]
        return {**line, "command": str(line["command"])}
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _claude(setup: ClientSetup, mode: ReceiptMode, place: UserPlace) -> ClientSetup:
    own = status_line_of(place)
    if own is not None and mode is not ReceiptMode.WRAP:
        hint = "; ".join(filter(None, (setup.hint, KEPT)))
        return replace(setup, hint=hint)
    command = [sys.executable, "-I", "-S", str(Path(receipt_line.__file__))]
    if own is not None:
        command += [WRAP, own["command"]]
    line = {"type": "command", **(own or {}), "command": shlex.join(command)}
    files = {}
    for path, text in setup.files.items():
        settings = json.loads(text)
        settings["statusLine"] = line
        settings["env"] |= {
            name: setup.variables[name] for name in (URL_VARIABLE, KEY_VARIABLE, MODEL_VARIABLE)
        }
        files[path] = json.dumps(settings, indent=2) + "\n"
    return replace(setup, files=files)


def _opencode(setup: ClientSetup, mode: ReceiptMode, place: UserPlace) -> ClientSetup:
    del mode, place
    name = "OPENCODE_CONFIG_CONTENT"
    settings = json.loads(setup.variables[name]) | {"plugin": [PLUGIN.as_uri()]}
    return replace(setup, variables=setup.variables | {name: json.dumps(settings)})


def _pi(setup: ClientSetup, mode: ReceiptMode, place: UserPlace) -> ClientSetup:
    del mode, place
    folder = Path(setup.variables["PI_CODING_AGENT_DIR"])
    file = str(folder / "extensions" / EXTENSION_NAME)
    return replace(setup, files=setup.files | {file: EXTENSION.read_text()})


HOOKS: dict[str, Callable[[ClientSetup, ReceiptMode, UserPlace], ClientSetup]] = {
    "claude": _claude,
    "opencode": _opencode,
    "pi": _pi,
}
