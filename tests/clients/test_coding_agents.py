"""Real coding agents run a tool loop against a scripted model; only those that are installed.

`npm install` them into one folder, and name it in MLX_STACK_AGENTS; `make clients` runs them.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.api.running import Running
from tests.clients.scripted import call
from tests.clients.stage import playing, run

FOLDER = Path(os.environ.get("MLX_STACK_AGENTS", Path(sys.prefix) / "agents")) / "node_modules"
CLAUDE = FOLDER / "@anthropic-ai" / "claude-code-linux-x64" / "claude"
CODEX = FOLDER / "@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex"
OPENCODE = FOLDER / "opencode-linux-x64" / "bin" / "opencode"
PI = FOLDER / ".bin" / "pi"
QWEN = FOLDER / ".bin" / "qwen"

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

N_CTX = 131072
ECHO = "echo MARKER_$((40+2))"
DONE = "All done with 42."
SCRIPT = [
    {"when": "MARKER_42", "say": DONE, "think": "It is there."},
    {"when": "task for claude", "say": call("Bash", command=ECHO, description="Print it")},
    {"when": "task for codex", "say": call("exec_command", cmd=ECHO)},
    {"when": "task for opencode", "say": call("bash", command=ECHO, description="Print it")},
    {"when": "task for pi", "say": call("bash", command=ECHO)},
    {"when": "task for qwen", "say": call("run_shell_command", command=ECHO, is_background=False)},
    {"when": ".", "say": "A short title"},
]
TASK = "this is the task for {}: run the marker command"

CODEX_CONFIG = """
model = "local-model"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
env_key = "LOCAL_KEY"
wire_api = "responses"
"""


@pytest.fixture(scope="module")
def agents_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with playing(tmp_path_factory.mktemp("agents"), SCRIPT, n_ctx=N_CTX) as found:
        yield found


def installed(path: Path) -> str:
    if not path.exists():
        pytest.skip(f"{path.name} is not installed under {FOLDER}; MLX_STACK_AGENTS names another")
    return str(path)


def claude(live: Running, home: Path, *words: str) -> dict[str, object]:
    """One headless run of Claude Code."""
    told = run(
        [installed(CLAUDE), "-p", *words, "--output-format", "json", "--allowedTools", "Bash"],
        home,
        ANTHROPIC_BASE_URL=live.url,
        ANTHROPIC_AUTH_TOKEN="x",
        ANTHROPIC_MODEL="local-model",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="local-model",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_CONTEXT_TOKENS=str(N_CTX),
    )
    found: dict[str, object] = json.loads(told.splitlines()[-1])
    return found


def cached(live: Running) -> tuple[float, float]:
    """Prompt tokens computed and reused so far."""
    lines = httpx.get(f"{live.url}/metrics").text.splitlines()
    counts = dict(line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
    computed = float(counts["llamacpp:prompt_tokens_total"])
    return computed, float(counts["llamacpp:prompt_tokens_cached_total"])


def test_claude_code_runs_a_tool_and_goes_on_and_its_next_conversation_is_cached(
    agents_stage: Running, tmp_path: Path
) -> None:
    installed(CLAUDE)
    assert claude(agents_stage, tmp_path, TASK.format("claude"))["result"] == DONE
    before = cached(agents_stage)
    again = claude(agents_stage, tmp_path, "the task for claude once more", "--continue")
    assert again["result"] == DONE
    after = cached(agents_stage)
    computed, reused = after[0] - before[0], after[1] - before[1]
    assert reused > 0.95 * (computed + reused), (computed, reused)


def test_codex_runs_a_tool(agents_stage: Running, tmp_path: Path) -> None:
    program = installed(CODEX)
    (tmp_path / "config.toml").write_text(CODEX_CONFIG.format(url=agents_stage.url))
    told = run(
        [program, "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
         TASK.format("codex")],
        tmp_path,
        CODEX_HOME=str(tmp_path),
        LOCAL_KEY="x",
    )  # fmt: skip
    assert DONE in told


def test_opencode_runs_a_tool(agents_stage: Running, tmp_path: Path) -> None:
    program = installed(OPENCODE)
    config = tmp_path / ".config" / "opencode"
    config.mkdir(parents=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{agents_stage.url}/v1", "apiKey": "x"},
        "models": {"local-model": {}},
    }
    (config / "opencode.json").write_text(json.dumps({"provider": {"local": provider}}))
    told = run([program, "run", "--model", "local/local-model", TASK.format("opencode")], tmp_path)
    assert DONE in told


def test_pi_runs_a_tool(agents_stage: Running, tmp_path: Path) -> None:
    program = installed(PI)
    config = tmp_path / ".pi" / "agent"
    config.mkdir(parents=True)
    model = {"id": "local-model", "name": "local", "reasoning": True, "input": ["text"],
             "contextWindow": N_CTX, "maxTokens": 4096,
             "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}  # fmt: skip
    provider = {
        "baseUrl": f"{agents_stage.url}/v1",
        "api": "openai-completions",
        "apiKey": "x",
        "models": [model],
    }
    (config / "models.json").write_text(json.dumps({"providers": {"local": provider}}))
    words = [program, "--provider", "local", "--model", "local-model", "-p", TASK.format("pi")]
    assert DONE in run(words, tmp_path)


def test_qwen_code_runs_a_tool(agents_stage: Running, tmp_path: Path) -> None:
    told = run(
        [installed(QWEN), "--yolo", "-p", TASK.format("qwen")],
        tmp_path,
        OPENAI_BASE_URL=f"{agents_stage.url}/v1",
        OPENAI_API_KEY="x",
        OPENAI_MODEL="local-model",
    )
    assert DONE in told
