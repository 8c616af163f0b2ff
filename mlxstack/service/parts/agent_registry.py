"""Agent registry: titles, requests, tokens and last turns of all agents."""

import logging
import re
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePosixPath, PureWindowsPath

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from mlxstack.core.commands import AgentKVLocation
from mlxstack.core.conversation import Conversation, Message, Role, Tool
from mlxstack.core.engine_snapshot import SlotView, Snapshot
from mlxstack.core.errors import StackError
from mlxstack.core.request import Priority
from mlxstack.core.status import AgentKVView, AgentView, MissView, RequestView, TurnView
from mlxstack.core.thinking import Effort
from mlxstack.policy.kv.conversation_id import ConversationNamer, user_turn_digests
from mlxstack.service.parts.agent_store import AgentStore, StoredKV
from mlxstack.service.parts.stats import BUSY
from mlxstack.store.agent_history import History
from mlxstack.text.images.marks import unmarked
from mlxstack.text.normalize_messages import pair_results

SEPARATOR = " · "
MAX_CHARS = 40
MAX_SCANNED = 200_000

CLIENTS = (
    ("claude", re.compile(r"\bClaude Code\b|\bClaude Agent SDK\b")),
    ("codex", re.compile(r"\bCodex\b")),
    ("opencode", re.compile(r"\bopencode\b", re.I)),
    ("qwen", re.compile(r"\bQwen Code\b|interactive CLI agent developed by Alibaba", re.I)),
    ("pi", re.compile(r"operating inside pi, a coding agent|\byou are pi\b", re.I)),
    ("hermes", re.compile(r"\byou are Hermes Agent\b", re.I)),
    ("openclaw", re.compile(r"\brunning inside OpenClaw\b")),
    ("aider", re.compile(r"Act as an expert software developer")),
)
"""Clients by words of their system prompts."""

FOLDER = re.compile(
    r"(?:<cwd>|working directory(?: is)?:|working in the directory:)[ \t]*[`\"']?"
    r"(?P<path>(?:/|~|[A-Za-z]:\\)[^\n<`\"']*)",
    re.I,
)
REMINDERS = re.compile(
    r"<(?P<tag>system-reminder|environment_context|user_instructions|session_context)>"
    r".*?(?:</(?P=tag)>|\Z)",
    re.S,
)
LEADING_REMINDERS = re.compile(rf"(?:\s*{REMINDERS.pattern})+\s*", re.S)


class AgentTitle(Struct, frozen=True):
    """`title` names the agent, `opening` are the first words of its prompt."""

    title: str
    opening: str = ""


def agent_title(conversation: Conversation, hint: str | None) -> AgentTitle:
    """Name an agent by client and folder, else by its first words."""
    messages = conversation.messages
    system = _system_text(conversation)
    first = next((m for m in messages if m.role is Role.USER), Message(Role.USER))
    user = (unmarked(first.text) if first.images else first.text)[:MAX_SCANNED]
    client = _client(system, hint)
    folder = _folder(system) or _folder(user)
    opening = first_words(REMINDERS.sub("", user))
    title = SEPARATOR.join(filter(None, (client, folder or opening)))
    return AgentTitle(title, first_words(system) or opening)


def client_of(conversation: Conversation, hint: str | None) -> str:
    """Client of a conversation by its system messages, if known."""
    return _client(_system_text(conversation), hint)


def work_folder(conversation: Conversation) -> str:
    """Folder that the system messages or the first question name."""
    user = next((m.text for m in conversation.messages if m.role is Role.USER), "")
    return _path(_system_text(conversation)) or _path(user[:MAX_SCANNED])


def leading_reminders(text: str) -> str:
    """Reminders at the beginning of a user's message."""
    match = LEADING_REMINDERS.match(text)
    return match[0] if match else ""


