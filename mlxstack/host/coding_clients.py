"""Environment and config files that point a coding agent at a service.

As tested with the versions of tests/clients. Files go into a folder of mlx-stack; a
user's own settings are never touched.
"""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

KEY_VARIABLE = "MLX_STACK_CLIENT_KEY"
NO_KEY = "none-needed"
CLAUDE_COMPACT_TOKENS = 33_000
MIN_CLAUDE_TOKENS = 65_536
"""Claude Code's compaction reserve, and its least comfortable context, in tokens."""
CLAUDE_IDLE_MS = "3600000"
"""Time that Claude Code waits for content in a stream; its default is ten minutes."""

CLAUDE_HINT = (
    "WebSearch of Claude Code runs on Anthropic's servers and is off here; to search, add an MCP "
    "server: claude mcp add search -- uvx duckduckgo-mcp-server"
)

CLAUDE_MODELS = (
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_FABLE_MODEL",
)
"""Models that sub-agents and background calls ask for by family."""

CLAUDE_PROVIDERS = (
    "ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX",
    "CLAUDE_CODE_USE_FOUNDRY", "CLAUDE_CODE_USE_MANTLE", "CLAUDE_CODE_USE_ANTHROPIC_AWS",
)  # fmt: skip
"""Variables that lead to a provider."""

MAX_OUTPUT_TOKENS = 32_000

FIRST_PROMPT_TOKENS = {
    "claude": 25_000,
    "codex": 8_000,
    "opencode": 7_000,
    "aider": 2_000,
    "pi": 2_500,
    "qwen": 13_500,
    "hermes": 12_500,
    "openclaw": 32_000,
}
"""Tokens of each client's instructions and tools, as the refusals of a small slot count them."""

MIN_CONTEXT_TOKENS = {"hermes": 64_000}
"""Tokens of a context below which a client refuses to start."""

WORK_TOKENS = 2_000
"""Least room for a task beside them: a file and an answer."""


