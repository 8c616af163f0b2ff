"""KV budget of a service beside the other running services of its home."""

import logging
import os
from pathlib import Path

from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.formatting import size
from mlxstack.core.preset import Preset
from mlxstack.host import services
from mlxstack.host.home import Home
from mlxstack.host.memory_budget import this_memory
from mlxstack.planner.memory_check import claim_of, claims_in
from mlxstack.policy.memory.memory_shares import kv_budgets

log = logging.getLogger("mlxstack.tasks")

OWN = ""
"""Name of this service in the division."""


class Neighbors:
    """Watches which services run in a home, and divides its memory again."""

    def __init__(self, home: Path) -> None:
        self._home = Home(home)
        self._known: object = None

    def planned_again(self, preset: Preset, engine: object) -> int | None:
        """KV budget of this service after a change; None without one, or if unknown.

        A new `engine` has the budget of a service alone.
        """
        known = services.served(self._home), preset, engine
        if known == self._known:
            return None
        self._known = known
        memory = this_memory(os.environ)
        others = claims_in(self._home, memory, preset.name)
        try:
            own = claim_of(preset, memory, OWN)
        except (SetupError, BadRequest) as why:
            log.info("the other services of the home are not counted: %s", why.message)
            return None
        budget = kv_budgets((own, *others), memory.usable)[OWN]
        log.info("KV may take %s beside %d other services", size(budget), len(others))
        return budget
