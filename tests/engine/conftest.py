"""Path of the decode step: that of a GPU, which gets a step before the last one is read.

Rows are stacked after few steps, however uneven, and padded for all linear layers. The path of a
CPU and the usual rules run in the tests of services (tests/api, tests/cli, tests/endurance).
"""

from collections.abc import Iterator
from functools import partial

import pytest


@pytest.fixture(scope="module", autouse=True)
def step_ahead() -> Iterator[None]:
    """Submit every step before the last one is read, as on a GPU."""
    from mlxstack.engine.decode import batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "has_gpu", lambda: True)
        yield


@pytest.fixture(scope="module", autouse=True)
def eager_stacks() -> Iterator[None]:
    """Stack rows after two steps, one layer in each from then on."""
    from mlxstack.engine import assembly
    from mlxstack.features.row_stacks.engine import RowStacker
    from mlxstack.features.row_stacks.policy import StackingRules

    rules = StackingRules(repaid_bytes=1 << 60, building_bytes=1, most_padding=10**6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "RowStacker", partial(RowStacker, rules=rules))
        yield


@pytest.fixture(scope="module", autouse=True)
def padded_rows() -> Iterator[None]:
    """Pad the rows of all linear layers, as if their BLAS were fast at multiples of 16 only."""
    from mlxstack.engine.model import padded_linear

    seconds = [1.0 if n < 2 or n % 16 == 0 else 2.0 for n in range(33)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(padded_linear, "MIN_WEIGHTS", 0)
        patch.setattr(padded_linear, "measured_seconds", lambda layers: seconds)
        yield
