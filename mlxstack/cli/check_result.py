"""Results of checks, as `doctor` and `verify` show them."""

from enum import StrEnum

from msgspec import Struct


class CheckLevel(StrEnum):
    """BAD must be repaired; WARN may cost speed or comfort."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


class CheckResult(Struct, frozen=True):
    """`remedy` is what to do; empty when nothing is to be done."""

    verdict: CheckLevel
    subject: str
    detail: str
    remedy: str = ""
