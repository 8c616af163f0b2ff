"""Members of agents: which member served an agent last."""

import asyncio
import logging
from collections import OrderedDict
from pathlib import Path

import msgspec
from msgspec import Struct

from mlxstack.core.errors import Damaged, SetupError
from mlxstack.gateway.spec import GatewaySpec, home_of, names_of
from mlxstack.host.home import make_folder
from mlxstack.host.services import locked, read_json, write_json
from mlxstack.policy.kv.conversation_id import is_implicit
from mlxstack.store.agent_history import folder_of, is_agent
from mlxstack.store.files import parse_json
from mlxstack.store.manifest_file import Envelope

log = logging.getLogger("mlxstack.gateway")

MAX_AGENTS = 10_000


class ManifestModel(Struct):
    """The model in the manifest of an agent's KV."""

    model: str = ""


class AgentMembers:
    """Member of each agent; the least recently served agents go first.

    All gateways of a home share the file of the named agents. Conversations without a name are
    bounded by themselves, and in memory only: they end with their client.
    """

    def __init__(self, spec: GatewaySpec) -> None:
        home = home_of(spec)
        self._folder = home.agents
        self._file = home.agent_members_file
        self._names = names_of(spec)
        own = {member.name for member in spec.members}
        stored = read_json(self._file, dict[str, str]) or {}
        self._agents = OrderedDict(item for item in stored.items() if item[1] in own)
        self._conversations: OrderedDict[str, str] = OrderedDict()
        self._writing = asyncio.Lock()

    async def note(self, agent: str, member: str) -> None:
        """Note that a member serves an agent; a named one on disk."""
        noted = self._members_by_agent(agent)
        is_new = noted.get(agent) != member
        noted[agent] = member
        noted.move_to_end(agent)
        while len(noted) > MAX_AGENTS:
            noted.popitem(last=False)
        if is_new and noted is self._agents:
            async with self._writing:
                now = noted.get(agent, member)
                await asyncio.to_thread(_write, self._file, agent, now)

    def find(self, agent: str) -> str | None:
        """Member of an agent: as noted, else by KV on disk."""
        name = self._members_by_agent(agent).get(agent)
        if name is None and is_agent(agent):
            folder = self._folder / folder_of(agent)
            files = sorted(folder.glob("*/manifest.json"), key=_age, reverse=True)
            models = (_manifest_model(file) for file in files)
            name = next((self._names[model] for model in models if model in self._names), None)
        return name

    def is_new(self, agent: str) -> bool:
        """Whether an agent has no member and no stored history."""
        if self.find(agent) is not None:
            return False
        return not (is_agent(agent) and (self._folder / folder_of(agent)).exists())

    def _members_by_agent(self, agent: str) -> OrderedDict[str, str]:
        if is_implicit(agent):
            return self._conversations
        return self._agents


def _write(file: Path, agent: str, member: str) -> None:
    """Add an agent to the file, in place of the oldest."""
    try:
        make_folder(file.parent)
        with locked(file.with_suffix(".lock")):
            members = read_json(file, dict[str, str]) or {}
            members.pop(agent, None)
            members[agent] = member
            write_json(file, dict(list(members.items())[-MAX_AGENTS:]))
    except (OSError, SetupError) as error:
        log.warning("a restart may send agent %s to another model: %s", agent, error)


def _age(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _manifest_model(file: Path) -> str:
    try:
        envelope = parse_json(file.read_bytes(), Envelope)
        return msgspec.json.decode(envelope.manifest, type=ManifestModel).model
    except (OSError, Damaged, msgspec.MsgspecError):
        return ""
