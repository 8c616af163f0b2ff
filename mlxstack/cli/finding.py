"""One thing that `doctor` found, and how bad it is."""

from enum import StrEnum

from msgspec import Struct


class Verdict(StrEnum):
    """BAD must be repaired; WARN may cost speed or comfort."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


class Finding(Struct, frozen=True):
    """`remedy` is what to do; empty when nothing is to be done."""

    verdict: Verdict
    subject: str
    detail: str
    remedy: str = ""
