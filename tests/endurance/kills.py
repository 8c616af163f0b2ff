"""kill -9 at random moments: what is on disk afterwards is whole, or ignored and said so."""

import subprocess
import sys
import time
from pathlib import Path
from random import Random

from msgspec import Struct

from mlxstack.store.agent_history import AgentFolders
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.slot_files import SlotFileFolder
from tests.endurance.aftermath import check_answers
from tests.endurance.victim import N_CTX

ROOT = Path(__file__).parents[2]


class Outcome(Struct, frozen=True):
    """Over all kills."""

    n_kills: int
    n_files: int
    n_restored: int


def kills(model: Path, home: Path, n_kills: int, seed: int) -> Outcome:
    """Kill `n_kills` victims on one home; after each, everything on disk must be sound."""
    random = Random(seed)
    n_files = n_restored = 0
    for number in range(n_kills):
        _kill_one(model, home, number, random)
        n_files += _check_files(home)
        if number % 10 == 0 or number == n_kills - 1:
            files = [file.name for file in SlotFileFolder(home / "slots").list()]
            check_answers(model, home, N_CTX, 4, files)
            n_restored += len(files)
    return Outcome(n_kills, n_files, n_restored)


def _kill_one(model: Path, home: Path, seed: int, random: Random) -> None:
    command = [sys.executable, "-m", "tests.endurance.victim", str(model), str(home), str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        for _ in range(random.randrange(1, 8)):
            assert victim.stdout.readline(), "the victim died by itself"
        time.sleep(random.random() * 0.05)
        victim.kill()


def _check_files(home: Path) -> int:
    """Every KV file, slot file and manifest reads back whole, and all it names is there.

    Opening the stores sweeps away what was half written.
    """
    vault = DiskKVStore(home / "kv")
    shelf = SlotFileFolder(home / "slots")
    n_files = 0
    for entry in vault.entries():
        vault.read(entry.identity, entry.key)
        n_files += 1
    agents = AgentFolders(home / "agents")
    manifests = [shelf.read(file.name) for file in shelf.list()]
    manifests += [agents.peek_manifest(file.agent, file.model) for file in agents.manifests()]
    for manifest in manifests:
        for key in (*manifest.segments, *manifest.checkpoints):
            vault.read(manifest.identity, key)
        n_files += 1
    return n_files
