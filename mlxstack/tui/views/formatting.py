"""Numbers and foreign names in as few cells as a person needs."""

from mlxstack.core.formatting import printable, size

BLOCKS = " ▏▎▍▌▋▊▉█"
STEPS = "▁▂▃▄▅▆▇█"
NONE = "-"


def tokens(n: float) -> str:
    """`812`, `9.4k`, `131k`, `1.2M`."""
    for unit, factor in (("M", 1e6), ("k", 1e3)):
        if n >= factor * 0.9995:
            value = n / factor
            return f"{value:.1f}{unit}" if value < 99.95 else f"{value:.0f}{unit}"
    return f"{n:.0f}"


def of_size(n_bytes: float, bound: float) -> str:
    """`7.4/12.8 GiB` where both have one unit, else `45 MiB/12.8 GiB`."""
    part, whole = size(n_bytes), size(bound)
    number, _, unit = part.partition(" ")
    return f"{number}/{whole}" if whole.endswith(f" {unit}") else f"{part}/{whole}"


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


def short_time(seconds: float) -> str:
    """`3ms`, `1.24s`, `12.4s`, `3m12s`: six cells at most."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 9.995:
        return f"{seconds:.2f}s"
    return f"{seconds:.1f}s" if seconds < 59.95 else span(seconds)


def share(part: float, whole: float) -> str:
    """`42%`, or a dash when there is no whole. Rounded down: only all of it is 100%."""
    return f"{int(part * 100 / whole)}%" if whole else NONE


def rate(per_second: float) -> str:
    """Tokens per second: `4.2`, `43`, `1.2k`."""
    return f"{per_second:.1f}" if per_second < 99.95 else tokens(per_second)


def bar(part: float, whole: float, width: int) -> str:
    """A bar of `width` cells, filled to an eighth of a cell."""
    filled = min(1.0, max(0.0, part / whole)) * width * 8 if whole else 0.0
    full, rest = divmod(round(filled), 8)
    tail = BLOCKS[rest] if full < width and rest else ""
    return ("█" * full + tail).ljust(width, "░")


def starred(name: str, *, is_pinned: bool) -> str:
    """A foreign name; a star before it says that it is pinned."""
    return f"* {printable(name, 60)}" if is_pinned else printable(name, 60)


def plot(values: tuple[float | None, ...], height: int) -> tuple[str, ...]:
    """Columns of a chart from zero to the largest value, as lines from the top."""
    top = max((value for value in values if value), default=0.0) or 1.0
    levels = [None if v is None else max(0, round(v / top * height * 8)) for v in values]
    return tuple("".join(_piece(level, row) for level in levels) for row in reversed(range(height)))


def _piece(level: int | None, row: int) -> str:
    """A floor is drawn where something was seen, even if it was nothing."""
    if level is None:
        return " "
    inside = min(8, level - row * 8)
    if inside > 0:
        return STEPS[inside - 1]
    return "▁" if row == 0 else " "
