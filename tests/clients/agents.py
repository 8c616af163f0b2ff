"""Coding agents as npm installs them, started as people start them, and what a service saw.

`make programs` installs the pinned versions; MLX_STACK_AGENTS names a folder with others.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.status import RequestView
from tests.api.running import Running
from tests.cli.terminal import CLI
from tests.clients.install import FOLDER, reason_missing
from tests.clients.relay import Exchange, Relay, relaying
from tests.clients.scripted import call
from tests.clients.stage import model, run
from tests.patience import PATIENCE_S

PROGRAMS = FOLDER / "node_modules" / ".bin"
"""Launchers of npm, with the Node.js that the pinned versions need."""
OWN_FOLDERS = {
    "hermes": Path(sys.prefix, "hermes", "bin"),
    "openclaw": Path(sys.prefix, "openclaw", "node_modules", ".bin"),
}
"""Clients with an environment of their own: hermes.txt, openclaw.txt."""

N_CTX = 131072
MAIN = 1000
"""Tokens; a shorter prompt is a title or the like."""

ECHO = "echo MARKER_$((40+2))"
MARKER = "MARKER_42"
WRITE = "echo MARKER_42 > marker.txt && cat marker.txt"
DONE = "All done with 42."
AGAIN = "Nothing more to do."
SEEN = "I see it."
THOUGHT = "I shall print the marker."
TASK = "this is the task for {}: run the marker command"
AND_THEN = "and what is left?"
SCRIPT = [
    {
        "when": "task for a helper",
        "say": call(
            "Agent",
            description="greet",
            prompt="words for the helper",
            subagent_type="general-purpose",
        ),
        "think": "Somebody else shall do it.",
    },
    {
        "when": "task for a search",
        "say": call("ToolSearch", query="select:WebFetch,WebSearch", max_results=5),
        "think": "I need more tools.",
    },
    {"when": "task for a file", "say": call("Bash", command=WRITE, description="Write it")},
    {"when": "task for claude", "say": call("Bash", command=ECHO, description="Print it")},
    {"when": "task for codex", "say": call("exec_command", cmd=ECHO)},
    {"when": "task for a name", "say": call("close_agent", target="nobody")},
    {"when": "task for opencode", "say": call("bash", command=ECHO), "think": THOUGHT},
    {"when": "task for pi", "say": call("bash", command=ECHO)},
    {"when": "task for continue", "say": call("Bash", command=ECHO)},
    {"when": "task for hermes", "say": call("terminal", command=ECHO)},
    {"when": "task for openclaw", "say": call("exec", command=ECHO)},
    # Of a quick command in its terminal qwen-code at times reads nothing, so it looks into a file.
    {"when": "task for qwen", "say": call("grep_search", pattern="MARKER")},
    {"when": "look with claude", "say": call("Read", file_path="picture.png")},
    {"when": "look with codex", "say": call("view_image", path="picture.png")},
    {"when": r"\[IMG\]", "say": SEEN},
    {"when": "MARKER_42", "say": DONE, "think": "It is there."},
    {"when": "invalid agent id nobody", "say": DONE, "think": "It is not there."},
    {"when": "functions>.*WebFetch", "say": DONE, "think": "The tools are here."},
    {"when": "launched successfully", "say": "It was sent.", "think": "I wait."},
    {"when": "SYSTEM NOTIFICATION", "say": DONE, "think": "The helper is back."},
    {"when": "words for the helper", "say": "Hello from the helper.", "think": "I greet."},
    {"when": "what is left", "say": AGAIN},
    {"when": ".", "say": "A short title"},
]
GENERATIONS = ("/v1/messages", "/v1/responses", "/v1/chat/completions")
QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CONTINUE_TELEMETRY_ENABLED": "0",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "PI_OFFLINE": "1",
    "HERMES_DISABLE_LAZY_INSTALLS": "1",
    # Claude Code skips its questions as root only where it is told that nothing can be broken.
    "IS_SANDBOX": "1",
}
"""No update checks and no telemetry: nothing answers outside this machine."""


class Start(Enum):
    """How a person starts a client."""

    RUN = "mlx-stack run"
    BY_HAND = "own settings"


def installed(program: str) -> str:
    """The launcher; skips the test if there is none."""
    path = OWN_FOLDERS.get(program, PROGRAMS) / program
    if not path.exists() and program in OWN_FOLDERS:
        pytest.skip(f"{path} is not installed; `make assistants` installs it")
    if not path.exists():
        pytest.skip(f"{program} is not installed: {reason_missing(FOLDER)}")
    return str(path)


def claude_of_node_20() -> str:
    """The newest Claude Code that npm installs where Node.js is older than 22."""
    programs = [*FOLDER.glob("node_modules/claude-code-of-node-20-*/claude")]
    return str(programs[0]) if programs else installed("claude-code-of-node-20")


def start(
    client: str, url: str, folder: Path, *arguments: str, begin: Start = Start.BY_HAND
) -> str:
    """What one headless run of a client prints, in the project of `folder`."""
    argv, variables = command(client, url, folder, begin)
    return run([*argv, *arguments], project(folder), **environment(folder, **variables))


def command(client: str, url: str, folder: Path, begin: Start) -> tuple[list[str], dict[str, str]]:
    """The words that start a client, and the variables that they need."""
    program = installed(client)
    if begin is Start.RUN:
        home = str(folder / "mlx-stack")
        return [*CLI, "run", client, "--url", url, "--"], {"MLX_STACK_HOME": home}
    options, variables = by_hand(client, url, folder / "home")
    return [program, *options], variables


def project(folder: Path) -> Path:
    """Where a client works; its home lies beside it."""
    place = folder / "project"
    place.mkdir(exist_ok=True)
    return place


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Variables of a client, of which nothing is this machine's but the programs."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    path = os.pathsep.join(map(str, (PROGRAMS, os.environ["PATH"], *OWN_FOLDERS.values())))
    return {"PATH": path, "HOME": str(home), "NO_COLOR": "1", **QUIET, **variables}


def by_hand(client: str, url: str, home: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """Options and variables of a client whose settings a person wrote into their home."""
    local = {"baseURL": f"{url}/v1", "apiKey": "x"}
    match client:
        case "claude":
            return (), claude_variables(url)
        case "codex":
            _write(home / ".codex" / "config.toml", CODEX_CONFIG.format(url=url))
            return (), {"LOCAL_KEY": "x"}
        case "opencode":
            images = {"input": ["text", "image"], "output": ["text"]}
            provider = {
                "npm": "@ai-sdk/openai-compatible",
                "options": local,
                "models": {"local-model": {"attachment": True, "modalities": images}},
            }
            settings = json.dumps({"provider": {"local": provider}})
            _write(home / ".config" / "opencode" / "opencode.json", settings)
            return ("--model", "local/local-model"), {}
        case "pi":
            model = {"id": "local-model", "input": ["text", "image"], "contextWindow": N_CTX}
            provider = {
                "baseUrl": local["baseURL"],
                "apiKey": local["apiKey"],
                "api": "openai-completions",
                "models": [model],
            }
            settings = json.dumps({"providers": {"local": provider}})
            _write(home / ".pi" / "agent" / "models.json", settings)
            return ("--provider", "local", "--model", "local-model"), {}
    return (), {
        "OPENAI_BASE_URL": local["baseURL"],
        "OPENAI_API_KEY": local["apiKey"],
        "OPENAI_MODEL": "local-model",
    }


def claude_variables(url: str) -> dict[str, str]:
    """The variables with which Claude Code finds a service."""
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "x",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(N_CTX),
        **dict.fromkeys(models, "local-model"),
    }


CODEX_CONFIG = """
model = "local-model"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
env_key = "LOCAL_KEY"
wire_api = "responses"
"""


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


AIDER = (
    "--yes-always", "--no-git", "--edit-format", "whole", "--no-check-update",
    "--analytics-disable", "--no-show-model-warnings", "--no-show-release-notes", "--no-pretty",
    "--no-detect-urls", "--map-tokens", "0", "--message",
)  # fmt: skip
CODEX_EXEC = (
    "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
)  # fmt: skip


def codex(url: str, folder: Path, *arguments: str) -> str:
    """What one headless run of Codex prints."""
    return start("codex", url, folder, *CODEX_EXEC, *arguments)


@contextmanager
def observed(live: Running) -> Iterator[Relay]:
    """A relay before the service; at the end, no answer was a fault and every tool was held."""
    with relaying(Relay(live.url)) as relay:
        yield relay
    faults = [e for e in relay.exchanges if e.status is not None and e.status >= 500]
    assert not faults, [(e.path, e.status, bytes(e.answer[:500])) for e in faults]
    assert generations(relay.exchanges)
    holds_tools(live)


def generations(exchanges: Iterable[Exchange]) -> list[Exchange]:
    """Requests of an agent that offer tools; others make a title or the like."""
    posted = (exchange for exchange in exchanges if exchange.method == "POST")
    generated = (request for request in posted if request.path.partition("?")[0] in GENERATIONS)
    return [request for request in generated if request.json.get("tools")]


def offered(exchange: Exchange) -> dict[str, Any]:
    """Schema of each tool that a request offers, by its name; those of a namespace too."""
    return dict(_schemas(exchange.json["tools"]))


def _schemas(tools: list[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    for tool in tools:
        function = tool.get("function", tool)
        name = function.get("name", tool.get("type"))
        yield name, function.get("input_schema", function.get("parameters", {}))
        yield from _schemas(tool.get("tools", ()))


def n_cached(exchange: Exchange) -> int:
    """Tokens of its prompt that were not computed, as the client is told."""
    return _usage(exchange, "cached_tokens|cache_read_input_tokens")


def n_prompt(exchange: Exchange) -> int:
    """Tokens of its prompt, as the client is told."""
    n_told = _usage(exchange, "prompt_tokens|input_tokens")
    # Anthropic's count is of those that were computed.
    return n_told + (n_cached(exchange) if exchange.path.startswith("/v1/messages") else 0)


def _usage(exchange: Exchange, names: str) -> int:
    return int(re.findall(rf'"(?:{names})":(\d+)', exchange.answer.decode())[-1])


def holds_tools(live: Running) -> None:
    """Every set of tools has its grammar, and none lacks the schema of a whole tool."""
    text_processor = live.service.text_processor
    grammars = [
        grammar
        for futures in text_processor.constraints._free_calls.values()
        for grammar in futures
    ]
    assert grammars
    assert all(grammar.result(PATIENCE_S) is not None for grammar in grammars)
    assert all("/" in path for path in text_processor.constraints.loose_schemas.paths)


def asked(live: Running, n_before: int = 0) -> list[RequestView]:
    """The requests with a long prompt, after the first `n_before`, the oldest first."""
    entries = [entry for entry in live.service.request_log.requests() if entry.n_prompt > MAIN]
    return entries[::-1][n_before:]


def loses_nothing(requests: list[RequestView]) -> None:
    """Each but the first of an agent reads 99 % of the prompt before it from the cache."""
    last: dict[str, int] = {}
    for request in requests:
        assert request.n_cached >= 0.99 * last.get(request.agent, 0), requests
        last[request.agent] = request.n_prompt


if __name__ == "__main__":
    # The folder of a model that follows the script, for `mlx-stack up`.
    model(Path(sys.argv[1]), SCRIPT)
