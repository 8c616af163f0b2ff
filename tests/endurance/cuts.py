"""Power loss while a real engine serves, parks, saves and makes room: what is there is whole."""

import os
import shutil
from contextlib import suppress
from pathlib import Path
from random import Random

from msgspec import Struct

from mlxstack.core.commands import SaveSlot
from mlxstack.core.errors import DiskFull, NotFound
from mlxstack.core.interfaces import Manifest
from mlxstack.core.preset import DiskSpec, PrefixCacheSpec, SlotSpec
from mlxstack.store.agent_history import AgentFolders
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.slot_files import SlotFileFolder
from tests.endurance.aftermath import check_answers
from tests.engine.harness import preset_of, prompt, running
from tests.store.power import Medium, Op, Recorder, Survival, everything, nothing, plant, some

N_CTX = 512
N_AGENTS = 3
MAX_BYTES = 600_000
"""So little that room has to be made for some saves."""

RECORDER = Recorder()


class Saved(Struct, frozen=True):
    """After `n_ops` operations it was said that this slot file holds these tokens."""

    n_ops: int
    name: str
    tokens: tuple[int, ...]


class Outcome(Struct, frozen=True):
    """Over all cuts; `n_answered` agents and slot files were asked on a fresh engine."""

    n_ops: int
    n_deleted: int
    n_cuts: int
    n_contexts: int
    n_answered: int


def cuts(model: Path, home: Path, n_turns: int, n_engines: int, seed: int) -> Outcome:
    """Cut at every operation; a fresh engine answers after `n_engines` of the cuts."""
    random = Random(seed)
    ops, saved = _record(model, home / "lived", n_turns, random)
    chosen = set(random.sample(range(1, len(ops)), n_engines))
    medium = Medium()
    ways = [
        Survival("all", everything, everything),
        Survival("none", nothing, nothing),
        Survival("names", everything, nothing),
        Survival("chance", some(random), some(random)),
    ]
    n_contexts = n_answered = 0
    for n_done, op in enumerate(ops, start=1):
        medium.take(op)
        for way in (ways[0], ways[1 + n_done % 3]):
            root = home / f"{n_done}-{way.name}"
            tree = medium.after(way)
            plant(tree, root)
            n_contexts += _check(root, [save for save in saved if save.n_ops <= n_done])
            if n_done in chosen:
                files = [file.name for file in SlotFileFolder(root / "slots").list()]
                n_answered += check_answers(model, root, N_CTX, N_AGENTS, files)
            shutil.rmtree(root)
    return Outcome(
        len(ops), sum(op.kind == "unlink" for op in ops), 2 * len(ops), n_contexts, n_answered
    )


def _record(model: Path, home: Path, n_turns: int, random: Random) -> tuple[list[Op], list[Saved]]:
    home.mkdir()
    saved = []
    cache = PrefixCacheSpec(disk=DiskSpec(max_bytes=MAX_BYTES))
    preset = preset_of(model, slots=SlotSpec(count=2, n_ctx=N_CTX), prefix_cache=cache)
    with RECORDER.watching(home) as ops, running(preset, home, disk=RECORDER.disk) as driver:
        for turn in range(n_turns):
            agent = turn % N_AGENTS
            tokens = prompt(150, seed=agent) + prompt(random.randrange(20, 90), seed=turn)
            driver.answer(tokens, 4, agent=f"agent-{agent}")
            slot = random.randrange(2)
            name = f"{agent}.bin"
            with suppress(DiskFull):
                driver.engine.run_slot_command(SaveSlot(slot, name)).result(timeout=60)
                saved.append(Saved(len(ops), name, driver.context(slot)))
            driver.catch_up()
            _age(home)
    return ops, saved


def _age(home: Path) -> None:
    """What was used in the last seconds would not make room."""
    for path in home.rglob("*"):
        about = path.stat()
        os.utime(path, (about.st_atime - 60, about.st_mtime - 60))


def _check(root: Path, saved: list[Saved]) -> int:
    """Every context is whole, and what was said to be saved is not older than that."""
    vault = DiskKVStore(root / "kv")
    shelf = SlotFileFolder(root / "slots")
    agents = AgentFolders(root / "agents")
    slots = {file.name: shelf.peek(file) for file in shelf.list()}
    contexts = [*slots.values()]
    contexts += [agents.peek_manifest(file.agent, file.model) for file in agents.manifests()]
    for context in contexts:
        _read(vault, context)
    for name, manifest in slots.items():
        expected = [save.tokens for save in saved if save.name == name]
        assert (
            not expected or manifest.tokens not in expected[:-1] or manifest.tokens == expected[-1]
        ), name
    return len(contexts)


def _read(vault: DiskKVStore, context: Manifest) -> None:
    for key in (*context.segments, *context.checkpoints):
        try:
            vault.read(context.identity, key)
        except NotFound as error:
            raise AssertionError(f"{key} of {context} is not there") from error
