"""Real coding agents, those that somebody installed, and what a service remembers of them.

`npm install` them into one folder, and name it in MLX_STACK_AGENTS; `make clients` runs them.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.status import RequestView
from mlxstack.host.coding_clients import CLIENTS, Endpoint
from tests.api.running import Running
from tests.clients.scripted import call
from tests.clients.stage import run

FOLDER = Path(os.environ.get("MLX_STACK_AGENTS", Path(sys.prefix) / "agents")) / "node_modules"
CLAUDE = FOLDER / "@anthropic-ai" / "claude-code-linux-x64" / "claude"
CODEX = FOLDER / "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"
OPENCODE = FOLDER / "opencode-linux-x64" / "bin" / "opencode"
PI = FOLDER / ".bin" / "pi"
QWEN = FOLDER / ".bin" / "qwen"

N_CTX = 131072
MAIN = 1000
"""Tokens; a shorter prompt is a title or the like."""

ECHO = "echo MARKER_$((40+2))"
DONE = "All done with 42."
THOUGHT = "I shall print the marker."
TASK = "this is the task for {}: run the marker command"
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
    {"when": "task for claude", "say": call("Bash", command=ECHO, description="Print it")},
    {"when": "task for codex", "say": call("exec_command", cmd=ECHO)},
    {"when": "task for a name", "say": call("close_agent", target="nobody")},
    {"when": "task for opencode", "say": call("bash", command=ECHO), "think": THOUGHT},
    {"when": "task for pi", "say": call("bash", command=ECHO)},
    {"when": "task for continue", "say": call("Bash", command=ECHO)},
    {"when": "task for qwen", "say": call("run_shell_command", command=ECHO, is_background=False)},
    {"when": "MARKER_42", "say": DONE, "think": "It is there."},
    {"when": "invalid agent id nobody", "say": DONE, "think": "It is not there."},
    {"when": "functions>.*WebFetch", "say": DONE, "think": "The tools are here."},
    {"when": "launched successfully", "say": "It was sent.", "think": "I wait."},
    {"when": "SYSTEM NOTIFICATION", "say": DONE, "think": "The helper is back."},
    {"when": "words for the helper", "say": "Hello from the helper.", "think": "I greet."},
    {"when": ".", "say": "A short title"},
]
CODEX_CONFIG = """
model = "local-model"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
env_key = "LOCAL_KEY"
wire_api = "responses"
"""


def installed(path: Path) -> str:
    """The program; skips the test if there is none."""
    if not path.exists():
        pytest.skip(f"{path.name} is not installed under {FOLDER}; MLX_STACK_AGENTS names another")
    return str(path)


def claude(url: str, home: Path, *args: str) -> dict[str, Any]:
    """What one headless run of Claude Code tells."""
    told = run(
        [installed(CLAUDE), "-p", *args, "--output-format", "json", "--allowedTools", "Bash"],
        home,
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_AUTH_TOKEN="x",
        ANTHROPIC_MODEL="local-model",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="local-model",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_CONTEXT_TOKENS=str(N_CTX),
    )
    return dict(json.loads(told.splitlines()[-1]))


def started_by_us(client: str, program: str, live: Running, home: Path) -> list[str]:
    """The command of `mlx-stack run` for a client, its files written; run it with `variables`."""
    setup = CLIENTS[client](Endpoint(live.url, "local-model", N_CTX), home / "ours")
    for path, text in setup.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)
    words = [f"{name}={value}" for name, value in setup.variables.items()]
    return ["env", *words, program, *setup.options]


def codex(url: str, home: Path, task: str) -> str:
    """What one headless run of Codex prints."""
    (home / "config.toml").write_text(CODEX_CONFIG.format(url=url))
    command = [installed(CODEX), "exec", "--json", "--skip-git-repo-check"]
    command += ["--dangerously-bypass-approvals-and-sandbox", task]
    return run(command, home, CODEX_HOME=str(home), LOCAL_KEY="x")


def opencode(url: str, home: Path, task: str) -> str:
    """What one headless run of opencode prints."""
    program = installed(OPENCODE)
    opencode_config(url, home, {})
    return run([program, "run", "--model", "local/local-model", task], home)


def opencode_config(url: str, home: Path, model: dict[str, Any]) -> None:
    """Write opencode's configuration of one model at `url`."""
    config = home / ".config" / "opencode"
    config.mkdir(parents=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "x"},
        "models": {"local-model": model},
    }
    (config / "opencode.json").write_text(json.dumps({"provider": {"local": provider}}))


def asked(live: Running, n_before: int = 0) -> list[RequestView]:
    """The requests with a long prompt, after the first `n_before`, the oldest first."""
    found = [one for one in live.service.request_log.requests() if one.n_prompt > MAIN]
    return found[::-1][n_before:]


def loses_nothing(requests: list[RequestView]) -> None:
    """Each but the first of an agent reads 99 % of the prompt before it from the cache."""
    last: dict[str, int] = {}
    for one in requests:
        assert one.n_cached >= 0.99 * last.get(one.agent, 0), requests
        last[one.agent] = one.n_prompt
