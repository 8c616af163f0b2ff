"""Repetition rule with smaller bounds, for tests of its surroundings."""

from functools import partial

import pytest

from mlxstack.features.loops import engine, policy

MAX_SHORT = 64
"""Tokens after which a repetition of a short period is too long here."""
PROBE = 32


def end_sooner(patch: pytest.MonkeyPatch) -> None:
    """Let answers that repeat themselves end after `MAX_SHORT` tokens."""
    patch.setattr(policy, "MAX_SHORT", MAX_SHORT)
    patch.setattr(engine, "RepetitionRule", partial(policy.RepetitionRule, PROBE))
