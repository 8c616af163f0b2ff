"""Limits of a worker: restarts, and time without health."""

from msgspec import Struct


class RestartPolicy(Struct, frozen=True):
    """Limits of a worker, in seconds: crashes, and time without health."""

    first_s: float = 0.5
    """Delay of the first restart; doubles with each crash."""
    longest_s: float = 30.0
    max_crashes: int = 5
    """Crashes within `window_s` after which the supervisor gives up."""
    window_s: float = 600.0
    grace_s: float = 12.0
    """A worker that was asked to stop is killed after this time."""
    look_s: float = 5.0
    """Interval of health probes."""
    silent_s: float = 30.0
    """Time without an answer after which a worker is killed."""
    stuck_s: float = 150.0
    """Time neither healthy nor loading: by then it has failed every request that waits."""
