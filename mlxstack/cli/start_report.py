"""Reports of a start: warnings, and next commands."""

import shlex
from typing import TYPE_CHECKING

from mlxstack.cli.output import as_json, note, say

if TYPE_CHECKING:
    from mlxstack.control.start import Started
    from mlxstack.core.preset import Preset
    from mlxstack.host.services import ServiceSpec

TEXT = '{"prompt": "The capital of France is", "max_tokens": 60}'
CHAT = '{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 60}'

MAX_NAMED = 5
"""Other members of a gateway that are named."""


def report_service(started: "Started", preset: "Preset", json: bool) -> None:
    """Print a started service, its warnings, and a first request."""
    import asyncio

    from mlxstack.control.probe import running_props
    from mlxstack.core.formatting import tokens
    from mlxstack.core.preset import ServiceKind

    spec = started.state.spec
    props = asyncio.run(running_props(spec.url, preset))
    if json:
        notes = {"why_not_batching": props.why_not_batching, "template_notes": props.template_notes}
        as_json(facts(started) | notes)
        return
    agents = f"{spec.n_slots} agents"
    if spec.n_slots == 1:
        agents = "1 agent"
    say(
        f"{spec.name} is ready at {spec.url} after {started.seconds:.1f} s "
        f"({agents} at once, {tokens(spec.n_ctx)} tokens of context each)"
    )
    if 0 < props.n_ctx_train < spec.n_ctx:
        note(f"warning: trained for {props.n_ctx_train} tokens; answers beyond them get worse")
    for remark in props.remarks:
        note(f"note: {remark}")
    for finding in () if props.is_base_model else props.template_notes:
        note(f"warning: chat template: {finding}")
    is_base = props.is_base_model and preset.kind is ServiceKind.CHAT
    if is_base:
        note("warning: a base model: it continues text and answers no chat (no chat template)")
    say("Next:")
    if preset.kind is ServiceKind.CHAT and not is_base:
        _show_next(spec)
    say(f"  {_curl(spec, preset, is_base)}")


def _show_next(spec: "ServiceSpec") -> None:
    """Print the commands that use a service; named where several run."""
    from mlxstack.host import services
    from mlxstack.host.coding_clients import is_large_enough

    is_alone = len(services.running(spec.home)) == 1
    option = ""
    chat = "mlx-stack chat"
    if not is_alone:
        option = f" --name {spec.name}"
        chat = f"mlx-stack chat {spec.name}"
    commands = [(chat, "talk to the model")]
    if is_large_enough("claude", spec.n_ctx):
        commands.append((f"mlx-stack run claude{option}", "or codex, opencode, aider, pi, qwen"))
    commands.append((f"mlx-stack tui{option}", "watch agents, cache and memory"))
    commands.append((f"{spec.url}/", "a chat and snippets in a browser"))
    width = max(len(command) for command, _ in commands)
    for command, description in commands:
        say(f"  {command:<{width}}  {description}")


def report_gateway(started: "Started", json: bool) -> None:
    spec = started.state.spec
    if json:
        as_json(facts(started))
        return
    first, *further = spec.preset.split(", ")
    others = ", ".join(further[:MAX_NAMED]) or "none"
    if len(further) > MAX_NAMED:
        others += f" and {len(further) - MAX_NAMED} more (mlx-stack models)"
    say(f"{spec.name} is ready at {spec.url} after {started.seconds:.1f} s")
    say(f"  {first} answers requests without a model; others: {others}")


def facts(started: "Started") -> dict[str, object]:
    state = started.state
    spec = started.state.spec
    return {
        "name": spec.name,
        "preset": spec.preset,
        "url": spec.url,
        "supervisor_pid": state.supervisor.pid,
        "worker_pid": state.worker.pid if state.worker is not None else None,
        "log": str(spec.home.log_file(spec.name)),
        "seconds": round(started.seconds, 3),
    }


def _curl(spec: "ServiceSpec", preset: "Preset", is_base: bool) -> str:
    key = ""
    if preset.server.api_keys:
        key = " -H 'authorization: Bearer YOUR_KEY'"
    from mlxstack.core.preset import ServiceKind

    path = "chat/completions"
    body = CHAT
    if preset.kind is ServiceKind.EMBEDDING:
        path = "embeddings"
        body = '{"input": "Hello!"}'
    elif is_base:
        path = "completions"
        body = TEXT
    return (
        f"curl {spec.url}/v1/{path}{key} -H 'content-type: application/json' -d {shlex.quote(body)}"
    )
