"""A disk that fails at one operation, and files that are spoiled while an engine serves.

Every answer is the one from cold, a refused save is refused in words, and a fresh engine on a
sound disk answers each agent and each slot file that was acknowledged.
"""

import errno
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec import Struct

from mlxstack.core.commands import RestoreSlot, SaveSlot
from mlxstack.core.errors import SetupError, StackError
from mlxstack.core.preset import SlotSpec
from mlxstack.store.files import Disk
from tests.endurance.aftermath import check_answers
from tests.endurance.meddling import meddle
from tests.engine.harness import WAIT_S, Driver, preset_of, prompt, running

N_CTX = 512
N_AGENTS = 3
ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS)
CALLS = ("open", "replace", "rename", "mkdir", "unlink")
"""System calls about names of files, which no `Disk` sees."""


class FaultOutcome(Struct, frozen=True):
    """Operations of a run, faults that were met, saves refused, files spoiled."""

    n_ops: int = 0
    n_met: int = 0
    n_refused: int = 0
    n_spoiled: int = 0


class FaultyDisk(Disk):
    """Fails at operation `first`, and at all later ones where `is_lasting`."""

    def __init__(self, first: int = -1, code: int = 0, *, is_lasting: bool = False) -> None:
        self._at = first
        self._code = code
        self._is_lasting = is_lasting
        self.n_ops = self.n_met = 0

    def write(self, fd: int, data: memoryview) -> int:
        self._count()
        return super().write(fd, data)

    def sync(self, fd: int) -> None:
        self._count()
        super().sync(fd)

    def read(self, fd: int) -> bytes:
        self._count()
        return super().read(fd)

    def _count(self) -> None:
        self.n_ops += 1
        if self.n_ops == self._at or (self._is_lasting and 0 < self._at < self.n_ops):
            self.n_met += 1
            raise OSError(self._code, os.strerror(self._code))


def disk_faults(model: Path, home: Path, n_faults: int, n_turns: int, seed: int) -> FaultOutcome:
    """A run for each of `n_faults` operations that fail, chosen by chance."""
    random = Random(seed)
    sound = FaultyDisk()
    cold = _serve(model, home / "sound", sound, n_turns)[0]
    n_met = n_refused = 0
    for number in range(n_faults):
        first = random.randrange(1, sound.n_ops + 1)
        code = ERRORS[number % len(ERRORS)]
        disk = FaultyDisk(first, code, is_lasting=code != errno.EIO)
        answers, saved, n_failed = _serve(model, home / f"{number}", disk, n_turns)
        assert answers == cold, f"operation {first} failed with {errno.errorcode[code]}"
        n_met += disk.n_met > 0
        n_refused += n_failed
        check_answers(model, home / f"{number}", N_CTX, N_AGENTS, dict.fromkeys(saved))
        shutil.rmtree(home / f"{number}")
    return FaultOutcome(sound.n_ops, n_met, n_refused)


class FaultyCalls:
    """Call `name` fails at its use `first` below a folder, and at all later ones where lasting."""

    def __init__(self, folder: Path, name: str = "", first: int = 0, code: int = 0) -> None:
        self._folder = str(folder)
        self._name = name
        self._at = first
        self._code = code
        self.n_uses: Counter[str] = Counter()
        self.n_met = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Fail the calls of this process meanwhile."""
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, self._failing(name, getattr(os, name)))
            yield

    def _failing(self, name: str, real: Any) -> Any:
        def call(path: Any, *more: Any, **named: Any) -> Any:
            if str(path).startswith(self._folder):
                self.n_uses[name] += 1
                is_lasting = self._code != errno.EIO and 0 < self._at < self.n_uses[name]
                if name == self._name and (is_lasting or self.n_uses[name] == self._at):
                    self.n_met += 1
                    raise OSError(self._code, os.strerror(self._code), str(path))
            return real(path, *more, **named)

        return call


def call_faults(model: Path, home: Path, n_faults: int, n_turns: int, seed: int) -> FaultOutcome:
    """As `disk_faults`, of calls about names; a start that is refused is refused in words."""
    random = Random(seed)
    sound = FaultyCalls(home / "sound")
    with sound.installed():
        cold = _serve(model, home / "sound", FaultyDisk(), n_turns)[0]
    used = [name for name in CALLS if sound.n_uses[name]]
    n_met = n_refused = 0
    for number in range(n_faults):
        name = used[number % len(used)]
        code = random.choice(ERRORS)
        folder = home / f"{number}"
        first = random.randrange(1, sound.n_uses[name] + 1)
        calls = FaultyCalls(folder, name, first, code)
        saved = list[str]()
        try:
            with calls.installed():
                answers, saved, n_failed = _serve(model, folder, FaultyDisk(), n_turns)
        except SetupError as error:
            assert error.message
            n_failed = 1
        else:
            assert answers == cold, f"{name} {first} failed with {errno.errorcode[code]}"
        n_met += calls.n_met > 0
        n_refused += n_failed
        check_answers(model, folder, N_CTX, N_AGENTS, dict.fromkeys(saved))
        shutil.rmtree(folder)
    return FaultOutcome(sum(sound.n_uses.values()), n_met, n_refused)


def spoiled_files(model: Path, home: Path, n_turns: int, seed: int) -> FaultOutcome:
    """Files are flipped, cut, stretched and deleted between the turns of one engine."""
    random = Random(seed)
    cold = _serve(model, home / "sound", FaultyDisk(), n_turns)[0]
    spoils: list[str] = []
    answers, _, n_refused = _serve(
        model, home / "spoiled", FaultyDisk(), n_turns,
        between=lambda: spoils.append(meddle(home / "spoiled", random)),
    )  # fmt: skip
    assert answers == cold, spoils
    check_answers(model, home / "spoiled", N_CTX, N_AGENTS, [])
    return FaultOutcome(n_refused=n_refused, n_spoiled=sum(map(bool, spoils)))


def _serve(
    model: Path, home: Path, disk: Disk, n_turns: int, between: object = None
) -> tuple[list[list[int]], list[str], int]:
    """Answers of all turns, the acknowledged slot files, and the number of refusals."""
    home.mkdir(parents=True)
    answers = []
    saved = list[str]()
    n_refused = 0
    preset = preset_of(model, slots=SlotSpec(count=2, n_ctx=N_CTX))
    with running(preset, home, disk=disk) as driver:
        for turn in range(n_turns):
            answers.append(_turn(driver, turn))
            name = f"{turn % N_AGENTS}.bin"
            try:
                driver.engine.run_slot_command(SaveSlot(turn % 2, name)).result(timeout=WAIT_S)
                saved.append(name)
            except StackError as error:
                n_refused += 1
                assert error.message
            if callable(between):
                driver.catch_up()
                between()
            with suppress(StackError):
                restore = RestoreSlot(turn % 2, f"{(turn + 1) % N_AGENTS}.bin")
                driver.engine.run_slot_command(restore).result(timeout=WAIT_S)
    return answers, saved, n_refused


def _turn(driver: Driver, turn: int) -> list[int]:
    agent = turn % N_AGENTS
    tokens = prompt(150, seed=agent) + prompt(20 + 7 * turn, seed=turn)
    return driver.answer(tokens, 4, agent=f"agent-{agent}")
