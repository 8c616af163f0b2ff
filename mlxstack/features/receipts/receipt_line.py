"""Receipt of the last turn, for Claude Code's status line and `why`.

Started after each turn, as a file and without site packages, so that it takes milliseconds: the
standard library only. It prints nothing where the service is away.
"""

import http.client
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote, urlsplit

URL_VARIABLE = "MLX_STACK_CLIENT_URL"
KEY_VARIABLE = "MLX_STACK_CLIENT_KEY"
MODEL_VARIABLE = "MLX_STACK_CLIENT_MODEL"
COMMAND_KEY_VARIABLE = "MLX_STACK_API_KEY"
HOME_VARIABLE = "MLX_STACK_HOME"
WRAP = "--wrap"
GATEWAY = "mlxstack.gateway"
TIMEOUT_S = 2.0
WIDTH = 120
"""Cells where neither client nor terminal gives its width."""
MIN_WIDTH = 40
MARGIN = 4
"""Cells beside the status line of Claude Code."""


def main() -> None:
    """Print a session's receipt, below the output of a wrapped command."""
    text = sys.stdin.read()
    if sys.argv[1:2] == [WRAP]:
        _print(_output_of(sys.argv[2], text))
    width = max(MIN_WIDTH, terminal_width(os.environ) - MARGIN)
    _print(line_of(_session(text), width, os.environ))


def quick_line(arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """Line of `why [AGENT]` where one service runs; else empty."""
    name = "".join(arguments[1:2])
    if arguments[:1] != ["why"] or len(arguments) > 2 or name.startswith("-"):
        return ""
    if URL_VARIABLE not in variables:
        key = variables.get(COMMAND_KEY_VARIABLE, "")
        variables = {URL_VARIABLE: _only_url(variables), KEY_VARIABLE: key}
    return line_of(name, terminal_width(os.environ), variables)


def line_of(name: str, width: int, variables: Mapping[str, str]) -> str:
    """Receipt of an agent or session, else the last one, or nothing."""
    path = "/receipts"
    if name:
        path += f"/{quote(name, safe='')}"
    path += f"?width={width}"
    if model := variables.get(MODEL_VARIABLE):
        path += f"&model={quote(model, safe='')}"
    headers = {}
    if key := variables.get(KEY_VARIABLE):
        headers["authorization"] = f"Bearer {key}"
    try:
        return str(json.loads(_fetched(variables.get(URL_VARIABLE, ""), path, headers))["line"])
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException):
        return ""


def terminal_width(variables: Mapping[str, str]) -> int:
    """Cells of the terminal, by `COLUMNS` or its own word."""
    columns = variables.get("COLUMNS", "")
    if columns.isdigit() and int(columns):
        return int(columns)
    for descriptor in (1, 2, 0):
        try:
            return os.get_terminal_size(descriptor).columns or WIDTH
        except OSError:
            continue
    return WIDTH


def _session(text: str) -> str:
    """Session of Claude Code's JSON, as services name it; empty without one."""
    try:
        return f"claude:{json.loads(text)['session_id']}"
    except (ValueError, LookupError, TypeError):
        return ""


def _fetched(url: str, path: str, headers: Mapping[str, str]) -> bytes:
    """Body of a GET. Raises OSError, HTTPException, ValueError."""
    address = urlsplit(url)
    kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
    if address.scheme not in kinds or address.hostname is None:
        raise ValueError(url)
    connection = kinds[address.scheme](address.hostname, address.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", path, headers=dict(headers))
        body: bytes = connection.getresponse().read()
        return body
    finally:
        connection.close()


def _only_url(variables: Mapping[str, str]) -> str:
    """URL of the only running service; empty for several or a gateway."""
    urls = []
    try:
        home = Path(variables.get(HOME_VARIABLE) or "~/.mlx-stack").expanduser()
        for file in (home / "run").glob("*.json"):
            state = json.loads(file.read_bytes())
            if state["phase"] == "running":
                urls.append("" if GATEWAY in state["plan"]["worker"] else state["plan"]["url"])
    except (OSError, RuntimeError, ValueError, LookupError, TypeError):
        return ""
    if len(urls) == 1:
        return str(urls[0])
    return ""


def _output_of(command: str, text: str) -> str:
    """Output of a user's own status line."""
    import subprocess  # noqa: PLC0415 - few have a line of their own

    # As Claude Code runs it.
    shell = ["/bin/sh", "-c", command]
    done = subprocess.run(shell, input=text, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout.rstrip("\n")


def _print(text: str) -> None:
    if text:
        sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    main()
