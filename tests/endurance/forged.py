"""KV files and slot files that are forged, with right checksums: `... forged SEED ROUNDS`.

Whoever can write into a home, or an earlier fault, leaves files that are whole and false: other
shapes, types, ranges, parents, layouts and tokens. The next engine starts, refuses or ignores them,
and answers every prompt as from cold.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.commands import RestoreSlot, SaveSlot
from mlxstack.core.errors import StackError
from mlxstack.core.image import FIRST_VIRTUAL
from mlxstack.core.interfaces import KVFile, TensorBytes
from mlxstack.core.preset import SlotSpec
from mlxstack.core.prompt_tokens import ImageRange
from mlxstack.store import kv_file_format
from mlxstack.store.slot_files import SlotFileFolder
from tests import models
from tests.engine.harness import WAIT_S, Driver, preset_of, prompt, running

N_CTX = 1024
SLOTS = SlotSpec(count=2, n_ctx=N_CTX)
HEAD = prompt(200, seed=1)
TALKS = tuple(HEAD + prompt(n, seed=n) for n in (140, 190, 260))

Forgery = Callable[[KVFile, Random], KVFile]


class ForgedOutcome(Struct):
    """Files forged, answers compared, restores that were refused and that were done."""

    n_forged: int = 0
    n_compared: int = 0
    n_refused: int = 0
    n_restored: int = 0


def _tensor(file: KVFile, change: Callable[[TensorBytes], TensorBytes]) -> KVFile:
    return replace(file, tensors=(change(file.tensors[0]), *file.tensors[1:]))


def _meta(file: KVFile, **changed: Any) -> KVFile:
    meta = {**msgspec.json.decode(file.meta), **changed}
    return replace(file, meta=msgspec.json.encode(meta).decode())


def other_type(file: KVFile, _: Random) -> KVFile:
    """Bytes of the same number in another type."""
    name = {"F32": "U32", "U32": "F32"}.get(file.tensors[0].dtype, "I32")
    return _tensor(file, lambda tensor: replace(tensor, dtype=name))


def other_shape(file: KVFile, random: Random) -> KVFile:
    """The same bytes in other dimensions, or in another number of them."""

    def change(tensor: TensorBytes) -> TensorBytes:
        flat = memoryview(tensor.data).cast("B").nbytes
        n_items = flat // kv_file_format.ITEM_BYTES[tensor.dtype]
        shapes = [(n_items,), (1, n_items), (n_items, 1, 1, 1), (1, 1, 1, n_items)]
        return replace(tensor, shape=random.choice(shapes))

    return _tensor(file, change)


def no_tensors(file: KVFile, _: Random) -> KVFile:
    """None at all."""
    return replace(file, tensors=())


def one_more_tensor(file: KVFile, _: Random) -> KVFile:
    """One twice."""
    return replace(file, tensors=(*file.tensors, file.tensors[0]))


def no_bytes(file: KVFile, _: Random) -> KVFile:
    """A tensor without tokens."""
    return _tensor(file, lambda tensor: TensorBytes(tensor.dtype, (1, 1, 0, 1), memoryview(b"")))


def other_range(file: KVFile, random: Random) -> KVFile:
    """Tokens that the tensors do not have."""
    start, end = random.choice(
        [
            (file.start, file.end + 128), (file.start + 128, file.end), (file.end, file.start),
            (0, 10**17), (10**17, 10**17 + 1), (file.start, file.start), (1, file.end),
        ]
    )  # fmt: skip
    return replace(file, start=start, end=end)


def other_kind(file: KVFile, random: Random) -> KVFile:
    """A segment as a checkpoint, and others."""
    kinds = {"segment", "checkpoint", "", "x" * 1000} - {file.kind}
    return replace(file, kind=random.choice(sorted(kinds)))


def other_parent(file: KVFile, random: Random) -> KVFile:
    """Itself, nobody, or what is not there."""
    return _meta(file, parent=random.choice([file.key, None, "ab" * 32, "../../x", ""]))


def other_names(file: KVFile, random: Random) -> KVFile:
    """Block keys of nothing, too few, too many."""
    names = msgspec.json.decode(file.meta)["names"]
    return _meta(file, names=random.choice([[], ["zz"], names[1:], [*names, "00" * 32], [""]]))


def other_layout(file: KVFile, random: Random) -> KVFile:
    """An order of parts that the tensors do not have, or none."""
    layouts = ["", "[]", "{}", "[9]", "[-1]", "[0]", "null", "[[]]", '["a"]', "[" * 2000, "[0.5]"]
    return _meta(file, layout=random.choice(layouts))


def other_meta(file: KVFile, random: Random) -> KVFile:
    """No meta, or another struct."""
    return replace(file, meta=random.choice(["", "[]", "{}", "null", '{"parent":1}', "[" * 5000]))


def other_key(file: KVFile, _: Random) -> KVFile:
    """The key of another file."""
    return replace(file, key="cd" * 32)


def other_identity(file: KVFile, _: Random) -> KVFile:
    """Another model's."""
    return replace(file, identity="ef" * 16)


