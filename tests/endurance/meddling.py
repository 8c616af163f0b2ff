"""Somebody meddles with the files of a running service: flips, cuts and deletes them."""

from contextlib import suppress
from pathlib import Path
from random import Random

KINDS = ("kv/*/*/*.safetensors", "slots/*", "agents/*/*/manifest.json", "kv/*/note")


def meddle(home: Path, random: Random) -> str:
    """Spoil one file by chance; what was done, "" when there was none."""
    found: list[Path] = []
    with suppress(FileNotFoundError):  # an agent may be deleted while we look
        found.extend(path for path in home.glob(random.choice(KINDS)) if path.is_file())
    if not found:
        return ""
    path = random.choice(sorted(found))
    how = random.choice((flip, cut, stretch, delete))
    with suppress(FileNotFoundError):
        how(path, random)
    return f"{how.__name__} {path.relative_to(home)}"


def flip(path: Path, random: Random) -> None:
    """One bit is another, in place, as a medium does it."""
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        if size:
            at = random.randrange(size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << random.randrange(8)]))


def cut(path: Path, random: Random) -> None:
    """The end is missing."""
    with path.open("r+b") as file:
        file.truncate(random.randrange(file.seek(0, 2) + 1))


def stretch(path: Path, random: Random) -> None:
    """There is something behind the end."""
    with path.open("ab") as file:
        file.write(random.randbytes(random.randrange(1, 100)))


def delete(path: Path, _random: Random) -> None:
    """It is gone."""
    path.unlink()
