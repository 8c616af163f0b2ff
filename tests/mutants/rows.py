"""Every protection with the way to switch it off, and the test that must fail then."""

import tomllib
from pathlib import Path

from msgspec import Struct, convert


class Mutant(Struct, frozen=True):
    """Without `protection`: in `file`, `old`, which stands there once, becomes `new`."""

    protection: str
    file: str
    old: str
    new: str
    test: str


MUTANTS = [
    mutant
    for path in sorted(Path(__file__).parent.glob("*.toml"))
    for mutant in convert(tomllib.loads(path.read_text("utf-8"))["mutants"], list[Mutant])
]
