"""Counts the structs that one streamed chat makes, by type, before and after its first token.

`main` prints them as JSON. It is a program of its own, since every struct of the package must be
made after `msgspec.Struct` counts.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

MADE: list[str] = []
N_TOKENS = 12


class CountedStruct(msgspec.Struct):
    """Base of all structs, which notes each of the package that is made, decoded or changed.

    Those that Litestar makes of the parameters of a handler bear its module, which has no such
    class.
    """

    def __post_init__(self) -> None:
        kind = type(self)
        is_ours = kind.__module__.startswith("mlxstack.")
        if is_ours and hasattr(sys.modules[kind.__module__], kind.__name__):
            MADE.append(kind.__name__)


def main() -> None:
    """Count the second chat; the first compiles templates and measures steps."""
    msgspec.Struct = CountedStruct  # type: ignore[misc]
    import httpx
    import pytest

    from tests.api.running import running
    from tests.one_chat import PRESET, let_intervals_rest, stream, user
    from tests.patience import PATIENCE_S

    ask = "/v1/chat/completions"
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        let_intervals_rest(monkeypatch)
        with (
            running(PRESET, Path(folder)) as live,
            httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http,
        ):
            stream(http, ask, messages=user("Good morning."), max_tokens=N_TOKENS)
            MADE.clear()
            stream(http, ask, messages=user("Hello, who are you?"), max_tokens=N_TOKENS)
            made = tuple(MADE)
    first = made.index("TokenSampled")
    found: dict[str, Any] = {"before": Counter(made[:first]), "after": Counter(made[first:])}
    json.dump(found, sys.stdout)
