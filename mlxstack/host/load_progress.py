"""Progress of a load, for its log and for limits of time."""

import logging
import time

log = logging.getLogger(__name__)

EVERY_S = 2.0
"""Seconds between two reports of one step."""


class LoadProgress:
    """Steps of one load, logged. Thread-safe.

    `n_reports` grows as long as the load goes on, and `step` is its last step.
    """

    def __init__(self) -> None:
        self.n_reports = 0
        self.step = ""
        self._reported_at = 0.0

    def report(self, step: str) -> None:
        self.step = step
        self._reported_at = time.monotonic()
        self.n_reports += 1
        log.info("%s", step)

    def report_seldom(self, step: str) -> None:
        """Report how far the step is, at most every `EVERY_S` seconds."""
        if time.monotonic() - self._reported_at >= EVERY_S:
            self.report(step)