class Endpoint(Struct, frozen=True):
    """Service for a client: pathless `url`, `model` name, tokens per slot."""

    url: str
    model: str
    n_ctx: int
    api_key: str | None = None
    accepts_images: bool = False

    @property
    def key(self) -> str:
        """A key to send: clients refuse to start without one."""
        return self.api_key or NO_KEY

    @property
    def modalities(self) -> list[str]:
        """Kinds of input."""
        if self.accepts_images:
            return ["text", "image"]
        return ["text"]

    @property
    def max_output(self) -> int:
        """Tokens for an answer that leave most of the context."""
        return min(MAX_OUTPUT_TOKENS, self.n_ctx // 4)


class ClientSetup(Struct, frozen=True):
    """Environment and files of a client."""

    variables: dict[str, str]
    unset: tuple[str, ...] = ()
    files: dict[str, str] = {}
    """Texts to write, by path."""
    program: str = ""
    """Command that `run` starts; empty where the user names it."""
    options: tuple[str, ...] = ()
    """Options of the program, before the user's own."""
    default_arguments: tuple[str, ...] = ()
    """Arguments where the user names none."""
    caution: str | None = None
    hint: str | None = None
    """For those who use `run`."""


def claude(service: Endpoint, folder: Path) -> ClientSetup:
    """Claude Code, without what runs on Anthropic's servers.

    That is WebSearch, and the check of actions in auto mode: it asks before them instead.
    Variables of a user's settings take precedence over the environment, those of `--settings` over
    both. It would give up a prompt that takes ten minutes: pings do not count as content.
    """
    variables = {
        "ANTHROPIC_BASE_URL": service.url,
        "ANTHROPIC_AUTH_TOKEN": service.key,
        "ANTHROPIC_MODEL": service.model,
        **dict.fromkeys(CLAUDE_MODELS, service.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(service.n_ctx),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": CLAUDE_IDLE_MS,
    }
    settings = {
        "permissions": {"deny": ["WebSearch"], "disableAutoMode": "disable"},
        "env": variables | dict.fromkeys(CLAUDE_PROVIDERS, ""),
    }
    file = str(folder / "settings.json")
    caution = None
    if service.n_ctx < MIN_CLAUDE_TOKENS:
        caution = (
            f"Claude Code compacts {CLAUDE_COMPACT_TOKENS} tokens before the end of the context, "
            f"and a slot has {service.n_ctx}; give slots.n_ctx {MIN_CLAUDE_TOKENS} or more"
        )
    return ClientSetup(
        variables=variables,
        unset=CLAUDE_PROVIDERS,
        files={file: json.dumps(settings, indent=2) + "\n"},
        program="claude",
        options=("--settings", file),
        hint=CLAUDE_HINT,
        caution=caution,
    )


def codex(service: Endpoint, folder: Path) -> ClientSetup:
    """Codex: a provider in an own CODEX_HOME, over the Responses API."""
    text = (
        f"model = {_toml(service.model)}\n"
        f'model_provider = "mlx-stack"\n'
        f"model_context_window = {service.n_ctx}\n"
        "\n"
        f"[model_providers.mlx-stack]\n"
        f'name = "mlx-stack"\n'
        f"base_url = {_toml(service.url + '/v1')}\n"
        f"env_key = {_toml(KEY_VARIABLE)}\n"
        f'wire_api = "responses"\n'
    )
    return ClientSetup(
        variables={"CODEX_HOME": str(folder), KEY_VARIABLE: service.key},
        files={str(folder / "config.toml"): text},
        program="codex",
    )


def opencode(service: Endpoint, folder: Path) -> ClientSetup:
    """OpenCode: a provider, merged over the settings of user and project."""
    del folder
    limit = {"context": service.n_ctx, "output": service.max_output}
    # Versions differ in which of the two they read.
    images = {
        "attachment": service.accepts_images,
        "modalities": {"input": service.modalities, "output": ["text"]},
    }
    model = {"name": service.model, "limit": limit, **images}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlx-stack",
        "options": {"baseURL": f"{service.url}/v1", "apiKey": service.key},
        "models": {service.model: model},
    }
    settings = {
        "provider": {"mlx-stack": provider},
        **dict.fromkeys(("model", "small_model"), f"mlx-stack/{service.model}"),
    }
    return ClientSetup({"OPENCODE_CONFIG_CONTENT": json.dumps(settings)}, program="opencode")


def aider(service: Endpoint, folder: Path) -> ClientSetup:
    """aider: an OpenAI endpoint, and sizes of its unknown model.

    Variables of its own go before those of a `.env` and before its config file.
    """
    name = f"openai/{service.model}"
    sizes = {"max_input_tokens": service.n_ctx, "max_output_tokens": service.max_output}
    costs = {"input_cost_per_token": 0, "output_cost_per_token": 0}
    file = str(folder / "models.json")
    kind = {"litellm_provider": "openai", "mode": "chat", "supports_vision": service.accepts_images}
    about = {name: {**sizes, **costs, **kind}}
    return ClientSetup(
        variables={
            "AIDER_OPENAI_API_BASE": f"{service.url}/v1",
            "AIDER_OPENAI_API_KEY": service.key,
            "AIDER_MODEL": name,
            "AIDER_WEAK_MODEL": name,
            "AIDER_MODEL_METADATA_FILE": file,
        },
        files={file: json.dumps(about, indent=2) + "\n"},
        program="aider",
        options=("--model", name),
    )


def _pi_provider(service: Endpoint) -> dict[str, object]:
    """Provider in the form of pi's library, which OpenClaw uses too."""
    model = {
        "id": service.model,
        "name": service.model,
        "reasoning": True,
        "input": service.modalities,
        "contextWindow": service.n_ctx,
        "maxTokens": service.max_output,
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
    }
    return {
        "baseUrl": f"{service.url}/v1",
        "api": "openai-completions",
        "apiKey": service.key,
        "models": [model],
    }


def pi(service: Endpoint, folder: Path) -> ClientSetup:
    """pi: a provider in an agent folder of ours."""
    text = json.dumps({"providers": {"mlx-stack": _pi_provider(service)}}, indent=2) + "\n"
    return ClientSetup(
        variables={"PI_CODING_AGENT_DIR": str(folder)},
        files={str(folder / "models.json"): text},
        program="pi",
        options=("--provider", "mlx-stack", "--model", service.model),
    )


def qwen(service: Endpoint, folder: Path) -> ClientSetup:
    """qwen-code: an OpenAI endpoint, context size and kinds of input.

    Settings of the system go before those of user and project. It would give up a prompt that
    takes minutes, since it counts no comments of a stream as activity.
    """
    size = {"contextWindowSize": service.n_ctx, "modalities": {"image": service.accepts_images}}
    settings = {
        "model": {"name": service.model, "generationConfig": size},
        "security": {"auth": {"selectedType": "openai"}},
    }
    file = str(folder / "settings.json")
    return ClientSetup(
        variables={
            **openai(service, folder).variables,
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": file,
            "QWEN_CODE_API_TIMEOUT_MS": "0",
            "QWEN_STREAM_IDLE_TIMEOUT_MS": "0",
        },
        files={file: json.dumps(settings, indent=2) + "\n"},
        program="qwen",
    )


def hermes(service: Endpoint, folder: Path) -> ClientSetup:
    """Hermes Agent: a managed scope, whose values go before those of the user's config.

    Its contexts of auxiliary models are otherwise asked of the provider.
    """
    model = {
        "default": service.model,
        "provider": "custom",
        "base_url": f"{service.url}/v1",
        "api_key": service.key,
        "api_mode": "chat_completions",
        "context_length": service.n_ctx,
        "supports_vision": service.accepts_images,
    }
    return ClientSetup(
        variables={"HERMES_MANAGED_DIR": str(folder)},
        unset=("HERMES_INFERENCE_MODEL", "HERMES_INFERENCE_PROVIDER"),
        # JSON is YAML.
        files={str(folder / "config.yaml"): json.dumps({"model": model}, indent=2) + "\n"},
        program="hermes",
    )


def openclaw(service: Endpoint, folder: Path) -> ClientSetup:
    """OpenClaw without a gateway: config and state in a folder of ours.

    Its search of memories needs embeddings of a provider, and is off.
    """
    settings = {
        "models": {"mode": "merge", "providers": {"mlx-stack": _pi_provider(service)}},
        "agents": {"defaults": {"model": {"primary": f"mlx-stack/{service.model}"}}},
        "memory": {"search": {"enabled": False}},
    }
    file = str(folder / "openclaw.json")
    return ClientSetup(
        variables={"OPENCLAW_CONFIG_PATH": file, "OPENCLAW_STATE_DIR": str(folder / "state")},
        files={file: json.dumps(settings, indent=2) + "\n"},
        program="openclaw",
        default_arguments=("chat",),
    )


def openai(service: Endpoint, folder: Path) -> ClientSetup:
    """Anything that uses an OpenAI SDK."""
    del folder
    return ClientSetup(
        variables={
            "OPENAI_BASE_URL": f"{service.url}/v1",
            "OPENAI_API_KEY": service.key,
            "OPENAI_MODEL": service.model,
        }
    )


CLIENTS: dict[str, Callable[[Endpoint, Path], ClientSetup]] = {
    "claude": claude,
    "codex": codex,
    "opencode": opencode,
    "aider": aider,
    "pi": pi,
    "qwen": qwen,
    "hermes": hermes,
    "openclaw": openclaw,
    "openai": openai,
}


def too_small(client: str, service: Endpoint) -> str | None:
    """Why the client cannot work with the service's slots, if so."""
    if is_large_enough(client, service.n_ctx):
        return None
    if service.n_ctx < MIN_CONTEXT_TOKENS.get(client, 0):
        return (
            f"{client} refuses a context of less than {MIN_CONTEXT_TOKENS[client]:,} tokens, and a "
            f"slot of {service.model} holds {service.n_ctx:,}"
        )
    return (
        f"{client} sends about {FIRST_PROMPT_TOKENS[client]:,} tokens before the first word "
        f"of a task, and a slot of {service.model} holds {service.n_ctx:,}: it cannot work "
        "there"
    )


def is_large_enough(client: str, n_ctx: int) -> bool:
    """Whether a slot of so many tokens holds the client's prompts."""
    return n_ctx >= least_context(client)


def least_context(client: str) -> int:
    """Least tokens of a slot for the client; 0 for any."""
    n_first = FIRST_PROMPT_TOKENS.get(client, 0)
    if n_first:
        return max(n_first + WORK_TOKENS, MIN_CONTEXT_TOKENS.get(client, 0))
    return 0


def first_command(n_ctx: int) -> str:
    """The command for a first request to slots of so many tokens."""
    if is_large_enough("claude", n_ctx):
        return "mlx-stack run claude"
    return "mlx-stack chat"


def as_shell(setup: ClientSetup) -> str:
    """A script for `eval "$(mlx-stack env NAME)"`, readable enough to copy from."""
    lines = []
    for path, text in setup.files.items():
        lines += [
            f"mkdir -p -m 700 {shlex.quote(str(Path(path).parent))}",
            f"printf '%s' {shlex.quote(text)} > {shlex.quote(path)}",
        ]
    if setup.unset:
        lines.append(f"unset {' '.join(setup.unset)}")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in setup.variables.items()]
    return "\n".join(lines) + "\n"


def _toml(text: str) -> str:
    return json.dumps(text)
