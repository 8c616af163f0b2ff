"""Sizes, ages and shares in few cells; foreign text without control characters."""

NONE = "-"


def size(n_bytes: float) -> str:
    """Bytes as `0 B`, `64 KiB`, `1.5 MiB` or `12.0 GiB`."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        value = n_bytes / 2**power
        if value >= 1:
            is_whole = value >= 99.95 or (power < 30 and value == int(value))
            if is_whole:
                return f"{value:.0f} {unit}"
            return f"{value:.1f} {unit}"
    return f"{n_bytes:.0f} B"


def count(n: float) -> str:
    """Number of tokens, requests or calls: `812`, `9.4k`, `131k`, `1.2M`."""
    for unit, factor in (("M", 1e6), ("k", 1e3)):
        if n >= factor * 0.9995:
            value = n / factor
            if value < 99.95:
                return f"{value:.1f}{unit}"
            return f"{value:.0f}{unit}"
    return f"{n:.0f}"


def tokens(n: int) -> str:
    """Context length: `32k` of 1,024 where exact, else all digits."""
    return f"{n // 1024}k" if n and n % 1024 == 0 else str(n)


def span(seconds: float) -> str:
    """`4s`, `3m12s`, `2h05m`, `3d04h`."""
    whole = int(max(0.0, seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def age(seconds: float) -> str:
    """Coarse age, `15s`, `3m`, `2h`, `4d`, so that tables rarely change."""
    whole = int(max(0.0, seconds))
    if whole < 60:
        return f"{whole - whole % 5}s"
    for unit, factor, end in (("m", 60, 3600), ("h", 3600, 86400)):
        if whole < end:
            return f"{whole // factor}{unit}"
    return f"{whole // 86400}d"


def short_time(seconds: float) -> str:
    """`3ms`, `1.24s`, `12.4s`, `3m12s`: six cells at most."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    return f"{seconds:.1f}s" if seconds < 59.95 else span(seconds)


def share(part: float, whole: float) -> str:
    """Percentage rounded down, `42%`; a dash without a whole."""
    return f"{int(part * 100 / whole)}%" if whole else NONE


def printable(text: str, width: int | None = None) -> str:
    """Escape control characters of foreign text; cut it to `width`.

    Escape sequences, line ends and characters that turn the direction of writing have no effect.
    """
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if width is None or len(escaped) <= width:
        return escaped
    return escaped[: max(0, width - 1)] + "…"


def clipped(text: str, width: int) -> str:
    """Text cut in the middle to `width` characters: beginnings may be alike."""
    if len(text) <= width:
        return text
    n_end = max(0, width - 1) // 3
    return text[: max(0, width - 1 - n_end)] + "…" + text[len(text) - n_end :]


def printable_lines(text: str) -> str:
    """Escape control characters, but keep line ends and tabs."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text
    )
