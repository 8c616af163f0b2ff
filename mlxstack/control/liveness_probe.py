"""Liveness probe: reports a worker that is stuck."""

import json
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from msgspec import Struct

from mlxstack.host.service_state import RestartPolicy

LOADING = "Loading model"
"""Answers of llama-server and ours during loads, which may take hours."""


class HealthProbe(Struct, frozen=True):
    """Result of /health: `is_well` below status 500, or while loading.

    `said` is its complaint; None when it did not answer at all. Who refuses us is alive too.
    """

    is_well: bool = False
    said: str | None = None


def probe(url: str, timeout_s: float) -> HealthProbe:
    """Probe a worker's health with timeout `timeout_s` per phase."""
    try:
        with closing(HTTPConnection(urlsplit(url).netloc, timeout=timeout_s)) as caller:
            caller.request("GET", "/health")
            answer = caller.getresponse()
            said = _complaint(answer.read())
            return HealthProbe(answer.status < 500 or said == LOADING, said)
    except (OSError, HTTPException):
        return HealthProbe()


class LivenessMonitor:
    """The looks at one worker, one every `look_s` seconds.

    Probes are counted instead of seconds: a computer that sleeps is not stuck.
    """

    def __init__(self, patience: RestartPolicy) -> None:
        self._patience = patience
        self._has_spoken = False
        self._n_silent = 0
        self._n_ill = 0

    def observe(self, beat: HealthProbe) -> str | None:
        """Reason why the worker now counts as stuck, else None."""
        is_silent = beat.said is None
        self._has_spoken = self._has_spoken or not is_silent
        self._n_silent = self._n_silent + 1 if is_silent else 0
        self._n_ill = 0 if beat.is_well else self._n_ill + 1
        patience = self._patience
        if self._has_spoken and self._n_silent * patience.look_s >= patience.silent_s:
            return f"has not answered for {patience.silent_s:g} s"
        if self._n_ill * patience.look_s >= patience.stuck_s:
            what = "has not answered" if is_silent else f"says `{beat.said}`"
            return f"has not been healthy for {patience.stuck_s:g} s and {what}"
        return None


def _complaint(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""
