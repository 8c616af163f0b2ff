"""Progress of a download as text: percent, bytes, speed, ETA."""

import threading

from mlxstack.core.formatting import size, span


class Transfer:
    """Thread-safe; the hub's client reports from several threads. `began` is monotonic."""

    def __init__(self, n_total: int, began: float) -> None:
        self.n_total = n_total
        self.n_done = 0
        self.began = began
        self._lock = threading.Lock()

    def add(self, n_bytes: int) -> None:
        """Count bytes that came in."""
        with self._lock:
            self.n_done = min(self.n_done + n_bytes, self.n_total)

    def text(self, now: float) -> str:
        """Progress as text: `38 %, 6.2 GiB of 16.4 GiB, 95 MiB/s`."""
        n_done = self.n_done
        elapsed = max(now - self.began, 1e-3)
        speed = n_done / elapsed
        parts = [f"{100 * n_done // max(self.n_total, 1)} %"]
        parts += [f"{size(n_done)} of {size(self.n_total)}", f"{size(speed)}/s"]
        if speed:
            parts.append(f"{span((self.n_total - n_done) / speed)} left")
        return ", ".join(parts)
