"""What the library of agents keeps besides files."""

from pathlib import Path

from mlxstack.service.parts.agent_store import MAX_GONE, AgentStore
from mlxstack.store.agent_history import AgentFolders, History


def test_the_names_of_forgotten_agents_are_bounded(tmp_path: Path) -> None:
    library = AgentStore(AgentFolders(tmp_path))
    library.serve("", is_writing=False)
    for n in range(MAX_GONE + 10):
        library.write(f"a-{n}", History())
        library.remove(f"a-{n}")
    assert len(library._gone) == MAX_GONE
