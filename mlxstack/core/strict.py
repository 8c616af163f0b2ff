"""Base of the sections of files that people write."""

from msgspec import Struct


class Strict(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """Base of every preset section."""
