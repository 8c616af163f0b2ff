"""Engine tests of this feature run as those of `tests/engine`."""

from tests.engine.conftest import eager_stacks, padded_rows, step_ahead

__all__ = ["eager_stacks", "padded_rows", "step_ahead"]
