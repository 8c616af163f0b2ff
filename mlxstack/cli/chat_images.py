"""Images of `chat`: files, and their paths in a prompt."""

import base64
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from msgspec import Struct

from mlxstack.core.errors import NotFound, TooLarge, Unsupported
from mlxstack.core.formatting import printable, size

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif"})

# A path as terminals paste it: in quotes, or with a backslash before each space. The marks that end
# a sentence are no part of it.
PATH = re.compile(
    r"""(?<!\S)(?:'(?P<single>[^'\n]+)'|"(?P<double>[^"\n]+)"|(?P<bare>(?:\\.|[^\s\\'"])+?)(?=[?!.,;:)]*(?:\s|$)))"""
)
STARTS = ("/", "~/", "./", "../", "file://")


class ChatImage(Struct, frozen=True):
    """Image file of a prompt: its name, and its encoded bytes."""

    name: str
    data: bytes
    media_type: str

    @property
    def part(self) -> dict[str, Any]:
        """Content part of a message in OpenAI's form."""
        url = f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"
        return {"type": "image_url", "image_url": {"url": url}}

    @property
    def title(self) -> str:
        """Name and size for people."""
        return f"{printable(self.name, 60)} ({size(len(self.data))})"


class PromptPaths(Struct, frozen=True):
    """Files that a prompt names, and its text without folders."""

    text: str
    files: tuple[Path, ...] = ()
    missing: tuple[str, ...] = ()


def read_image(file: Path) -> ChatImage:
    """Read an image file. Raises NotFound, TooLarge, Unsupported."""
    from mlxstack.text.images.bounds import MAX_BYTES, image_format

    file = file.expanduser()
    if not _is_file(file):
        raise NotFound(f"there is no file {printable(str(file))}; give the path of an image")
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise NotFound(f"{printable(str(file))} cannot be read ({error.strerror})") from error
    if len(data) > MAX_BYTES:
        raise TooLarge(
            f"{printable(file.name)} is larger than {size(MAX_BYTES)}, the most of an image; "
            "scale it down"
        )
    kind = image_format(data)
    if kind is None:
        raise Unsupported(
            f"{printable(file.name)} is no PNG, JPEG, WebP or GIF; convert it to PNG first"
        )
    return ChatImage(file.name, data, f"image/{kind.lower()}")


def named_files(text: str) -> list[Path]:
    """One path with spaces, or several in a shell's form."""
    whole = Path(text).expanduser()
    if _is_file(whole):
        return [whole]
    try:
        return [Path(word) for word in shlex.split(text)]
    except ValueError:
        return [whole]


def paths_in(text: str) -> PromptPaths:
    """Find paths of image files as a terminal pastes them."""
    files: list[Path] = []
    missing: list[str] = []

    def name_of(match: re.Match[str]) -> str:
        path = _path(match)
        if path is None:
            return match[0]
        if not _is_file(path):
            missing.append(str(path))
            return match[0]
        files.append(path)
        return path.name

    shortened = PATH.sub(name_of, text)
    return PromptPaths(shortened, tuple(files), tuple(missing))


def _path(match: re.Match[str]) -> Path | None:
    """Path of an image file that the words spell, else None."""
    word = match["single"] or match["double"] or re.sub(r"\\(.)", r"\1", match["bare"] or "")
    if not word.startswith(STARTS):
        return None
    if word.startswith("file://"):
        word = unquote(word.removeprefix("file://"))
    path = Path(word)
    if path.suffix.lower() in SUFFIXES:
        return path.expanduser()
    return None


def _is_file(path: Path) -> bool:
    """Whether it is a file; False for impossible names."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
