"""Path of the decode step: that of a GPU, which schedules a step before the last one is read.

The path of a CPU runs in the tests of services (tests/api, tests/cli, tests/endurance).
"""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def step_ahead() -> Iterator[None]:
    """Schedule every step before the last one is read, as on a GPU."""
    from mlxstack.engine.decode import batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "has_gpu", lambda: True)
        yield
