"""`agents`: list, fork, move, rewind, pin and delete agents."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxstack.cli.agent_names import Found, groups, id_of, labels_of
from mlxstack.cli.completion import agent_names
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
    "PRIORITY",
)  # fmt: skip

All = Annotated[bool, typer.Option("--all", help="Also older agents of the same name.")]
LEAST = ("PRIORITY", "SAVED", "REQUESTS", "SIZE", "IDLE")

HAS_HISTORY = "only agents that the client named have one (docs/slots-and-agents.md)"


@app.without_verb
@app.command("list")
def list_agents(service: ServiceOptions, show_all: All = False) -> VerbResult:
    """List agents: where their KV is, and how much they reuse.

    Of conversations with the same name the latest is listed; OLDER counts the others.
    """
    found = _listed(service)
    labels = labels_of(found)
    shown = [[one] for one in found] if show_all else groups(found)
    rows = [_row(one, labels[one["id"]], len(older)) for one, *older in shown]
    return VerbResult({"agents": found}, lambda: table(HEADS, rows, LEAST))


@app.command()
def show(agent: AgentId, service: ServiceOptions) -> VerbResult:
    """Show an agent: its KV, its cost and its latest turns."""
    path = _path(_known(agent, service))
    found = _request(service, lambda client: client.get(path, Found))
    return VerbResult(found, lambda: _show(found))


@app.command()
def history(agent: AgentId, service: ServiceOptions) -> VerbResult:
    """Print the messages of an agent."""
    path = _path(_known(agent, service), "history")
    try:
        found = _request(service, lambda client: client.get(path, Found))
    except NotFound as why:
        raise NotFound(f"{why}: {HAS_HISTORY}") from None
    return VerbResult(found, "\n".join(map(_message, found["messages"])))


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
    agent = _known(agent, service)
    path = _path(agent) + ("?evict_only=1" if evict_only else "")
    done = _request(service, lambda client: client.delete(path))
    return VerbResult(done, f"{agent} is {'evicted from memory' if evict_only else 'deleted'}")


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
    kv = f"KV of {count(done['n_tokens'])} tokens" if done["n_tokens"] else "no KV"
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
    return VerbResult(done, f"{agent} is {'no longer ' if off else ''}pinned")


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


def _request(service: ServiceOptions, question: "Question[Found]") -> Found:
    """Send one request about agents; a gateway knows the member of each."""
    return service.ask(question, is_of_all=True)


def _known(agent: str, service: ServiceOptions) -> str:
    """Id of the agent that was meant. Raises Misuse, NotFound."""
    _path(agent)
    return id_of(agent, _listed(service))


def _post(
    agent: str, verb: str, body: Found, service: ServiceOptions
) -> tuple[str, dict[str, Any]]:
    """Id of an agent, and the answer to a change of it."""
    agent = _known(agent, service)
    return agent, _request(service, lambda client: client.post(_path(agent, verb), body))


def _listed(service: ServiceOptions) -> list[Found]:
    """All agents, the last used first."""
    return list(_request(service, lambda client: client.get("/v1/agents", Found))["data"])


def _path(agent: str, verb: str = "") -> str:
    return path_of("v1", "agents", agent, *([verb] if verb else []))


def _show(found: Found) -> None:
    table(HEADS, [_row(found, found["name"] or found["id"])])
    kept = found["bytes"]
    places = ", ".join(f"{size(kept[place])} {place}" for place in ("live", "parked", "disk"))
    say(f"KV: {places}{', pinned' if found['is_pinned'] else ''}")
    if found["n_drafted"]:
        accepted = count(found["n_accepted"])
        drafted = count(found["n_drafted"])
        say(f"drafts: {accepted} of {drafted} tokens accepted")
    if found["miss"]:
        say(f"last miss: {_reason(found['miss'])}")
    for state in found["states"]:
        details = f"{count(state['n_tokens'])} tokens, {size(state['n_bytes'])}, {state['place']}"
        say(f"{state['model']}: {details}")
    headings = ("AGE", "REUSED", "COMPUTED", "GENERATED", "TTFT", "MISS")
    table(headings, [_turn(turn) for turn in reversed(found["turns"])])


def _message(message: Found) -> str:
    calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
    made = f" [calls {', '.join(calls)}]" if calls else ""
    return printable_lines(f"{message['role']}: {message['content']}{made}")


def _row(one: Found, label: str, n_older: int = 0) -> tuple[object, ...]:
    where = one["place"] if one["slot"] is None else f"slot {one['slot']}"
    return (
        label,
        one["id"],
        n_older or "",
        where or "-",
        count(one["n_tokens"]),
        count(one["n_requests"]),
        share(one["cached_share"], 1),
        short_time(one["saved_s"]),
        age(one["idle_s"]),
        size(one["n_bytes"]),
        one["priority"],
    )


def _turn(turn: Found) -> tuple[object, ...]:
    return (
        age(turn["age_s"]),
        count(turn["n_cached"]),
        count(turn["n_computed"]),
        count(turn["n_generated"]),
        short_time(turn["ttft_s"]),
        turn["reason"] or "-",
    )


def _reason(miss: Found) -> str:
    at = "" if miss["at"] is None else f" at token {miss['at']}"
    return f"{miss['reason']}{at}, {age(miss['age_s'])} ago"
