"""Sizes in binary units, and foreign text without control characters."""


def size(n_bytes: float) -> str:
    """Bytes as `0 B`, `64 KiB`, `1.5 MiB` or `12.0 GiB`."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        value = n_bytes / 2**power
        if value >= 1:
            is_whole = value >= 99.95 or (power < 30 and value == int(value))
            return f"{value:.0f} {unit}" if is_whole else f"{value:.1f} {unit}"
    return f"{n_bytes:.0f} B"


def printable(text: str, width: int | None = None) -> str:
    """Escape control characters of foreign text; cut it to `width`.

    Escape sequences, line ends and characters that turn the direction of writing have no effect.
    """
    kept = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if width is None or len(kept) <= width:
        return kept
    return kept[: max(0, width - 1)] + "…"


def printable_lines(text: str) -> str:
    """Escape control characters, but keep line ends and tabs."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
