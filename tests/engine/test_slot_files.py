"""Save, restore, erase: what is restored goes on exactly as if nothing had happened (C1 to C12)."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from mlxstack.core.commands import (
    EraseSlot,
    RestoreSlot,
    SaveSlot,
    SlotEraseResult,
    SlotRestoreResult,
    SlotSaveResult,
)
from mlxstack.core.engine_events import KVSource, TokenSampled
from mlxstack.core.errors import BadRequest, Damaged, NotFound
from mlxstack.core.interfaces import TensorBytes
from mlxstack.core.preset import KVSpec, Preset
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.slot_files import SlotFileFolder
from tests.conftest import ModelOf
from tests.engine.harness import Driver, preset_of, prompt, running
from tests.patience import PATIENCE_S
from tests.repetition import in_soak

MORE = in_soak("tiny", "tiny-sinks", "tiny-mla", "tiny-8bit")
KINDS = ["tiny-swa", "tiny-hybrid", "tiny-later", *MORE]
PRECISIONS = {
    "tiny-8bit": KVSpec(bits=8, group_size=32),
    "tiny-later": KVSpec(bits=4, group_size=32, quantized_start=100),
}
FIRST = prompt(200, seed=1)
OTHER = prompt(90, seed=2)
NEXT = prompt(30, seed=3)


@pytest.fixture(params=KINDS)
def preset(request: pytest.FixtureRequest, model_of: ModelOf) -> Preset:
    kv = PRECISIONS.get(request.param)
    return preset_of(model_of("tiny" if kv else request.param), kv=kv or KVSpec())


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def driver(model_of: ModelOf, home: Path) -> Iterator[Driver]:
    with running(preset_of(model_of("tiny")), home) as driver:
        yield driver


def save(driver: Driver, slot: int, name: str) -> SlotSaveResult:
    saved = driver.engine.run_slot_command(SaveSlot(slot, name)).result(timeout=PATIENCE_S)
    assert isinstance(saved, SlotSaveResult)
    return saved


def restore(driver: Driver, slot: int, name: str) -> SlotRestoreResult:
    restored = driver.engine.run_slot_command(RestoreSlot(slot, name)).result(timeout=PATIENCE_S)
    assert isinstance(restored, SlotRestoreResult)
    return restored


def test_c4_c6_restart_and_another_slot_go_on_as_if_nothing_had_happened(
    preset: Preset, home: Path
) -> None:
    with running(preset, home) as driver:
        answer = tuple(driver.answer(FIRST, slot=0))
        follow_up = FIRST + answer + NEXT
        uninterrupted = driver.answer(follow_up, slot=1, use_cache=False)
        saved = save(driver, 0, "a.bin")
        assert saved.n_saved == driver.engine.snapshot().slots[0].n_tokens
        assert saved.n_saved == len(FIRST + answer) - 1
    with running(preset, home) as driver:
        restored = restore(driver, 2, "a.bin")
        assert restored.n_restored == saved.n_saved
        assert restored.n_read == saved.n_bytes
        ask = driver.submit(follow_up, slot=2)
        driver.finish(ask)
        # At shutdown the uninterrupted run went to disk too, and reaches further where it can.
        assert driver.seated(ask).n_cached >= saved.n_saved
        assert driver.tokens(ask) == uninterrupted


def test_c5_evicted_by_another_then_restored(preset: Preset, home: Path) -> None:
    with running(preset, home) as driver:
        answer = tuple(driver.answer(FIRST, slot=0))
        save(driver, 0, "a.bin")
        driver.answer(OTHER, slot=0)
        restore(driver, 0, "a.bin")
        follow_up = FIRST + answer + NEXT
        ask = driver.submit(follow_up, slot=0)
        driver.finish(ask)
        assert driver.seated(ask).n_cached == len(FIRST + answer) - 1
        assert driver.seated(ask).source is KVSource.SLOT
        assert driver.tokens(ask) == driver.cold(follow_up, slot=1)


def test_c1_a_second_save_writes_only_what_is_new(driver: Driver) -> None:
    first = tuple(driver.answer(FIRST, slot=0))
    whole = save(driver, 0, "a.bin")
    assert whole.n_written >= whole.n_bytes
    driver.answer(FIRST + first + NEXT, slot=0)
    second = save(driver, 0, "a.bin")
    grown = second.n_bytes - whole.n_bytes
    assert 0 < grown < whole.n_bytes / 3
    # Beside the new KV: a file header, and the slot file with all tokens.
    assert grown <= second.n_written <= grown + 4096


def test_z9_ten_turns_with_a_save_after_each(driver: Driver) -> None:
    history = prompt(300, seed=9)
    n_written = 0
    for turn in range(10):
        history += tuple(driver.answer(history, slot=0))
        saved = save(driver, 0, "a.bin")
        n_written += saved.n_written
        history += prompt(20, seed=turn)
    assert n_written <= 1.2 * saved.n_bytes


def test_c7_a_missing_file_is_harmless(driver: Driver) -> None:
    driver.answer(FIRST, slot=0)
    before = driver.context(0)
    with pytest.raises(NotFound, match=r"nothing\.bin"):
        restore(driver, 0, "nothing.bin")
    assert driver.context(0) == before
    assert driver.engine.snapshot().slots[0].n_tokens == len(before)


def test_c8_a_damaged_kv_file_leaves_the_slot_as_it_was(driver: Driver, home: Path) -> None:
    driver.answer(FIRST, slot=0)
    save(driver, 0, "a.bin")
    file = next((home / "kv").rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    before = driver.context(0)
    with pytest.raises(Damaged, match="damaged"):
        restore(driver, 0, "a.bin")
    assert driver.context(0) == before


def test_c8_missing_kv_leaves_the_slot_as_it_was(driver: Driver, home: Path) -> None:
    driver.answer(FIRST, slot=0)
    save(driver, 0, "a.bin")
    shutil.rmtree(home / "kv")
    before = driver.context(0)
    with pytest.raises(Damaged, match="gone"):
        restore(driver, 0, "a.bin")
    assert driver.context(0) == before
    assert save(driver, 0, "a.bin").n_written > 0
    assert restore(driver, 1, "a.bin").n_restored == len(before)


@pytest.mark.parametrize("kind", ["other weights", "other precision"])
def test_c8_g6_a_foreign_file_is_refused(
    driver: Driver, home: Path, model_of: ModelOf, kind: str, tmp_path: Path
) -> None:
    from tests.models import build

    driver.answer(FIRST, slot=0)
    save(driver, 0, "a.bin")
    model = build(tmp_path / "b", "tiny", seed=5) if kind == "other weights" else model_of("tiny")
    kv = KVSpec(bits=8, group_size=32) if kind == "other precision" else KVSpec()
    with running(preset_of(model, kv=kv), home) as foreign:
        foreign.answer(OTHER, slot=0)
        before = foreign.context(0)
        with pytest.raises(Damaged, match="another model"):
            restore(foreign, 0, "a.bin")
        assert foreign.context(0) == before


def test_d23_a_restored_slot_is_still_its_tenants(driver: Driver) -> None:
    def n_cached(slot: int, **more: object) -> int:
        ask = driver.submit(FIRST + answer + NEXT, slot=slot, **more)
        driver.finish(ask)
        assert driver.tokens(ask) == cold
        return int(driver.seated(ask).n_cached)

    answer = tuple(driver.answer(FIRST, slot=0, salt="one"))
    cold = driver.cold(FIRST + answer + NEXT, slot=1)
    saved = save(driver, 0, "a.bin")
    driver.engine.run_slot_command(EraseSlot(1)).result(timeout=PATIENCE_S)
    restore(driver, 0, "a.bin")
    assert n_cached(1) == 0
    assert n_cached(0, salt="two") == 0
    restore(driver, 0, "a.bin")
    assert n_cached(0, salt="one") == saved.n_saved
    restore(driver, 0, "a.bin")
    driver.answer(OTHER, slot=0)
    assert n_cached(2, salt="one") >= 128


def test_c9_bad_names_are_refused(driver: Driver) -> None:
    driver.answer(OTHER, slot=0)
    for name in ("../x", "/etc/x", "a\0b", "x" * 300, "", "."):
        with pytest.raises(BadRequest):
            save(driver, 0, name)
        with pytest.raises(BadRequest):
            restore(driver, 0, name)
    assert driver.answer(OTHER, slot=0) == driver.cold(OTHER, slot=0)


def test_c10_an_empty_slot_can_be_saved_and_restored(driver: Driver) -> None:
    assert save(driver, 2, "empty.bin").n_saved == 0
    driver.answer(OTHER, slot=0)
    assert restore(driver, 0, "empty.bin").n_restored == 0
    assert driver.context(0) == ()


def test_c11_a_busy_slot_is_saved_when_it_is_idle(driver: Driver) -> None:
    ask = driver.submit(FIRST, 64, slot=0)
    driver.until(ask, TokenSampled)
    saved = save(driver, 0, "a.bin")
    driver.finish(ask)
    assert saved.n_saved == len(FIRST) + 63


def test_c11_three_slots_at_once(driver: Driver) -> None:
    for slot in range(3):
        driver.answer(prompt(100 + slot, seed=slot), slot=slot)
    saving = [driver.engine.run_slot_command(SaveSlot(slot, f"{slot}.bin")) for slot in range(3)]
    assert [s.result(timeout=PATIENCE_S).n_saved for s in saving] == [  # type: ignore[union-attr]
        len(driver.context(slot)) for slot in range(3)
    ]


def test_c12_erase(driver: Driver) -> None:
    driver.answer(FIRST, slot=0)
    n_tokens = len(driver.context(0))
    assert driver.engine.run_slot_command(EraseSlot(0)).result(
        timeout=PATIENCE_S
    ) == SlotEraseResult(0, n_tokens)
    ask = driver.submit(FIRST, slot=0)
    assert driver.seated(ask).n_cached == 0
    driver.finish(ask)


def test_a_file_of_more_tokens_than_a_slot_holds_is_refused(
    driver: Driver, home: Path, model_of: ModelOf
) -> None:
    driver.answer(FIRST, slot=0)
    save(driver, 0, "a.bin")
    preset = preset_of(model_of("tiny"))
    small = msgspec.structs.replace(preset, slots=msgspec.structs.replace(preset.slots, n_ctx=128))
    with running(small, home) as other, pytest.raises(BadRequest, match="128"):
        restore(other, 0, "a.bin")


def test_a_context_that_reuses_part_of_a_longer_segment_is_saved_and_restored(
    driver: Driver, home: Path
) -> None:
    driver.answer(FIRST, 4, slot=0)
    save(driver, 0, "long.bin")
    driver.answer(FIRST[:150] + OTHER[:10], 4, slot=0)
    saved = save(driver, 0, "short.bin")
    before = driver.context(0)
    driver.engine.run_slot_command(EraseSlot(0)).result(timeout=PATIENCE_S)
    assert restore(driver, 0, "short.bin").n_restored == saved.n_saved
    assert driver.context(0) == before
    tokens = before + NEXT
    assert driver.answer(tokens, slot=0) == driver.cold(tokens, slot=1)


def test_c8_files_that_do_not_fit_together_are_refused_and_stay(driver: Driver, home: Path) -> None:
    first = tuple(driver.answer(FIRST, slot=0))
    save(driver, 0, "a.bin")
    driver.answer(FIRST + first + NEXT, slot=0)
    save(driver, 0, "a.bin")
    manifest = SlotFileFolder(home / "slots").read("a.bin")
    vault = DiskKVStore(home / "kv")
    last = vault.read(manifest.identity, manifest.segments[-1])
    half = tuple(
        TensorBytes(p.dtype, (*p.shape[:3], p.shape[3] // 2), bytes(p.data)[: len(p.data) // 2])
        for p in last.tensors
    )
    vault.path_of(manifest.identity, last.key).unlink()
    vault.write(msgspec.structs.replace(last, tensors=half))
    with pytest.raises(Damaged, match="is not of this model"):
        restore(driver, 1, "a.bin")
    assert all(vault.has(manifest.identity, key) for key in manifest.segments)
