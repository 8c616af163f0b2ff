"""Somebody meddles with the files of a running service: flips, cuts and deletes them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

How = Callable[[Path, Random], None]
KINDS = ("kv/*/*/*.safetensors", "slots/*", "agents/*/*/manifest.json", "kv/*/note")


def meddle(
    home: Path, random: Random, kinds: Sequence[str] = KINDS, hows: Sequence[How] | None = None
) -> str:
    """Spoil one file by chance; what was done, "" when there was none."""
    paths: list[Path] = []
    with suppress(FileNotFoundError):  # an agent may be deleted while we look
        paths.extend(path for path in home.glob(random.choice(kinds)) if path.is_file())
    if not paths:
        return ""
    path = random.choice(sorted(paths))
    way = random.choice(hows or (flip, cut, stretch, delete))
    with suppress(FileNotFoundError):
        way(path, random)
    return f"{way.__name__} {path.relative_to(home)}"


def flip(path: Path, random: Random) -> None:
    """One bit is another, in place, as a medium does it."""
    with path.open("r+b") as file:
        size = file.seek(0, 2)
        if size:
            offset = random.randrange(size)
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
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


def empty(path: Path, _random: Random) -> None:
    """It has no bytes."""
    path.write_bytes(b"")


def swap(path: Path, random: Random) -> None:
    """It has the contents of another file of its kind, and that one has its own."""
    candidates = [
        candidate
        for candidate in path.parent.parent.glob(f"*/*{path.suffix}")
        if candidate.is_file()
    ]
    candidates += [candidate for candidate in path.parent.iterdir() if candidate.is_file()]
    partner = random.choice(sorted(candidates))
    aside = path.with_name("..aside")
    path.rename(aside)
    if partner != path:
        partner.rename(path)
        aside.rename(partner)
    else:
        aside.rename(path)


def block(path: Path, _random: Random) -> None:
    """A folder with something in it has its place."""
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("kept")


def link(path: Path, _random: Random) -> None:
    """A link that leads nowhere has its place."""
    path.unlink()
    path.symlink_to(path.parent / "nowhere")


def forbid(path: Path, _random: Random) -> None:
    """Its owner may not read it."""
    path.chmod(0)


EVERY_WAY = (flip, cut, stretch, delete, empty, swap, block, link, forbid)
