"""Members of agents: which member served an agent last."""

from collections import OrderedDict
from pathlib import Path

import msgspec
from msgspec import Struct

from mlxstack.gateway.spec import GatewaySpec, home_of, names_of
from mlxstack.store.agent_history import folder_of, is_agent

MOST_AGENTS = 10_000


class ManifestModel(Struct):
    """The model in the manifest of an agent's KV."""

    model: str = ""


class AgentMembers:
    """Names of the members that served agents; the least recently served agents go first."""

    def __init__(self, spec: GatewaySpec) -> None:
        self._folder, self._names = home_of(spec).agents, names_of(spec)
        self._agents: OrderedDict[str, str] = OrderedDict()

    def note(self, agent: str, member: str) -> None:
        """Note that a member serves an agent."""
        self._agents[agent] = member
        self._agents.move_to_end(agent)
        while len(self._agents) > MOST_AGENTS:
            self._agents.popitem(last=False)

    def find(self, agent: str) -> str | None:
        """Member that served an agent last: since the start, else by the KV on disk."""
        name = self._agents.get(agent)
        if name is None and is_agent(agent):
            folder = self._folder / folder_of(agent)
            files = sorted(folder.glob("*/manifest.json"), key=_age, reverse=True)
            models = (_manifest_model(file) for file in files)
            name = next((self._names[one] for one in models if one in self._names), None)
        return name


def _age(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _manifest_model(file: Path) -> str:
    try:
        return msgspec.json.decode(file.read_bytes(), type=ManifestModel).model
    except (OSError, msgspec.MsgspecError):
        return ""