FORGERIES: tuple[Forgery, ...] = (
    other_type, other_shape, no_tensors, one_more_tensor, no_bytes, other_range, other_kind,
    other_parent, other_names, other_layout, other_meta, other_key, other_identity,
)  # fmt: skip


def forge(path: Path, forgery: Forgery, random: Random) -> None:
    """Replace a KV file by its forgery, whose checksum is right."""
    forged = forgery(kv_file_format.decode(path.read_bytes()), random)
    path.write_bytes(b"".join(kv_file_format.encode(forged)))


def forge_slot_file(shelf: SlotFileFolder, name: str, random: Random) -> None:
    """Replace a slot file by one with other tokens, images or keys."""
    manifest = shelf.read(name)
    n = len(manifest.tokens)
    image = ImageRange(5, n + 50, b"x" * 32)
    shelf.write(
        name,
        random.choice(
            [
                replace(manifest, tokens=(2**31,) * n),
                replace(manifest, tokens=(FIRST_VIRTUAL,) * n),
                replace(manifest, tokens=(FIRST_VIRTUAL,) * n, images=(image, image)),
                replace(manifest, tokens=manifest.tokens * 2),
                replace(manifest, tokens=()),
                replace(manifest, segments=manifest.segments[::-1]),
                replace(manifest, segments=manifest.segments[:1] * 3),
                replace(manifest, segments=()),
                replace(manifest, checkpoints=manifest.segments),
                replace(manifest, segments=("../../etc/passwd",)),
                replace(manifest, n_bytes=2**62),
                replace(manifest, salt="another tenant"),
            ]
        ),
    )


class Forger:
    """An engine's home that is forged between two runs."""

    def __init__(self, folder: Path, home: Path, seed: int) -> None:
        self._preset = preset_of(folder, slots=SLOTS)
        self._home = home
        self._random = Random(seed)
        self.did: list[str] = []
        self.outcome = ForgedOutcome()

    def round(self, forgery: Forgery) -> None:
        """Store contexts, forge some of their files, and ask a new engine."""
        with running(self._preset, self._home) as driver:
            for n, tokens in enumerate(TALKS):
                driver.answer(tokens, 4, slot=n % 2, agent=f"agent-{n}")
            driver.engine.run_slot_command(SaveSlot(0, "a.bin")).result(WAIT_S)
            driver.engine.park().result(WAIT_S)
        files = sorted((self._home / "kv").rglob("*.safetensors"))
        for path in self._random.sample(files, min(2, len(files))):
            forge(path, forgery, self._random)
            self.outcome.n_forged += 1
        forge_slot_file(SlotFileFolder(self._home / "slots"), "a.bin", self._random)
        self.did.append(forgery.__name__)
        with running(self._preset, self._home) as driver:
            self._restore(driver)
            for n, tokens in enumerate(TALKS):
                answer = driver.answer(tokens + prompt(9, seed=70 + n), 8)
                expected = driver.cold(tokens + prompt(9, seed=70 + n), 8, salt="cold")
                assert answer == expected, f"talk {n} after {self.did[-1]}"
                self.outcome.n_compared += 1

    def _restore(self, driver: Driver) -> None:
        try:
            driver.engine.run_slot_command(RestoreSlot(1, "a.bin")).result(WAIT_S)
            self.outcome.n_restored += 1
        except StackError as error:
            assert error.message
            self.outcome.n_refused += 1


def forged(folder: Path, home: Path, seed: int, n_rounds: int) -> ForgedOutcome:
    """Every forgery in turn, in one home."""
    forger = Forger(folder, home, seed)
    for n in range(n_rounds):
        forger.round(FORGERIES[n % len(FORGERIES)])
    return forger.outcome


if __name__ == "__main__":
    seed, n_rounds = (int(word) for word in sys.argv[1:3])
    root = Path(tempfile.mkdtemp(prefix="forged-"))
    for kind, config in (("plain", models.CONFIGS["tiny"]), ("hybrid", models.HYBRID)):
        folder = models.write(root / kind, {**config, "vocab_size": 1024})
        print(kind, forged(folder, root / f"{kind}-home", seed, n_rounds), flush=True)
