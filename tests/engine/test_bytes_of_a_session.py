"""Forty turns of an agent: bytes written, and what a stop and a crash leave."""

import shutil
from pathlib import Path

import pytest
from msgspec import Struct

from mlxstack.core.engine_events import CacheMiss
from mlxstack.core.preset import SlotSpec
from mlxstack.policy.kv.checkpoint_writes import SHARE
from mlxstack.policy.kv.prefix_index import CheckpointMeta
from mlxstack.policy.kv.reuse_plan import MissReason
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.repetition import in_soak

N_TURNS = 40
N_HEAD = 300
N_NEW = 80
N_ANSWER = 12
KINDS = ["tiny", "tiny-swa", "tiny-hybrid", *in_soak("tiny-sinks", "tiny-mla")]


class SessionBytes(Struct, frozen=True):
    """Bytes of a saved context: its tokens' KV, and one checkpoint."""

    kv: int
    checkpoint: int


def answered(driver: Driver, history: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """The next turn of the agent, once what it leaves is on disk; its id, and all tokens."""
    tokens = history + prompt(N_NEW, seed=len(history))
    positions = (N_HEAD, len(tokens) - 4)
    ask = driver.submit(tokens, N_ANSWER, agent="ann", checkpoint_positions=positions)
    driver.finish(ask)
    driver.catch_up()
    return ask, tokens + tuple(driver.tokens(ask))


def session(driver: Driver) -> tuple[int, ...]:
    """Tokens of all turns."""
    history = prompt(N_HEAD, seed=1)
    for _ in range(N_TURNS):
        _, history = answered(driver, history)
    return history


def bytes_of(driver: Driver) -> SessionBytes:
    """Bytes of the agent's context on disk."""
    index = driver.engine.loaded.loop.slot_kv.prefix_cache.index
    records = [node.record for node in index.nodes.values()]
    states = [r for r in records if isinstance(r, CheckpointMeta)]
    kv = sum(r.n_bytes for r in records if not isinstance(r, CheckpointMeta))
    return SessionBytes(kv, max((s.n_bytes for s in states), default=0))


def resumed(driver: Driver, history: tuple[int, ...]) -> tuple[int, CacheMiss | None]:
    """Tokens that the next turn reuses, and its miss; its answer is that of a cold one."""
    ask, whole = answered(driver, history)
    sent = whole[: len(history) + N_NEW]
    assert whole[len(sent) :] == tuple(driver.cold(sent, N_ANSWER))
    seated = driver.seated(ask)
    return seated.n_cached, seated.miss


@pytest.mark.parametrize("kind", KINDS)
def test_forty_turns_write_little_more_than_their_final_state(
    model_of: ModelOf, tmp_path: Path, kind: str
) -> None:
    preset = preset_of(model_of(kind), slots=SlotSpec(count=2, n_ctx=8192))
    home, crashed = tmp_path / "home", tmp_path / "crashed"
    with running(preset, home) as driver:
        history = session(driver)
        shutil.copytree(home, crashed)
        driver.engine.park().result()
        n_written = driver.engine.loaded.disk_tier.writing.n_written
        final = bytes_of(driver)
    assert n_written <= 1.2 * (final.kv + final.checkpoint)
    with running(preset, home) as driver:
        assert resumed(driver, history) == (len(history) - 1, None)
    with running(preset, crashed) as driver:
        n_reused, miss = resumed(driver, history)
        n_lost = len(history) - 1 - n_reused
        assert n_lost * final.kv / len(history) <= final.checkpoint / SHARE + final.kv / N_TURNS
        expected = CacheMiss(MissReason.NO_CHECKPOINT, n_reused, n_lost=n_lost)
        assert miss == (expected if n_lost else None)
