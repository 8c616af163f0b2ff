"""`agents`: list, fork, move, rewind, pin and delete agents."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxstack.cli.agent_names import AgentDict, groups, id_of, labels_of
from mlxstack.cli.completion import agent_names
from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.output import say, table
from mlxstack.cli.service_request import ServiceOptions, path_of
from mlxstack.cli.streams import finishes
from mlxstack.cli.units import size
from mlxstack.cli.verbs import VerbApp, VerbResult
from mlxstack.core import formatting
from mlxstack.core.errors import NotFound
from mlxstack.core.formatting import age, count, printable_lines, share, short_time

if TYPE_CHECKING:
    from mlxstack.cli.target import Question

app = VerbApp(help="List, fork, move, rewind, pin and delete agents. Without a verb: the list.")

AgentId = Annotated[
    str,
    typer.Argument(
        help="The agent's id or name, or the beginning of one.", autocompletion=agent_names
    ),
]
HEADS = (
    "NAME", "AGENT", "OLDER", "WHERE", "TOKENS", "REQUESTS", "REUSED", "SAVED", "IDLE", "SIZE",
    "PRIORITY", "SETTINGS",
)  # fmt: skip

All = Annotated[bool, typer.Option("--all", help="Also older agents of the same name.")]
DROPPED_FIRST = ("SETTINGS", "PRIORITY", "SAVED", "REQUESTS", "SIZE", "IDLE")

HAS_HISTORY = "only agents that the client named have one (docs/slots-and-agents.md)"


@app.without_verb
@app.command("list")
def list_agents(service: ServiceOptions, show_all: All = False) -> VerbResult:
    """List agents: where their KV is, and how much they reuse.

    Of conversations with the same name the latest is listed; OLDER counts the others.
    """
    agents = _listed(service)
    labels = labels_of(agents)
    conversations = groups(agents)
    if show_all:
        conversations = [[agent] for agent in agents]
    rows = [_row(latest, labels[latest["id"]], len(older)) for latest, *older in conversations]
    return VerbResult({"agents": agents}, lambda: _table(rows))


@app.command()
def show(agent: AgentId, service: ServiceOptions) -> VerbResult:
    """Show an agent: its KV, its cost and its latest turns."""
    path = _path(_resolved_id(agent, service))
    view = _request(service, lambda client: client.get(path, AgentDict))
    return VerbResult(view, lambda: _show(view))


@app.command()
def history(agent: AgentId, service: ServiceOptions) -> VerbResult:
    """Print the messages of an agent."""
    path = _path(_resolved_id(agent, service), "history")
    try:
        conversation = _request(service, lambda client: client.get(path, AgentDict))
    except NotFound as error:
        raise NotFound(f"{error}: {HAS_HISTORY}") from None
    return VerbResult(conversation, "\n".join(map(_message, conversation["messages"])))


@app.command("rm")
@finishes()
def remove(
    agent: AgentId,
    service: ServiceOptions,
    evict_only: Annotated[
        bool, typer.Option("--evict-only", help="Only free its slot and memory.")
    ] = False,
) -> VerbResult:
    """Delete an agent: its history and its KV in memory.

    `cache gc --older-than 1h` frees the disk once nothing used it for an hour.
    """
    agent = _resolved_id(agent, service)
    path = _path(agent)
    text = f"{agent} is deleted"
    if evict_only:
        path += "?evict_only=1"
        text = f"{agent} is evicted from memory"
    done = _request(service, lambda client: client.delete(path))
    return VerbResult(done, text)


@app.command()
@finishes()
def fork(
    agent: AgentId,
    new: Annotated[str, typer.Argument(help="The id of the new agent.")],
    service: ServiceOptions,
) -> VerbResult:
    """Fork an agent; its KV is shared, not copied."""
    agent, done = _post(agent, "fork", {"id": new}, service)
    return VerbResult(done, f"{new} is a fork of {agent}")


@app.command()
@finishes()
def move(
    agent: AgentId,
    to: Annotated[str, typer.Option("--to", help="URL of the peer, as in `server.peers`.")],
    service: ServiceOptions,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the agent here too.")] = False,
) -> VerbResult:
    """Move an agent to a peer, with its history and its KV."""
    agent, done = _post(agent, "move", {"to": to, "is_kept": keep}, service)
    kv = "no KV"
    if done["n_tokens"]:
        kv = f"KV of {count(done['n_tokens'])} tokens"
    return VerbResult(
        done, f"{agent} is at {to}, with {kv}; {formatting.size(done['n_sent'])} were sent"
    )


@app.command()
@finishes()
def rewind(
    agent: AgentId,
    n_messages: Annotated[int, typer.Argument(help="Number of messages to keep.")],
    service: ServiceOptions,
) -> VerbResult:
    """Go back to an earlier message."""
    agent, done = _post(agent, "rewind", {"n_messages": n_messages}, service)
    return VerbResult(done, f"{agent} has {n_messages} messages")


@app.command()
@finishes()
def pin(
    agent: AgentId,
    service: ServiceOptions,
    off: Annotated[bool, typer.Option("--off", help="Unpin it.")] = False,
) -> VerbResult:
    """Pin an agent: its KV is never evicted from memory."""
    agent, done = _post(agent, "", {"is_pinned": not off}, service)
    if off:
        return VerbResult(done, f"{agent} is no longer pinned")
    return VerbResult(done, f"{agent} is pinned")


@app.command()
@finishes()
def priority(
    agent: AgentId,
    level: Annotated[str, typer.Argument(help="high, normal or low.")],
    service: ServiceOptions,
) -> VerbResult:
    """Set the priority of an agent: high, normal or low."""
    agent, done = _post(agent, "", {"priority": level}, service)
    return VerbResult(done, f"{agent} has priority {level}")


@app.command("set")
@finishes()
def set_values(
    agent: AgentId,
    service: ServiceOptions,
    thinking: Annotated[
        str | None,
        typer.Option(help="Maximum tokens of its thoughts, such as 2048 or 2k; -1: no maximum."),
    ] = None,
    effort: Annotated[
        str | None,
        typer.Option(help="Effort of reasoning: none, minimal, low, medium, high, xhigh or max."),
    ] = None,
    max_context: Annotated[
        str | None,
        typer.Option("--max-context", help="Maximum tokens of prompt and answer, such as 32k."),
    ] = None,
    level: Annotated[str | None, typer.Option("--priority", help="high, normal or low.")] = None,
) -> VerbResult:
    """Change settings of an agent; `default` clears one.

    They hold from its next request on, and stay over restarts.
    """
    sent = {
        "thinking_budget": None if thinking is None else _number(thinking),
        "effort": effort,
        "max_context": max_context,
        "priority": level,
    }
    body = {name: value for name, value in sent.items() if value is not None}
    if not body:
        raise Misuse("nothing to set; give --thinking, --effort, --max-context or --priority")
    agent, done = _post(agent, "", body, service)
    return VerbResult(done, f"{agent}: {_settings(done) or 'no settings of its own'}")


def _short_settings(agent: AgentDict) -> str:
    """Settings other than the priority, for a column."""
    names = {"thinking_budget": "thinking", "effort": "effort", "max_context": "context"}
    values = {label: agent.get(name) for name, label in names.items()}
    return ", ".join(f"{label} {value}" for label, value in values.items() if value is not None)


def _number(text: str) -> int | str:
    """Number of a text, such as -1; other texts stay."""
    try:
        return int(text)
    except ValueError:
        return text


def _settings(agent: AgentDict) -> str:
    """Settings that an agent has of its own, in words."""
    parts: list[str] = []
    budget = agent.get("thinking_budget")
    if budget is not None:
        limit = f"at most {budget:,} tokens"
        parts.append(f"thinking {limit if budget >= 0 else 'without a maximum'}")
    if agent.get("effort"):
        parts.append(f"effort {agent['effort']}")
    max_context = agent.get("max_context")
    if max_context is not None:
        parts.append(f"context at most {max_context:,} tokens")
    if agent["priority"] != "normal":
        parts.append(f"priority {agent['priority']}")
    return ", ".join(parts)


def _request(service: ServiceOptions, question: "Question[AgentDict]") -> AgentDict:
    """Send one request about agents; a gateway knows the member of each."""
    return service.ask(question, is_of_all=True)


def _resolved_id(agent: str, service: ServiceOptions) -> str:
    """Id of the agent that was meant. Raises Misuse, NotFound."""
    _path(agent)
    return id_of(agent, _listed(service))


def _post(
    agent: str, verb: str, body: AgentDict, service: ServiceOptions
) -> tuple[str, dict[str, Any]]:
    """Id of an agent, and the answer to a change of it."""
    agent = _resolved_id(agent, service)
    return agent, _request(service, lambda client: client.post(_path(agent, verb), body))


def _listed(service: ServiceOptions) -> list[AgentDict]:
    """All agents, the last used first."""
    return list(_request(service, lambda client: client.get("/v1/agents", AgentDict))["data"])


def _path(agent: str, verb: str = "") -> str:
    return path_of("v1", "agents", agent, *([verb] if verb else []))


def _show(agent: AgentDict) -> None:
    _table([_row(agent, agent["name"] or agent["id"])[:-1]])
    n_bytes = agent["bytes"]
    places = ", ".join(f"{size(n_bytes[place])} {place}" for place in ("live", "parked", "disk"))
    if settings := _settings(agent):
        say(f"settings: {settings}")
    say(f"KV: {places}{', pinned' if agent['is_pinned'] else ''}")
    if agent["n_drafted"]:
        accepted = count(agent["n_accepted"])
        drafted = count(agent["n_drafted"])
        say(f"drafts: {accepted} of {drafted} tokens accepted")
    if agent["miss"]:
        say(f"last miss: {_reason(agent['miss'])}")
    for state in agent["states"]:
        details = f"{count(state['n_tokens'])} tokens, {size(state['n_bytes'])}, {state['place']}"
        say(f"{state['model']}: {details}")
    headings = ("AGE", "REUSED", "COMPUTED", "GENERATED", "TTFT", "MISS")
    table(headings, [_turn(turn) for turn in reversed(agent["turns"])])


def _table(rows: list[tuple[object, ...]]) -> None:
    """Table of agents; settings only where one has any."""
    has_settings = any(row[len(HEADS) - 1 :] not in ((), ("",)) for row in rows)
    n_columns = len(HEADS) if has_settings else len(HEADS) - 1
    table(HEADS[:n_columns], [row[:n_columns] for row in rows], DROPPED_FIRST)


def _message(message: AgentDict) -> str:
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    suffix = ""
    if calls:
        suffix = f" [calls {', '.join(calls)}]"
    return printable_lines(f"{message['role']}: {message['content']}{suffix}")


def _row(agent: AgentDict, label: str, n_older: int = 0) -> tuple[object, ...]:
    where = agent["place"] if agent["slot"] is None else f"slot {agent['slot']}"
    return (
        label,
        agent["id"],
        n_older or "",
        where or "-",
        count(agent["n_tokens"]),
        count(agent["n_requests"]),
        share(agent["cached_share"], 1),
        short_time(agent["saved_s"]),
        age(agent["idle_s"]),
        size(agent["n_bytes"]),
        agent["priority"],
        _short_settings(agent),
    )


def _turn(turn: AgentDict) -> tuple[object, ...]:
    return (
        age(turn["age_s"]),
        count(turn["n_cached"]),
        count(turn["n_computed"]),
        count(turn["n_generated"]),
        short_time(turn["ttft_s"]),
        turn["reason"] or "-",
    )


def _reason(miss: AgentDict) -> str:
    position = ""
    if miss["at"] is not None:
        position = f" at token {miss['at']}"
    return f"{miss['reason']}{position}, {age(miss['age_s'])} ago"