def first_words(text: str) -> str:
    """The beginning of a text, cut at a word."""
    line = " ".join(text[: 8 * MAX_CHARS].split())
    if len(line) <= MAX_CHARS:
        return line
    return line[: MAX_CHARS + 1].rpartition(" ")[0] or line[:MAX_CHARS]


def _client(system: str, hint: str | None) -> str:
    named = (hint or "").partition(":")[0]
    if named in {"claude", "codex", "opencode"}:
        return named
    return next((name for name, pattern in CLIENTS if pattern.search(system)), "")


def _system_text(conversation: Conversation) -> str:
    texts = (m.text for m in conversation.messages if m.role is Role.SYSTEM)
    return "\n".join(texts)[:MAX_SCANNED]


def _path(text: str) -> str:
    match = FOLDER.search(text)
    return match["path"].strip() if match else ""


def _folder(text: str) -> str:
    path = _path(text)
    if path[1:2] == ":":
        return PureWindowsPath(path).name
    return PurePosixPath(path).name


MAX_AGENTS = 1000
MAX_TURNS = 50


class AgentSums(Struct, frozen=True):
    """Sums over all requests of an agent; `n_tokens` after the latest one."""

    n_requests: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_generated: int = 0
    saved_s: float = 0.0
    n_tokens: int = 0
    n_drafted: int = 0
    n_accepted: int = 0


SUMMED = ("n_prompt", "n_cached", "n_generated", "saved_s", "n_drafted", "n_accepted")
"""Fields that are sums over the requests."""


class AgentSettings(Struct, frozen=True):
    """Settings of one agent; None leaves a value open."""

    priority: Priority | None = None
    is_pinned: bool = False
    """Its KV stays in memory."""
    thinking_budget: int | None = None
    """Maximum number of reasoning tokens of an answer; UNLIMITED has no maximum."""
    effort: Effort | None = None
    max_context: int | None = None
    """Maximum number of tokens of prompt and answer together."""


class AgentRecord:
    """Record of one agent."""

    def __init__(self, name: str, *, is_explicit: bool) -> None:
        self.name = name
        self.is_explicit = is_explicit
        self.settings = AgentSettings()
        self.sums = AgentSums()
        self.used_at = time.time()
        self.miss: MissView | None = None
        self.missed_at = 0.0
        self.turns: deque[tuple[float, TurnView]] = deque(maxlen=MAX_TURNS)
        """Finished requests, with their time in Unix seconds."""

    @property
    def is_lasting(self) -> bool:
        """Whether it stays however long it is unused."""
        return self.is_explicit or self.settings != AgentSettings()

    def count(self, view: RequestView, ended_at: float) -> None:
        """Add a finished request."""
        sums = {name: getattr(self.sums, name) + getattr(view, name) for name in SUMMED}
        n_tokens = view.n_prompt + view.n_generated
        self.sums = AgentSums(n_requests=self.sums.n_requests + 1, n_tokens=n_tokens, **sums)
        self.used_at = ended_at
        if view.miss is not None:
            self.miss = view.miss
            self.missed_at = ended_at
        turn = TurnView(
            n_cached=view.n_cached,
            n_computed=view.n_prompt - view.n_cached,
            n_generated=view.n_generated,
            ttft_s=view.ttft_s,
            reason=view.miss.reason if view.miss else None,
        )
        self.turns.append((ended_at, turn))


