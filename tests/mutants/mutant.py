"""What a protection is, and how it is switched off."""

from msgspec import Struct


class Mutant(Struct, frozen=True):
    """Without `protection`: in `file`, `old`, which stands there once, becomes `new`."""

    protection: str
    file: str
    old: str
    new: str
    test: str
