"""Which names a slot file may have: the rules of llama-server, which no traversal survives."""

import re
import unicodedata

from mlxstack.core.errors import BadRequest

FORBIDDEN = re.compile(
    '[/\\\\:*?"<>|\x00-\x1f\x7f-\x9f\uff0e\u2215\u2216\ufffd\ufeff\ud800-\udfff]'
)
MAX_BYTES = 255


def check_filename(name: str) -> None:
    """Raises BadRequest when `name` is not a safe file name."""
    if reason := _objection(name):
        raise BadRequest(f"Invalid filename: {reason}", "filename")


def normalized(name: str) -> str:
    """The name in one Unicode normalization: macOS sends NFD where others send NFC."""
    return unicodedata.normalize("NFC", name)


def folded(name: str) -> str:
    """A key that is equal for names that are one file on a volume that ignores case (APFS)."""
    return normalized(normalized(name).casefold())


def _objection(name: str) -> str:
    if found := FORBIDDEN.search(name):
        return f"it contains {found.group()!a}"
    n_bytes = len(name.encode())
    if not 1 <= n_bytes <= MAX_BYTES:
        return f"it has {n_bytes} bytes, 1 to {MAX_BYTES} are allowed"
    if ".." in name or name.endswith("."):
        return 'it contains ".." or ends with "."'
    if name != name.strip(" "):
        return "it begins or ends with a space"
    return ""