class AgentRegistry:
    """Agent records, filled on the event loop.

    The least recently used go first, unless they are explicit or have settings.
    """

    def __init__(self) -> None:
        self._records: OrderedDict[str, AgentRecord] = OrderedDict()
        self._names = ConversationNamer()
        self._titles: OrderedDict[str, AgentTitle] = OrderedDict()

    def name(self, conversation: Conversation, hint: str | None, salt: str) -> str:
        """Name of a conversation without an explicit agent."""
        return self._names.name(_turns(conversation, salt), hint)

    def expected_name(self, conversation: Conversation, hint: str | None, salt: str) -> str:
        """The name that `name` would return, without keeping it."""
        return self._names.expected(_turns(conversation, salt), hint)

    def entitle(self, name: str, conversation: Conversation, hint: str | None) -> None:
        """Record the title of an agent; least recently used ones go."""
        if name not in self._titles:
            self._titles[name] = agent_title(conversation, hint)
        self._titles.move_to_end(name)
        if len(self._titles) > MAX_AGENTS:
            self._titles.popitem(last=False)

    def title(self, name: str) -> AgentTitle | None:
        """Client, folder and first words of an agent, where they are known."""
        return self._titles.get(name)

    def record(self, name: str, *, is_explicit: bool) -> AgentRecord:
        """Record of an agent, created if it is new."""
        record = self._records.get(name)
        if record is None:
            self._make_room()
            record = self._records[name] = AgentRecord(name, is_explicit=is_explicit)
        record.is_explicit |= is_explicit
        return record

    def find(self, name: str) -> AgentRecord | None:
        """Record of an agent, if there is one."""
        return self._records.get(name)

    def settings(self, name: str | None) -> AgentSettings:
        """Settings of an agent; an unknown one has none."""
        record = self._records.get(name or "")
        return AgentSettings() if record is None else record.settings

    def forget(self, name: str) -> None:
        """Drop the record of an agent."""
        self._records.pop(name, None)

    def note(self, view: RequestView, ended_at: float, *, is_explicit: bool) -> None:
        """Add a finished request to its agent, if it had a slot."""
        if view.agent is None or view.slot is None:
            return
        self.record(view.agent, is_explicit=is_explicit).count(view, ended_at)
        self._records.move_to_end(view.agent)

    def views(
        self,
        records: Iterable[AgentRecord],
        snapshot: Snapshot,
        model: str,
        locations: Mapping[str, AgentKVLocation],
        stored: Callable[[str], Iterable[StoredKV]],
    ) -> tuple[AgentView, ...]:
        """Agents as the API shows them.

        `locations` is the place of each outside the slots, `stored` its saved KV of any model.
        """
        slots = _slots(snapshot)
        now = time.time()
        views = []
        for record in records:
            slot = slots.get(record.name)
            outside = locations.get(record.name, AgentKVLocation(record.name))
            states = _states(slot, model, outside, stored(record.name))
            views.append(_view(record, slot, states, self.title(record.name), now))
        return tuple(views)

    @property
    def n_agents(self) -> int:
        """Number of records."""
        return len(self._records)

    @property
    def latest(self) -> tuple[AgentRecord, ...]:
        """All records, the last used first."""
        return tuple(sorted(self._records.values(), key=lambda record: -record.used_at))

    def _make_room(self) -> None:
        """Drop the oldest record before a new one comes.

        A pin without its record could not be found to be removed; settings would be lost.
        """
        if len(self._records) < MAX_AGENTS:
            return
        leaving = (n for n, r in self._records.items() if not r.is_lasting)
        oldest = next(leaving, None)
        if oldest is not None:
            del self._records[oldest]


def _turns(conversation: Conversation, salt: str) -> tuple[str, ...]:
    messages = pair_results(conversation.messages)
    return user_turn_digests(replace(conversation, messages=messages), salt)


def age_s(now: float, then: float) -> float:
    """Seconds since `then`; 0 if the clock was set back behind it."""
    return max(0.0, now - then)


def _slots(snapshot: Snapshot) -> dict[str, SlotView]:
    """Slot of every live agent: a busy one, else the last one."""
    held = [slot for slot in snapshot.slots if slot.agent and slot.n_tokens]
    ranked = sorted(held, key=lambda slot: (slot.state in BUSY, -slot.idle_s))
    return {slot.agent: slot for slot in ranked if slot.agent}


