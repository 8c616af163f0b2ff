"""Words of `up` about the context of a slot."""

import pytest

from tests.cli.terminal import Shell

pytestmark = [pytest.mark.mlx, pytest.mark.net]


def test_a_context_beyond_the_training_is_warned_of(shell: Shell) -> None:
    del shell.env["MLX_STACK_WORKER"]
    up = shell.up("--ctx", "64k", "--slots", "1")
    assert up.returncode == 0, up.stderr
    assert "warning: trained for 4096 tokens" in up.stderr
    assert shell.run("down").returncode == 0
    assert "trained for" not in shell.up().stderr
