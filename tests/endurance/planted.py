"""Faults planted in a running engine, and the scenes of `mlx-stack verify` that must find them."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace

from mlxstack.cli.doctor import CheckLevel
from mlxstack.cli.verification.identity import EXACT, N_NEW, Verifier, verified
from mlxstack.cli.verification.probe import EngineProbe, probe
from mlxstack.core.engine_events import KVSource
from mlxstack.core.preset import ModelSpec, Preset, SlotSpec, Speculation
from mlxstack.core.request import Caller
from mlxstack.engine.decode import batch
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.decode.sampler import Choice
from mlxstack.engine.kv.disk_tier import DiskTier
from mlxstack.engine.kv.park import ContextParker
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.kv.slot_restore import RestoreBuffers
from mlxstack.engine.slots.slot_kv_manager import SlotKVManager
from mlxstack.features.drafts.engine import draft_coordinator
from mlxstack.features.early_turns.engine import EarlyPrefill
from mlxstack.policy.kv import block_hash

DEMO = Preset(model=ModelSpec(id="demo"), name="demo", slots=SlotSpec(3, 4096))
Patch = pytest.MonkeyPatch


def shift(context: SlotContext) -> None:
    """Put every key one position behind its own."""
    for leaf in context.leaves:
        leaf.keys = mx.roll(leaf.keys, 1, axis=2)


def shifted_after(patch: Patch, owner: Any, name: str, find: Callable[..., SlotContext]) -> None:
    """Shift the context that `find` gives of the arguments and the result of a method."""
    real = getattr(owner, name)

    def wrong(*values: Any, **more: Any) -> Any:
        result = real(*values, **more)
        shift(find(result, *values))
        return result

    patch.setattr(owner, name, wrong)


def _mixed_rows(patch: Patch) -> None:
    real = Batch._forward

    def wrong(self: Batch, *values: Any) -> Any:
        logits, *more = real(self, *values)
        return mx.roll(logits, 1, axis=0), *more

    patch.setattr(Batch, "_forward", wrong)


def _one_salt(patch: Patch) -> None:
    real = block_hash.salt
    patch.setattr(block_hash, "salt", lambda identity, _tenant: real(identity, ""))


def _unchecked(patch: Patch) -> None:
    """Accept whole drafts, and bring them to each pass at any measured cost."""

    def accepted(draft: Sequence[int], choices: Sequence[Choice]) -> list[int]:
        return [*draft, int(choices[-1].token.item())]

    patch.setattr(batch, "_accepted", accepted)
    patch.setattr(
        draft_coordinator, "widths", lambda offers, *_: [offer.n_tokens for offer in offers]
    )


FAULTS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "a hit off by one": (
        lambda patch: shifted_after(patch, SlotContext, "rewind", lambda _, self, *__: self),
        "hits",
    ),
    "a fork off by one": (
        lambda patch: shifted_after(patch, SlotContext, "fork_from", lambda _, self, *__: self),
        "hits",
    ),
    "a parked context off by one": (
        lambda patch: shifted_after(
            patch, ContextParker, "restore_context", lambda _, __, to, *___: to
        ),
        "hits",
    ),
    "a lost parked context": (
        lambda patch: patch.setattr(SlotKVManager, "park", lambda *_, **__: None),
        "hits",
    ),
    "a wrong salt": (_one_salt, "tenant"),
    "a slot file off by one": (
        lambda patch: shifted_after(patch, RestoreBuffers, "load", lambda result, *_: result),
        "slot_file",
    ),
    "rows of a batch mixed up": (_mixed_rows, "batch"),
    "an early turn off by one": (
        lambda patch: shifted_after(
            patch, EarlyPrefill, "_compute", lambda _, self, slot, *__: self._loop.slots[slot]
        ),
        "early_turn",
    ),
    "a draft that is not checked": (_unchecked, "drafts"),
    "a disk that is forgotten": (
        lambda patch: patch.setattr(DiskTier, "open", lambda _self: 0),
        "restart",
    ),
}
SCENES = ("batch", "hits", "tenant", "slot_file", "early_turn", "drafts")


@contextmanager
def verified_engine(home: Path, preset: Preset = DEMO) -> Iterator[EngineProbe]:
    """A preset as it is verified, with drafts."""
    with probe(replace(verified(preset), speculation=Speculation.AUTO), home) as engine:
        yield engine


def faulty(engine: EngineProbe, fault: str | None, scenes: Sequence[str], seed: int) -> list[str]:
    """Subjects of the checks that fail, with the fault or without any."""
    run = Verifier(engine, EXACT, lambda _: None, seed)
    tokens = run.prompt()
    cold = engine.cold(tokens)
    with Patch.context() as patch:
        if fault is not None:
            FAULTS[fault][0](patch)
        for scene in scenes:
            run.drafts(tokens, cold) if scene == "drafts" else getattr(run, scene)()
    return _bad(run)


def faulty_restart(home: Path, fault: str | None, preset: Preset = DEMO) -> list[str]:
    """The same of an engine that finds the files of another one."""
    with verified_engine(home, preset) as engine:
        before = Verifier(engine, EXACT, lambda _: None)
        prompt = before.prompt()
        prompt += engine.ask(
            prompt, slot=0, caller=Caller(agent="verify"), display_name="verify"
        ).tokens
        later = prompt + before.random_tokens(N_NEW)
    with Patch.context() as patch:
        if fault is not None:
            FAULTS[fault][0](patch)
        with verified_engine(home, preset) as engine:
            run = Verifier(engine, EXACT, lambda _: None)
            run.reuse("restart", later, len(prompt) - 1, KVSource.DISK, slot=0)
    return _bad(run)


def _bad(run: Verifier) -> list[str]:
    return [check.subject for check in run.checks if check.verdict is CheckLevel.BAD]


def planted() -> str:
    """Plant every fault on the demo. Raises AssertionError for one that is not found."""
    with tempfile.TemporaryDirectory() as folder, verified_engine(Path(folder)) as engine:
        assert not faulty(engine, None, SCENES, 0)
        for seed, (fault, (_, scene)) in enumerate(FAULTS.items(), 1):
            if scene != "restart":
                assert faulty(engine, fault, (scene,), seed), f"{fault} is not found"
        assert not faulty(engine, None, SCENES, len(FAULTS) + 1), "a fault is left behind"
    for is_planted in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            fault = "a disk that is forgotten" if is_planted else None
            assert bool(faulty_restart(Path(folder), fault)) == is_planted
    return f"{len(FAULTS)} faults are found"
