"""A slice of the damage to a home; `make soak` runs more of it."""

from pathlib import Path

import pytest

from mlxstack.store.agent_history import AgentFolders, History
from tests.endurance.damaged import damaged, small

pytestmark = [pytest.mark.mlx, pytest.mark.slow, pytest.mark.net]


def test_damaged_files_of_a_home_change_no_answer(tmp_path: Path) -> None:
    outcome = damaged(tmp_path / "home", 2, 2, small(tmp_path / "model"))
    assert outcome.n_damaged >= 4
    assert outcome.n_compared == 12


@pytest.mark.soak
@pytest.mark.parametrize("seed", (1, 3, 4))
def test_files_of_a_home_are_damaged_again_and_again(tmp_path: Path, seed: int) -> None:
    assert damaged(tmp_path, seed, n_rounds=20).n_damaged > 50


def test_a_folder_in_the_place_of_a_file_is_set_aside(tmp_path: Path) -> None:
    agents = AgentFolders(tmp_path)
    agents.write("bob", History(({"role": "user", "content": "first"},)))
    history = tmp_path / "bob" / "history.json"
    history.unlink()
    history.mkdir()
    (history / "mine").write_text("kept")
    messages = ({"role": "user", "content": "second"},)
    agents.write("bob", History(messages))
    assert agents.read("bob").messages == messages
    assert [path.read_text() for path in (tmp_path / "bob").glob("history.json.*.folder/mine")] == [
        "kept"
    ]
