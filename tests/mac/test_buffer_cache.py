"""MLX's buffer cache under Metal's policy: freed buffers are kept until the process empties it."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import pytest
from msgspec.structs import replace

from mlxstack.core.engine_events import TokenSampled
from mlxstack.core.preset import (
    DiskSpec,
    KVSpec,
    ModelSpec,
    PrefillSpec,
    PrefixCacheSpec,
    SlotSpec,
    Speculation,
)
from mlxstack.engine import device, loop, thread
from mlxstack.engine.decode import batch, remembered_checks
from mlxstack.engine.decode.prefill import PreparedChunk
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.loading import loader
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.policy.kv.eviction import MemoryPressure
from tests.conftest import ModelOf
from tests.engine.harness import preset_of, prompt, running
from tests.models import LLAMA, VOCAB, write
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.mlx

WIDE = {"num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 64}
IN_MEMORY = PrefixCacheSpec(disk=DiskSpec(enabled=False))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose KV is large beside its weights."""
    return write(tmp_path_factory.mktemp("wide") / "model", LLAMA | WIDE)


@pytest.fixture(autouse=True)
def metal_policy() -> Iterator[None]:
    """The cache limit as Metal has it by default: as good as none."""
    mx.clear_cache()
    before = mx.set_cache_limit(16 * 2**30)
    yield
    mx.set_cache_limit(before)
    mx.clear_cache()


