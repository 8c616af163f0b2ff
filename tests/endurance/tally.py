"""The books of a chaos: what the clients saw against what the service counted."""

from collections.abc import Mapping
from threading import Lock

import httpx
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families


class Counted(Struct, frozen=True):
    """The service's counters, and whether it has nothing to do."""

    is_idle: bool
    n_requests: int
    n_completed: int
    n_cancelled: int
    n_failed: int
    n_prompt: int
    n_cached: int
    n_generated: int


def read_counters(url: str, headers: Mapping[str, str] | None = None) -> Counted:
    """As they are now."""
    text = httpx.get(f"{url}/metrics", headers=headers).raise_for_status().text
    counters = {
        sample.name: int(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.endswith("_total") or sample.name.startswith("llamacpp:requests")
    }
    busy = counters["llamacpp:requests_processing"] + counters["llamacpp:requests_deferred"]
    return Counted(
        is_idle=not busy,
        n_requests=counters["mlxstack_requests_total"],
        n_completed=counters["mlxstack_requests_completed_total"],
        n_cancelled=counters["mlxstack_requests_cancelled_total"],
        n_failed=counters["mlxstack_requests_failed_total"],
        n_prompt=counters["llamacpp:prompt_tokens_total"],
        n_cached=counters["llamacpp:prompt_tokens_cached_total"],
        n_generated=counters["llamacpp:tokens_predicted_total"],
    )


class Tally:
    """Since a worker began. An unsure request may have been counted as anything, or not at all."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.n_whole = self.n_unsure = self.n_prompt = self.n_generated = 0

    def add(self, n_prompt: int, n_generated: int) -> None:
        """A client heard the end of its answer."""
        with self._lock:
            self.n_whole += 1
            self.n_prompt += n_prompt
            self.n_generated += n_generated

    def unsure(self) -> None:
        """A client left, or was refused."""
        with self._lock:
            self.n_unsure += 1

    def check(self, counted: Counted) -> None:
        """Raises AssertionError when the books do not agree."""
        assert counted.is_idle, f"{counted} after a long wait"
        ended = counted.n_completed + counted.n_cancelled + counted.n_failed
        assert counted.n_requests == ended, f"{counted}: {counted.n_requests} came, {ended} ended"
        seen = (self.n_whole, self.n_prompt, self.n_generated)
        expected = (counted.n_completed, counted.n_prompt + counted.n_cached, counted.n_generated)
        if self.n_unsure:
            assert counted.n_requests <= self.n_whole + self.n_unsure, f"{counted} against {seen}"
            assert all(own <= served for own, served in zip(seen, expected, strict=True)), (
                f"{counted} against {seen} and {self.n_unsure} unsure"
            )
        else:
            assert seen == expected, f"{counted} against {seen}"
