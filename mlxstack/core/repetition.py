"""Detection of a text that has degenerated into repeating itself."""

LOOK = 4000
"""Characters of the end that are looked at."""

PROBE = 24
"""Characters whose previous occurrence gives the period."""

COPIES = 10
MIN_CHARS = 600
"""Equal copies, and characters that they cover."""


def repeated(text: str) -> str:
    """The phrase that the end of `text` repeats, or "".

    Bounded: two comparisons of at most `LOOK` characters.
    """
    tail = text[-LOOK:]
    position = tail.rfind(tail[-PROBE:], 0, len(tail) - 1)
    if position < 0:
        return ""
    period = len(tail) - PROBE - position
    span = max(COPIES * period, MIN_CHARS)
    is_repeated = len(tail) >= span and tail[-span:-period] == tail[period - span :]
    return tail[-period:] if is_repeated else ""