def _view(
    record: AgentRecord,
    slot: SlotView | None,
    states: tuple[AgentKVView, ...],
    title: AgentTitle | None,
    now: float,
) -> AgentView:
    state = next(iter(states), AgentKVView(""))
    sums = asdict(record.sums)
    sums["n_tokens"] = sums["n_tokens"] or state.n_tokens
    settings = record.settings
    view = AgentView(
        id=record.name,
        place="parked" if state.place == "memory" else state.place,
        slot=None,
        priority=Priority.NORMAL if settings.priority is None else settings.priority,
        is_pinned=settings.is_pinned,
        thinking_budget=settings.thinking_budget,
        effort=settings.effort,
        max_context=settings.max_context,
        n_bytes=state.n_bytes,
        idle_s=age_s(now, record.used_at),
        states=states,
        turns=tuple(replace(turn, age_s=age_s(now, turn_at)) for turn_at, turn in record.turns),
        **sums,
    )
    if title is not None:
        view = replace(view, name=title.title)
    if record.miss is not None:
        view = replace(view, miss=replace(record.miss, age_s=age_s(now, record.missed_at)))
    if slot is not None:
        view = replace(view, slot=slot.id, n_tokens=slot.n_tokens)
        if slot.state in BUSY:
            view = replace(view, idle_s=0.0)
    return view


def _states(
    slot: SlotView | None, model: str, location: AgentKVLocation, stored: Iterable[StoredKV]
) -> tuple[AgentKVView, ...]:
    """KV of the served model first, then of other models on disk."""
    states = {s.model: AgentKVView(s.model, s.n_tokens, s.n_bytes, "disk") for s in stored}
    if slot is not None:
        states[model] = AgentKVView(model, slot.n_tokens, slot.n_bytes, "live")
    elif location.memory_bytes:
        states[model] = AgentKVView(model, location.n_tokens, location.memory_bytes, "memory")
    elif location.disk_bytes:
        states[model] = AgentKVView(model, location.n_tokens, location.disk_bytes, "disk")
    return tuple(sorted(states.values(), key=lambda state: state.model != model))


log = logging.getLogger("mlxstack.agents")


class AgentFacts(AgentSettings, frozen=True):
    """Fields of history.json other than messages; `used_at` is Unix seconds."""

    sums: AgentSums = AgentSums()
    used_at: float = 0.0
    tools: tuple[Tool, ...] = ()


def restore_agents(agent_store: AgentStore, agent_registry: AgentRegistry) -> None:
    """Restore all records at startup; a damaged history is only logged."""
    agent_store.survey()
    for agent in agent_store.agents_with_settings():
        try:
            settings = msgspec.convert(agent_store.read_settings(agent), AgentSettings)
        except (StackError, msgspec.ValidationError) as error:
            log.warning("agent %s has no settings: %s", agent, error)
            continue
        agent_registry.record(agent, is_explicit=False).settings = settings
    for agent in agent_store.agents():
        record = agent_registry.record(agent, is_explicit=True)
        try:
            facts = facts_of(agent_store.read(agent))
        except StackError as error:
            log.warning("%s", error)
            continue
        record.settings = settings_of(facts)
        record.sums = facts.sums
        record.used_at = facts.used_at


def facts_about(record: AgentRecord, tools: tuple[Tool, ...]) -> AgentFacts:
    """Facts of a record."""
    return AgentFacts(
        **asdict(record.settings), sums=record.sums, used_at=record.used_at, tools=tools
    )


def settings_of(facts: AgentFacts) -> AgentSettings:
    """Settings among the facts of a history."""
    return AgentSettings(*(getattr(facts, name) for name in AgentSettings.__struct_fields__))


def facts_of(history: History) -> AgentFacts:
    """Facts of a history, defaults where they cannot be read."""
    try:
        return msgspec.convert(history.facts, AgentFacts)
    except msgspec.ValidationError as error:
        log.warning("the facts of a stored history are ignored: %s", error)
        return AgentFacts()
