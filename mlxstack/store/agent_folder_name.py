"""Agent ids as folder names: readable, reversible, distinct without case.

":" becomes "=", a leading "." becomes "+", and capitals become small letters, followed by "~"
and their positions as bits in hexadecimal: "Bob:1" is "bob=1~1".
"""

import re

AGENT = re.compile(r"[A-Za-z0-9._:-]{1,128}")
FOLDER = re.compile(r"(?P<stem>[a-z0-9+_=-][a-z0-9._=-]{0,127})(?:~(?P<bits>[0-9a-f]{1,32}))?")


def is_agent(agent: str) -> bool:
    """Whether `agent` is a possible id."""
    return AGENT.fullmatch(agent) is not None


def folder_of(agent: str) -> str:
    """The folder name of a possible id."""
    stem = agent.lower().replace(":", "=")
    stem = "+" + stem[1:] if stem.startswith(".") else stem
    bits = sum(1 << at for at, letter in enumerate(agent) if letter.isupper())
    return f"{stem}~{bits:x}" if bits else stem


def name_of(folder: str) -> str | None:
    """The id whose folder this is, or None for a foreign folder."""
    match = FOLDER.fullmatch(folder)
    if match is None:
        return None
    stem, bits = match["stem"].replace("=", ":").replace("+", "."), int(match["bits"] or "0", 16)
    agent = "".join(letter.upper() if bits >> at & 1 else letter for at, letter in enumerate(stem))
    return agent if folder_of(agent) == folder else None