class Chunks:
    """Measures every prefill chunk: workspace, cached bytes before it, room of the first layer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workspaces: list[int] = []
        self.cached: list[int] = []
        self.rooms: list[int] = []
        self._compute = loop.compute_chunks
        monkeypatch.setattr(loop, "compute_chunks", self)

    def __call__(self, rows: batch.Batch, chunks: Sequence[PreparedChunk]) -> None:
        self.cached.append(mx.get_cache_memory())
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        self._compute(rows, chunks)
        self.workspaces.append(mx.get_peak_memory() - before)
        self.rooms.append(chunks[0].context.leaves[0].keys.shape[2])


def test_cached_buffers_stay_within_the_workspace_of_one_chunk(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = Chunks(monkeypatch)
    preset = preset_of(
        wide, slots=SlotSpec(count=2, n_ctx=8192), prefill=PrefillSpec(chunk_size=128)
    )
    with running(preset, tmp_path) as driver:
        driver.cold(prompt(4500), 4)
        workspace = max(*chunks.workspaces, device.MIN_BOUND)
        assert len(chunks.cached) > 10
        assert max(chunks.cached) <= 1.25 * workspace
        assert mx.get_cache_memory() <= 1.25 * workspace


def test_kv_room_is_allocated_once_for_the_whole_prompt(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = Chunks(monkeypatch)
    preset = preset_of(wide, slots=SlotSpec(count=1, n_ctx=8192), prefix_cache=IN_MEMORY)
    # Answers that are kept to draft from count as live bytes too.
    preset = replace(preset, speculation=Speculation.OFF)
    with running(preset, tmp_path) as driver:
        driver.answer(prompt(3000), 4)
        assert set(chunks.rooms[1:]) == {3072}
        seating = driver.engine.loaded.loop.slot_kv
        assert seating.live_bytes == 3072 * seating.bytes_per_token
        n_logits = 4 * VOCAB
        assert driver.engine.snapshot().kv_bytes == 3072 * seating.bytes_per_token + n_logits
        driver.answer(prompt(50, seed=1), 4)
        # The parked copy is of the tokens, without the room after them.
        assert seating.prefix_cache.index.memory_bytes == 3003 * seating.bytes_per_token


def test_room_is_what_admission_counted(wide: Path, tmp_path: Path) -> None:
    with running(preset_of(wide, slots=SlotSpec(count=1, n_ctx=8192)), tmp_path) as driver:
        ask = driver.submit(prompt(2000), 700)
        driver.until(ask, TokenSampled, 300)
        seating = driver.engine.loaded.loop.slot_kv
        live = driver.engine.loaded.loop._requests[ask].request
        assert seating.need(live) == seating.slots[0].cache_bytes
        driver.engine.cancel(ask)
        driver.finish(ask)


@pytest.mark.parametrize("bits", [4, 8])
def test_no_16_bit_room_is_reserved_beyond_the_turning_point(
    wide: Path, bits: Literal[4, 8]
) -> None:
    model = loader.load(ModelSpec(id=str(wide)), KVSpec()).model
    context = SlotContext(
        CacheFactory(model, KVSpec(bits=bits, group_size=32, quantized_start=300))
    )
    tokens = prompt(400)
    model(mx.array([tokens[:100]]), cache=context.caches)
    context.extend(tokens[:100])
    context.reserve(5000)
    assert context.leaves[0].keys.shape[2] == 512
    model(mx.array([tokens[100:300]]), cache=context.caches)
    context.extend(tokens[100:300])
    context.reserve(5000)
    assert {part.shape[2] for part in context.leaves[0].keys} == {5120}
    model(mx.array([tokens[300:]]), cache=context.caches)
    assert {part.shape[2] for part in context.leaves[0].keys} == {5120}
    assert context.leaves[0].offset == 400


def test_reserved_room_changes_no_answer(wide: Path, tmp_path: Path) -> None:
    with running(preset_of(wide), tmp_path) as driver:
        whole = driver.cold(prompt(900), 12)
        driver.answer(prompt(900)[:500], 3, slot=1)
        assert driver.answer(prompt(900), 12, slot=1) == whole


def test_buffers_are_released_on_the_mlx_thread_after_the_step_in_flight(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "has_gpu", lambda: True)
    calls: list[tuple[str, str, bool]] = []

    def record(name: str) -> None:
        original = getattr(mx, name)

        def wrapper(*args: Any) -> Any:
            loaded = engines[0]._loaded if engines else None
            is_flying = loaded is not None and bool(loaded.loop.batch.in_flight)
            calls.append((name, threading.current_thread().name, is_flying))
            return original(*args)

        monkeypatch.setattr(mx, name, wrapper)

    engines: list[Any] = []
    record("synchronize")
    record("clear_cache")
    with running(preset_of(model_of("tiny")), tmp_path) as driver:
        engines.append(driver.engine)
        alone = [driver.cold(prompt(300, seed=n), 30) for n in range(3)]
        # As if every turn left more cached bytes than a chunk needs.
        driver.engine.loaded.loop.max_cached_bytes = -1
        asks = [driver.submit(prompt(300, seed=n), 30, use_cache=False) for n in range(3)]
        driver.until(asks[0], TokenSampled, 3)
        driver.engine.cache.reclaim(MemoryPressure.HIGH).result(PATIENCE_S)
        for ask in asks:
            driver.finish(ask)
        assert [driver.tokens(ask) for ask in asks] == alone
        device.active_bytes()
    cleared = [position for position, call in enumerate(calls) if call[0] == "clear_cache"]
    assert len(cleared) > 20
    for position in cleared:
        assert calls[position][1:] == ("mlx", False)
        assert calls[position - 1] == ("synchronize", "mlx", False)


def test_buffers_of_the_self_check_are_released_at_load(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    for target, name in (
        (mx, "clear_cache"),
        (remembered_checks, "self_check"),
        (thread.EngineThread, "_serve"),
    ):
        monkeypatch.setattr(target, name, _recorded(events, name, getattr(target, name)))
    with running(preset_of(model_of("tiny-swa")), tmp_path) as driver:
        driver.answer(prompt(20), 4)
    assert events[0] == "self_check"
    assert events[events.index("_serve") - 1] == "clear_cache"


def _recorded(events: list[str], name: str, original: Any) -> Any:
    def call(*args: Any) -> Any:
        events.append(name)
        return original(*args)

    return call
